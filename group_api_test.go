package codeq_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// TestGroupOneAtATime: of a group one task is ready or leased, in the order of
// produce, and others do not wait for it.
func TestGroupOneAtATime(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3", "4")...)
		produce(t, q, named(codeq.Task{Queue: "a", Group: "h"}, "h1", "h2")...)
		produce(t, q, named(codeq.Task{Queue: "a"}, "free", "free")...)
		requireSettled(t, q)

		held := make(map[string]*codeq.Lease)
		for range 4 {
			l := claimNow(t, q, "a")
			require.NotNil(t, l)
			held[string(l.Payload)+l.ID.String()] = l
			require.Contains(t, []string{"1", "h1", "free"}, string(l.Payload))
		}
		require.Nil(t, claimNow(t, q, "a"))
		require.Len(t, held, 4)
		for _, id := range ids[1:] {
			require.Equal(t, codeq.Blocked, stateOf(t, q, id))
		}
		for _, l := range held {
			if l.Group != "h" {
				complete(t, q, l)
			}
		}
		requireSettled(t, q)
		requireNext(t, q, "a", "2", "3", "4")
		requireSettled(t, q)
	})
}

// TestGroupTurn: which ends of a lease pass the turn on. The others leave it with
// the task until its last attempt, while the group waits.
func TestGroupTurn(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name   string
		passes bool
		end    func(q *codeq.Queue, l *codeq.Lease) error
	}{
		{"complete", true, func(q *codeq.Queue, l *codeq.Lease) error { return q.Complete(ctx, l.Receipt, nil) }},
		{"dead letter", true, func(q *codeq.Queue, l *codeq.Lease) error { return q.DeadLetter(ctx, l.Receipt, nil) }},
		{"cancel", true, func(q *codeq.Queue, l *codeq.Lease) error { return q.Cancel(ctx, l.ID) }},
		{"cancel between attempts", true, func(q *codeq.Queue, l *codeq.Lease) error {
			if err := q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Hour}); err != nil {
				return err
			}
			return q.Cancel(ctx, l.ID)
		}},
		{"cancel when ready again", true, func(q *codeq.Queue, l *codeq.Lease) error {
			if err := q.Release(ctx, l.Receipt, 0); err != nil {
				return err
			}
			return q.Cancel(ctx, l.ID)
		}},
		{"out of attempts", true, func(q *codeq.Queue, l *codeq.Lease) error {
			for range 2 {
				if err := q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}); err != nil {
					return err
				}
				var err error
				if l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); err != nil {
					return err
				}
			}
			return q.Retry(ctx, l.Receipt, codeq.RetryOptions{})
		}},
		{"expired, out of attempts", true, func(q *codeq.Queue, l *codeq.Lease) error {
			for range 2 {
				if err := q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}); err != nil {
					return err
				}
				var err error
				if l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); err != nil {
					return err
				}
			}
			time.Sleep(time.Minute)
			return nil
		}},
		{"retry with backoff", false, func(q *codeq.Queue, l *codeq.Lease) error { return q.Retry(ctx, l.Receipt, codeq.RetryOptions{}) }},
		{"retry at once", false, func(q *codeq.Queue, l *codeq.Lease) error {
			return q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1})
		}},
		{"release", false, func(q *codeq.Queue, l *codeq.Lease) error { return q.Release(ctx, l.Receipt, 0) }},
		{"snooze", false, func(q *codeq.Queue, l *codeq.Lease) error { return q.Release(ctx, l.Receipt, time.Minute) }},
		{"expired", false, func(*codeq.Queue, *codeq.Lease) error { time.Sleep(time.Minute); return nil }},
		{"put off", false, func(q *codeq.Queue, l *codeq.Lease) error {
			if err := q.Release(ctx, l.Receipt, 0); err != nil {
				return err
			}
			return q.SetRunAt(ctx, l.ID, time.Now().Add(time.Minute))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
				ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g", MaxAttempts: 3}, "1", "2", "3")...)
				requireSettled(t, q)
				l := claimNow(t, q, "a")
				require.Equal(t, ids[0], l.ID)
				require.NoError(t, c.end(q, l))
				requireSettled(t, q)
				if !c.passes {
					require.Equal(t, codeq.Blocked, stateOf(t, q, ids[1]))
					got, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
					require.NoError(t, err)
					require.Equal(t, ids[0], got.ID, "its next attempt")
					require.Nil(t, claimNow(t, q, "a"))
					complete(t, q, got)
				}
				requireNext(t, q, "a", "2", "3")
				requireSettled(t, q)
				requireNoGroups(t, q)
			})
		})
	}
}

