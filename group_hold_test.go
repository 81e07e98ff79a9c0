package codeq_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/simtest"
)

// TestGroupHeldAlone: a dead letter holds the turn also if nobody waits for it, and again
// after it was redriven and has died again. Other groups, and tasks without one, go on.
func TestGroupHeldAlone(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		configure(t, p.Queue, "a", holdGroups)
		first := p.Store(codeq.Task{Queue: "a", Group: "g"})
		require.Equal(t, first, p.Kill("a"))
		p.Step()
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(next))
		other := p.Store(codeq.Task{Queue: "a", Group: "h"})
		require.Equal(t, other, p.Take("a").ID)
		free := p.Store(codeq.Task{Queue: "a"})
		require.Equal(t, free, p.Kill("a"))
		p.Step()

		require.NoError(t, p.RedriveDead(ctx, first))
		p.Step()
		require.Equal(t, first, p.Kill("a"))
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked}, []codeq.State{p.StateOf(first), p.StateOf(next)})
		require.NoError(t, p.RedriveDead(ctx, first))
		p.Step()
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Equal(t, next, p.Take("a").ID)
	})
}

// TestGroupHeldRetention: a dead letter that holds a turn is kept longer than DeadRetention
// says. One that passes it on is not.
func TestGroupHeldRetention(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		configure(t, p.Queue, "a", func(s *codeq.Settings) { s.HoldGroups, s.DeadRetention = true, time.Hour })
		held := p.StoreDead(1, codeq.Task{Queue: "a", Group: "g"})[0]
		free := p.StoreDead(1, codeq.Task{Queue: "a"})[0]
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		p.Step()
		p.Pass(3 * time.Hour)
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, 0, codeq.Blocked}, []codeq.State{p.StateOf(held), p.StateOf(free), p.StateOf(next)})

		configure(t, p.Queue, "a", func(s *codeq.Settings) { s.HoldGroups = false })
		require.NoError(t, p.RedriveDead(ctx, held))
		p.Step()
		require.Equal(t, held, p.Kill("a"))
		p.Step()
		require.Equal(t, codeq.Ready, p.StateOf(next))
		p.Pass(3 * time.Hour)
		p.Step()
		require.Equal(t, []codeq.State{0, codeq.Ready}, []codeq.State{p.StateOf(held), p.StateOf(next)})
	})
}

// TestGroupHeldReconfigured: a change of HoldGroups is for tasks that die after it.
func TestGroupHeldReconfigured(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		like := codeq.Task{Queue: "a", Group: "g"}
		passed := p.Store(like)
		ids := produce(t, p.Queue, named(like, "1", "2", "3")...)
		require.Equal(t, passed, p.Kill("a"))
		p.Step()
		configure(t, p.Queue, "a", holdGroups)
		p.Step()
		require.Equal(t, ids[0], p.Kill("a"))
		configure(t, p.Queue, "a", func(s *codeq.Settings) { s.HoldGroups = false })
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked}, []codeq.State{p.StateOf(ids[0]), p.StateOf(ids[1])})
		require.Nil(t, claimNow(t, p.Queue, "a"))

		require.NoError(t, p.Cancel(ctx, passed), "it has no turn to pass on")
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(ids[1]))
		require.NoError(t, p.Cancel(ctx, ids[0]))
		p.Step()
		require.Equal(t, ids[1], p.Kill("a"))
		p.Step()
		require.Equal(t, codeq.Ready, p.StateOf(ids[2]))
	})
}

// TestGroupHeldParent: a dead letter that holds a turn may get children; they are canceled
// with its purge, and its group goes on.
func TestGroupHeldParent(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1, Retention: codeq.Forever}, func(t *testing.T, p *codeq.Process) {
		configure(t, p.Queue, "a", holdGroups)
		held := p.StoreDead(1, codeq.Task{Queue: "a", Group: "g"})[0]
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		child := p.Store(codeq.Task{Queue: "b", After: []codeq.ID{held}})
		p.Step()
		p.EachDead(p.PurgeDead, codeq.DeadFilter{})
		p.Step()
		require.Equal(t, []codeq.State{0, codeq.Ready, codeq.Canceled}, []codeq.State{p.StateOf(held), p.StateOf(next), p.StateOf(child)})
	})
}

