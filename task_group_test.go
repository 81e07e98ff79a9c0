package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// TestGroupWakes: a waiting claim gets the next task of a group when the task before it has ended.
func TestGroupWakes(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		ids := queuetest.Produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2")...)
		l := queuetest.ClaimNow(t, q, "a")
		got := waitingClaim(t, q, "a")
		queuetest.Complete(t, q, l)
		require.Equal(t, ids[1], (<-got).ID)
		queuetest.RequireSettled(t, q)
	})
}

// TestGroupRedriven: a redriven dead letter queues up in its group again, in its original place.
func TestGroupRedriven(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ids := queuetest.Produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		l := queuetest.ClaimNow(t, q, "a")
		require.Equal(t, ids[1], l.ID)
		require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		queuetest.RequireSettled(t, q)
		require.Equal(t, codeq.Blocked, stateOf(t, q, ids[0]))
		queuetest.Complete(t, q, l)
		requireNext(t, q, "a", "1", "3")
		queuetest.RequireSettled(t, q)

		dead := queuetest.Produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "4", "5")...)[0]
		require.NoError(t, q.DeadLetter(t.Context(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		synctest.Wait()
		require.NoError(t, q.Cancel(t.Context(), dead), "it has no turn to pass on")
		queuetest.RequireSettled(t, q)
		requireNext(t, q, "a", "5")
		queuetest.RequireNoGroups(t, q)
	})
}

// TestGroupsBeyondMemory: with more groups than memory holds, their turns are read from disk.
func TestGroupsBeyondMemory(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&codeq.Options{WindowTasks: 1 << 17}, inspect.Private{FS: crashfs.New()})
		q := queuetest.OpenForRun(t, opts)
		const followed, batch = 50, 5000
		most := engine.MostTurns()
		groups := most + 500
		produceAll := func(n int, payload string) {
			for from := 0; from < n; from += batch {
				var tasks []codeq.Task
				for i := from; i < min(from+batch, n); i++ {
					tasks = append(tasks, codeq.Task{Queue: "a", Group: fmt.Sprint(i * 997 % groups), Payload: []byte(payload)})
				}
				_, err := q.ProduceBatch(t.Context(), tasks)
				require.NoError(t, err)
			}
		}
		held := func() (n int, whole bool) {
			require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				u := s.Rules.Probe().Usage().Groups
				n, whole = u.Held, u.Whole
				return nil
			}))
			return n, whole
		}
		produceAll(groups, "first")
		n, whole := held()
		require.False(t, whole)
		require.LessOrEqual(t, n, most)
		produceAll(followed, "second")
		queuetest.RequireSettled(t, q)

		for range 2 {
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, followed, counts["a"].Blocked)
			require.NoError(t, q.Close())
			q = queuetest.OpenForRun(t, opts)
			queuetest.RequireSettled(t, q)
			_, whole = held()
			require.False(t, whole)
		}
		for i := range followed {
			l := queuetest.ClaimNow(t, q, "a")
			require.Equal(t, fmt.Sprint(i*997%groups), l.Group)
			require.Equal(t, "first", string(l.Payload))
			queuetest.Complete(t, q, l)
		}
		for i := range followed { // in their places, which come after the first ones of all other groups
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			if i == 0 {
				require.Equal(t, "first", string(l.Payload))
			}
		}
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Zero(t, counts["a"].Blocked)
		require.EqualValues(t, groups-followed, counts["a"].Ready)
		n, _ = held()
		require.LessOrEqual(t, n, most)
		queuetest.RequireSettled(t, q)
	})
}

// TestTurnPassesInOneCommit: the commit that ends a task makes the next one of its group ready,
// without a read. Waiting tasks that are not in memory are read several at a time.
func TestTurnPassesInOneCommit(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const waiting = 10 * store.WaitersAhead
		for range waiting + 1 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Group: "g"})
		}
		step := func() (reads int, commits uint64) {
			l := queuetest.ClaimNow(t, q, "a")
			reads, commits = readsOf(t, q), inspect.Of(q).Commits()
			queuetest.Complete(t, q, l)
			synctest.Wait()
			return readsOf(t, q) - reads, inspect.Of(q).Commits() - commits
		}
		for i := range store.WaitersAhead {
			reads, commits := step()
			require.Zero(t, reads, i)
			require.EqualValues(t, 1, commits, i)
		}
		all := 0
		for range waiting - store.WaitersAhead {
			reads, _ := step()
			all += reads
		}
		require.Less(t, all, 2*waiting)
		require.NoError(t, queuetest.CheckMemory(q))
		step()
		queuetest.RequireSettled(t, q)
		queuetest.RequireNoGroups(t, q)
	})
}