// TestGroupWakes: a claim that waits gets the next task of a group when the one
// before has ended.
func TestGroupWakes(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2")...)
		l := claimNow(t, q, "a")
		got := waitingClaim(t, q, "a")
		complete(t, q, l)
		require.Equal(t, ids[1], (<-got).ID)
		requireSettled(t, q)
	})
}

// TestGroupCancelWaiting: who waits and is canceled is passed over, also if nobody
// is left.
func TestGroupCancelWaiting(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3", "4")...)
		l := claimNow(t, q, "a")
		require.NoError(t, q.Cancel(t.Context(), ids[1]))
		requireSettled(t, q)
		complete(t, q, l)
		l = claimNow(t, q, "a")
		require.Equal(t, ids[2], l.ID)
		require.NoError(t, q.Cancel(t.Context(), ids[3]))
		complete(t, q, l)
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		requireNoGroups(t, q)
		produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "5", "6")...)
		requireNext(t, q, "a", "5", "6")
	})
}

// TestGroupDelayed: a task for later is not of the group before its time; when that
// comes it waits with the others, in the order of produce.
func TestGroupDelayed(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		late := produce(t, q, named(codeq.Task{Queue: "a", Group: "g", RunAt: time.Now().Add(time.Hour)}, "late")...)[0]
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2")...)
		requireSettled(t, q)
		l := claimNow(t, q, "a")
		require.Equal(t, ids[0], l.ID)
		require.NoError(t, q.Extend(t.Context(), l.Receipt, 2*time.Hour))
		time.Sleep(61 * time.Minute)
		require.Equal(t, codeq.Blocked, stateOf(t, q, late))
		requireSettled(t, q)
		complete(t, q, l)
		requireNext(t, q, "a", "late", "2")
		requireSettled(t, q)

		produce(t, q, named(codeq.Task{Queue: "a", Group: "g", RunAt: time.Now().Add(time.Hour)}, "alone")...)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Hour)
		requireNext(t, q, "a", "alone")
		requireSettled(t, q)
		requireNoGroups(t, q)
	})
}

// TestGroupPutOff: a task that waits for its turn and is put off lets the others
// go first.
func TestGroupPutOff(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3")...)
		require.NoError(t, q.SetRunAt(t.Context(), ids[1], time.Now().Add(time.Hour)))
		requireSettled(t, q)
		requireNext(t, q, "a", "1", "3")
		time.Sleep(time.Hour)
		requireNext(t, q, "a", "2")
		requireSettled(t, q)
		requireNoGroups(t, q)
	})
}

// TestGroupScope: the queue, the tenant and the LimitKey tell groups of one name apart,
// and the priority does not.
func TestGroupScope(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		like := codeq.Task{Queue: "a", Group: "g"}
		first := produce(t, q, named(like, "1")...)[0]
		others := []codeq.Task{like, like, like}
		others[0].Queue, others[1].Tenant, others[2].LimitKey = "b", "other", "key"
		for _, other := range others {
			id := produce(t, q, other)[0]
			require.Equal(t, codeq.Ready, stateOf(t, q, id), "%+v", other)
			require.NoError(t, q.Cancel(t.Context(), id))
		}
		low, high := like, like
		low.Priority, high.Priority = 1, 9
		produce(t, q, append(named(low, "low"), named(high, "high")...)...)
		l := claimNow(t, q, "a")
		require.Equal(t, first, l.ID)
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, l)
		requireNext(t, q, "a", "low", "high")
		requireSettled(t, q)
		requireNoGroups(t, q)
	})
}