// TestGroupHeldKey: a dead letter whose idempotency key has been taken by a task that waits
// behind it cannot be redriven, and holds the turn until it is purged or canceled.
func TestGroupHeldKey(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		configure(t, p.Queue, "a", holdGroups)
		task := codeq.Task{Queue: "a", Group: "g", Unique: codeq.Unique{Key: "k", ReleaseOnDead: true}}
		held := p.StoreDead(1, task)[0]
		p.Step()
		next := p.Store(task)
		p.Step()
		require.ErrorIs(t, p.RedriveDead(context.Background(), held), codeq.ErrDuplicate)
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked}, []codeq.State{p.StateOf(held), p.StateOf(next)})
		p.EachDead(p.PurgeDead, codeq.DeadFilter{})
		p.Step()
		require.Equal(t, next, p.Take("a").ID)
	})
}

// TestGroupHeldRepair: a repair finds out who holds a turn, also when the entry that says so is
// lost. A task that is ready goes before a dead letter that says that it holds the turn.
func TestGroupHeldRepair(t *testing.T) {
	for _, ready := range []bool{false, true} {
		disk := crashfs.New()
		opts := onDisk(disk, &codeq.Options{Shards: 1})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		configure(t, q, "a", holdGroups)
		like := codeq.Task{Queue: "a", Group: "g"}
		ids := produce(t, q, named(like, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.Close())

		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			key, _ := first(t, db, keys.Group, nil)
			require.NoError(t, db.Delete(key, nil))
			if ready {
				key, value := first(t, db, keys.Blocked, nil)
				_, _, id, err := keys.ParseGrouped(key)
				require.NoError(t, err)
				lane, rec, err := keys.SplitLane(value)
				require.NoError(t, err)
				require.NoError(t, db.Delete(key, nil))
				require.NoError(t, db.Set(keys.AppendTask(nil, lane, keys.SinceOf(id), id), rec, nil))
			}
		})
		require.False(t, verifyImage(t, disk, false).OK())
		require.True(t, verifyImage(t, disk, true).OK())
		require.True(t, verifyImage(t, disk, false).OK())

		q, err = codeq.Open("queue", opts)
		require.NoError(t, err)
		order := []string{"1", "2", "3"}
		if ready {
			require.Equal(t, codeq.Ready, stateOf(t, q, ids[1]))
			order = []string{"2", "1", "3"}
		} else {
			require.Nil(t, claimNow(t, q, "a"))
		}
		require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		for _, name := range order {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, name, string(l.Payload))
			complete(t, q, l)
		}
		quiesce(q, t)
		requireNoGroups(t, q)
		require.NoError(t, errors.Join(checkAll(q), checkMemory(q), q.Close()))
	}
}

func holdGroups(s *codeq.Settings) { s.HoldGroups = true }