// TestGroupHeldRepair: a repair finds the holder of a turn, even if the entry for it is lost. A
// ready task goes before a dead letter that claims to hold the turn.
func TestGroupHeldRepair(t *testing.T) {
	for _, ready := range []bool{false, true} {
		disk := crashfs.New()
		opts := queuetest.OnDisk(disk, &codeq.Options{Shards: 1})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		queuetest.Configure(t, q, "a", holdGroups)
		like := codeq.Task{Queue: "a", Group: "g"}
		ids := queuetest.Produce(t, q, named(like, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.Close())

		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			key, _ := queuetest.First(t, db, keys.Group, nil)
			require.NoError(t, db.Delete(key, nil))
			if ready {
				key, value := queuetest.First(t, db, keys.Blocked, nil)
				_, _, id, err := keys.ParseGrouped(key)
				require.NoError(t, err)
				lane, rec, err := keys.SplitLane(value)
				require.NoError(t, err)
				require.NoError(t, db.Delete(key, nil))
				require.NoError(t, db.Set(keys.AppendTask(nil, lane, keys.SinceOf(id), id), rec, nil))
			}
		})
		require.False(t, queuetest.VerifyImage(t, disk, false).OK())
		require.True(t, queuetest.VerifyImage(t, disk, true).OK())
		require.True(t, queuetest.VerifyImage(t, disk, false).OK())

		q, err = codeq.Open("queue", opts)
		require.NoError(t, err)
		order := []string{"1", "2", "3"}
		if ready {
			require.Equal(t, codeq.Ready, stateOf(t, q, ids[1]))
			order = []string{"2", "1", "3"}
		} else {
			require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		}
		require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		for _, name := range order {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, name, string(l.Payload))
			queuetest.Complete(t, q, l)
		}
		queuetest.Quiesce(t, q)
		queuetest.RequireNoGroups(t, q)
		require.NoError(t, errors.Join(queuetest.CheckAll(q), queuetest.CheckMemory(q), q.Close()))
	}
}

func holdGroups(s *codeq.Settings) { s.HoldGroups = true }

// TestGroupHeld: with HoldGroups, a group waits for its dead letter after any kind of death, and
// goes on in order after any end of the dead letter.
func TestGroupHeld(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	deaths := map[string]func(p *queuetest.Process, l *codeq.Lease){
		"given up": func(p *queuetest.Process, l *codeq.Lease) {
			require.NoError(p.T, p.DeadLetter(ctx, l.Receipt, errors.New("boom")))
		},
		"out of attempts": func(p *queuetest.Process, l *codeq.Lease) {
			require.NoError(p.T, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}))
			l = p.Take("a")
			require.NoError(p.T, p.Retry(ctx, l.Receipt, codeq.RetryOptions{}))
		},
		"expired": func(p *queuetest.Process, _ *codeq.Lease) {
			p.Pass(time.Minute)
			p.Take("a")
			p.Pass(time.Minute)
		},
	}
	ends := map[string]struct {
		first string // the first task that is handled then
		end   func(p *queuetest.Process, id codeq.ID)
	}{
		"redriven":         {"1", func(p *queuetest.Process, id codeq.ID) { require.NoError(p.T, p.RedriveDead(ctx, id)) }},
		"all are redriven": {"1", func(p *queuetest.Process, _ codeq.ID) { p.EachDead(p.RedriveAllDead, codeq.DeadFilter{}) }},
		"some are redriven, at a rate": {"1", func(p *queuetest.Process, id codeq.ID) {
			p.EachDead(p.RedriveAllDead, codeq.DeadFilter{
				Queue: "a", Tenants: []string{""}, Rate: 2, Match: func(t *codeq.TaskInfo) bool { return t.ID == id },
			})
		}},
		"purged":   {"2", func(p *queuetest.Process, _ codeq.ID) { p.EachDead(p.PurgeDead, codeq.DeadFilter{}) }},
		"canceled": {"2", func(p *queuetest.Process, id codeq.ID) { require.NoError(p.T, p.Cancel(ctx, id)) }},
	}
	for death, die := range deaths {
		for name, c := range ends {
			if death != "given up" && name != "redriven" { // how it died makes no difference to the end
				continue
			}
			t.Run(death+", "+name, func(t *testing.T) {
				queuetest.ThroughSteps(t, codeq.Options{Shards: 2, MaxAttempts: 2}, func(t *testing.T, p *queuetest.Process) {
					queuetest.Configure(t, p.Queue, "a", holdGroups)
					ids := queuetest.Produce(t, p.Queue, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2")...)
					p.Step()
					die(p, p.Take("a"))
					p.Step()
					require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked}, []codeq.State{p.StateOf(ids[0]), p.StateOf(ids[1])})
					ids = append(ids, queuetest.Produce(t, p.Queue, named(codeq.Task{Queue: "a", Group: "g"}, "3")...)...)
					p.Step()
					require.Equal(t, codeq.Blocked, p.StateOf(ids[2]))
					require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))

					c.end(p, ids[0])
					p.Step()
					order := []string{"1", "2", "3"}
					if c.first == "2" {
						order = order[1:]
					}
					requireNext(t, p.Queue, "a", order...)
					p.Step()
					queuetest.RequireNoGroups(t, p.Queue)
				})
			})
		}
	}
}