// TestGroupRedriven: a dead letter that is redriven queues up in its group again,
// where its first place is free.
func TestGroupRedriven(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "a").Receipt, nil))
		l := claimNow(t, q, "a")
		require.Equal(t, ids[1], l.ID)
		require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		requireSettled(t, q)
		require.Equal(t, codeq.Blocked, stateOf(t, q, ids[0]))
		complete(t, q, l)
		requireNext(t, q, "a", "1", "3")
		requireSettled(t, q)

		dead := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "4", "5")...)[0]
		require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "a").Receipt, nil))
		synctest.Wait()
		require.NoError(t, q.Cancel(t.Context(), dead), "it has no turn to pass on")
		requireSettled(t, q)
		requireNext(t, q, "a", "5")
		requireNoGroups(t, q)
	})
}

// TestGroupLimitKey: the task whose turn it is may have to wait for room in the
// limit of its key; it keeps the turn.
func TestGroupLimitKey(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k", Group: "g"}, "g1", "g2")...)
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k", Group: "h"}, "h1", "h2")...)
		l := claimNow(t, q, "a")
		require.Equal(t, "g1", string(l.Payload))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		complete(t, q, l)
		requireSettled(t, q)
		seen := ""
		for l := claimNow(t, q, "a"); l != nil; l = claimNow(t, q, "a") {
			require.Nil(t, claimNow(t, q, "a"), "one at a time")
			seen += string(l.Payload) + " "
			complete(t, q, l)
			requireSettled(t, q)
		}
		require.Less(t, strings.Index(seen, "h1"), strings.Index(seen, "h2"), seen)
		require.Contains(t, seen, "g2")
		requireNoGroups(t, q)
	})
}

// TestGroupFollowUps: follow-ups of a completion come in the order of their list,
// behind what waits.
func TestGroupFollowUps(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		like := codeq.Task{Queue: "a", Group: "g"}
		produce(t, q, named(like, "1", "2")...)
		l := claimNow(t, q, "a")
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil, named(like, "3", "4")...))
		requireSettled(t, q)
		requireNext(t, q, "a", "2", "3", "4")
		requireSettled(t, q)
		requireNoGroups(t, q)
	})
}

// TestGroupRestart: the turn, and who waits for it, outlive restarts.
func TestGroupRestart(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			opts := *onDisk(crashfs.New(), &codeq.Options{Shards: shards})
			q := openForRun(t, opts)
			produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2", "3", "4")...)
			reopen := func() {
				require.NoError(t, q.Close())
				q = openForRun(t, opts)
				requireSettled(t, q)
			}
			reopen()
			l := claimNow(t, q, "a")
			require.Equal(t, "1", string(l.Payload))
			reopen()
			require.Nil(t, claimNow(t, q, "a"))
			require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{After: time.Hour}))
			reopen()
			require.Nil(t, claimNow(t, q, "a"))
			time.Sleep(time.Hour)
			l = claimNow(t, q, "a")
			require.Equal(t, "1", string(l.Payload))
			complete(t, q, l)
			reopen()
			requireNext(t, q, "a", "2", "3", "4")
			requireSettled(t, q)
			requireNoGroups(t, q)
		})
	}
}