// TestGroupHeld: with HoldGroups, a group waits for its dead letter however the task has
// died, and goes on in its order whatever then becomes of the dead letter.
func TestGroupHeld(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	deaths := map[string]func(p *codeq.Process, l *codeq.Lease){
		"given up": func(p *codeq.Process, l *codeq.Lease) {
			require.NoError(p.T, p.DeadLetter(ctx, l.Receipt, errors.New("boom")))
		},
		"out of attempts": func(p *codeq.Process, l *codeq.Lease) {
			require.NoError(p.T, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}))
			l = p.Take("a")
			require.NoError(p.T, p.Retry(ctx, l.Receipt, codeq.RetryOptions{}))
		},
		"expired": func(p *codeq.Process, _ *codeq.Lease) {
			p.Pass(time.Minute)
			p.Take("a")
			p.Pass(time.Minute)
		},
	}
	ends := map[string]struct {
		first string // of those that are worked on then
		end   func(p *codeq.Process, id codeq.ID)
	}{
		"redriven":         {"1", func(p *codeq.Process, id codeq.ID) { require.NoError(p.T, p.RedriveDead(ctx, id)) }},
		"all are redriven": {"1", func(p *codeq.Process, _ codeq.ID) { p.EachDead(p.RedriveAllDead, codeq.DeadFilter{}) }},
		"some are redriven, at a rate": {"1", func(p *codeq.Process, id codeq.ID) {
			p.EachDead(p.RedriveAllDead, codeq.DeadFilter{
				Queue: "a", Tenants: []string{""}, Rate: 2, Match: func(t *codeq.TaskInfo) bool { return t.ID == id },
			})
		}},
		"purged":   {"2", func(p *codeq.Process, _ codeq.ID) { p.EachDead(p.PurgeDead, codeq.DeadFilter{}) }},
		"canceled": {"2", func(p *codeq.Process, id codeq.ID) { require.NoError(p.T, p.Cancel(ctx, id)) }},
	}
	for death, die := range deaths {
		for name, c := range ends {
			t.Run(death+", "+name, func(t *testing.T) {
				throughSteps(t, codeq.Options{Shards: 2, MaxAttempts: 2}, func(t *testing.T, p *codeq.Process) {
					configure(t, p.Queue, "a", holdGroups)
					ids := produce(t, p.Queue, named(codeq.Task{Queue: "a", Group: "g"}, "1", "2")...)
					p.Step()
					die(p, p.Take("a"))
					p.Step()
					require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked}, []codeq.State{p.StateOf(ids[0]), p.StateOf(ids[1])})
					ids = append(ids, produce(t, p.Queue, named(codeq.Task{Queue: "a", Group: "g"}, "3")...)...)
					p.Step()
					require.Equal(t, codeq.Blocked, p.StateOf(ids[2]))
					require.Nil(t, claimNow(t, p.Queue, "a"))

					c.end(p, ids[0])
					p.Step()
					order := []string{"1", "2", "3"}
					if c.first == "2" {
						order = order[1:]
					}
					requireNext(t, p.Queue, "a", order...)
					p.Step()
					requireNoGroups(t, p.Queue)
				})
			})
		}
	}
}

// TestGroupHeldCrash: wherever a crash falls between a death and what follows on the end of
// the dead letter, the order is kept.
func TestGroupHeldCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		opts := *onDisk(disk, &codeq.Options{Durability: codeq.DurabilityDisk})
		q := openForRun(t, opts)
		configure(t, q, "a", holdGroups)
		names := []string{"0", "1", "2", "3"}
		ids := produce(t, q, named(codeq.Task{Queue: "a", Group: "g"}, names...)...)
		im := keepImages(t, q, disk)
		ctx := t.Context()
		for i, id := range ids {
			l := claimNow(t, q, "a")
			require.Equal(t, id, l.ID)
			require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
			requireSettled(t, q)
			switch i {
			case 0:
				require.NoError(t, q.RedriveDead(ctx, id))
				requireSettled(t, q)
				complete(t, q, claimNow(t, q, "a"))
			case 1:
				require.NoError(t, q.Cancel(ctx, id))
			default:
				time.Sleep(time.Millisecond)
				n, err := q.PurgeDead(ctx, codeq.DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.Images), 3*len(names))
		for i, image := range im.Images {
			onDisk(image, &opts)
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Hour) // leases expire
			_, err := q.RedriveAllDead(ctx, codeq.DeadFilter{})
			require.NoError(t, err)
			requireSettled(t, q)
			counts, err := q.Stats(ctx)
			require.NoError(t, err)
			requireNext(t, q, "a", names[len(names)-int(counts["a"].Total()):]...)
			requireSettled(t, q)
			requireNoGroups(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}