// TestGroupsDrained: many groups, drained by many workers, of which some fail:
// each is worked on in order, one task at a time.
func TestGroupsDrained(t *testing.T) {
	t.Parallel()
	tasks, groups := testkit.Sized(2000, 20_000, 20_000), testkit.Sized(50, 500, 500)
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, codeq.Options{Shards: shards, WindowTasks: 64, MaxAttempts: 3}, func(t *testing.T, q *codeq.Queue) {
				batch := make([]codeq.Task, 0, 1000)
				for i := range tasks {
					group := i % groups
					batch = append(batch, codeq.Task{
						Queue: "a", Group: fmt.Sprint(group), Tenant: fmt.Sprint(group % 3), Priority: i / groups % 3,
						Payload: strconv.AppendInt(nil, int64(i/groups), 10),
					})
					if len(batch) == cap(batch) {
						_, err := q.ProduceBatch(t.Context(), batch)
						require.NoError(t, err)
						batch = batch[:0]
					}
				}
				requireSettled(t, q)
				drainGroups(t, q, tasks)
				requireSettled(t, q)
				requireNoGroups(t, q)
			})
		})
	}
}

// drainGroups lets 16 workers work on as many tasks, whose payloads count up
// from 0 in each group.
func drainGroups(t *testing.T, q *codeq.Queue, tasks int) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var (
		mu    sync.Mutex
		next  = make(map[string]int)  // by group
		held  = make(map[string]bool) // likewise
		ended int
		all   sync.WaitGroup
	)
	work := func(n int, l *codeq.Lease) error {
		serial, err := strconv.Atoi(string(l.Payload))
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if held[l.Group] || next[l.Group] != serial {
			return fmt.Errorf("task %d of group %s is claimed, at work: %t, next: %d", serial, l.Group, held[l.Group], next[l.Group])
		}
		held[l.Group] = true
		mu.Unlock()
		time.Sleep(time.Duration(n%3) * time.Millisecond)
		mu.Lock()
		held[l.Group] = false
		end := func() error { return q.Complete(context.Background(), l.Receipt, nil) }
		switch {
		case n%11 == 3 && l.Attempt < 3:
			end = func() error {
				return q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{After: time.Millisecond})
			}
		case n%11 == 5:
			end = func() error { return q.Release(context.Background(), l.Receipt, 0) }
		default:
			if next[l.Group]++; n%11 == 7 {
				end = func() error { return q.DeadLetter(context.Background(), l.Receipt, nil) }
			}
			if ended++; ended == tasks {
				defer stop()
			}
		}
		mu.Unlock()
		defer mu.Lock()
		return end()
	}
	for range 16 {
		all.Go(func() {
			for n := 0; ; n++ {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					return
				}
				if err := work(n, l); err != nil {
					t.Error(err)
					stop()
					return
				}
			}
		})
	}
	all.Wait()
	require.Equal(t, tasks, ended)
}

// TestGroupCrash: wherever a crash falls, also right after the end of the task
// that has the turn, the rest of the group is worked on in its order.
func TestGroupCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		opts := *onDisk(disk, &codeq.Options{Durability: codeq.DurabilityDisk, MaxAttempts: 2})
		q := openForRun(t, opts)
		names := []string{"0", "1", "2", "3", "4", "5"}
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, names...)...)
		im := keepImages(t, q, disk)
		ctx := t.Context()
		for i := range names {
			l := claimNow(t, q, "a")
			require.Equal(t, ids[i], l.ID)
			switch i {
			case 1:
				require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
			case 2:
				require.NoError(t, q.Cancel(ctx, l.ID))
			case 3:
				require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Second}))
				time.Sleep(time.Second)
				complete(t, q, claimNow(t, q, "a"))
			case 4: // two expiries
				time.Sleep(time.Minute)
				claimNow(t, q, "a")
				time.Sleep(time.Minute)
			default:
				complete(t, q, l)
			}
			requireSettled(t, q)
		}
		require.Greater(t, len(im.Images), 2*len(names)) // most produce, claim and end in commits of their own
		for i, image := range im.Images {
			onDisk(image, &opts)
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Hour) // leases expire, retries become due
			requireSettled(t, q)
			counts, err := q.Stats(ctx)
			require.NoError(t, err)
			left := int(counts["a"].Total() - counts["a"].Dead)
			requireNext(t, q, "a", names[len(names)-left:]...)
			requireSettled(t, q)
			requireNoGroups(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}
