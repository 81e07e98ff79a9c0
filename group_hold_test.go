package codeq

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

func holdGroups(s *Settings) { s.HoldGroups = true }

// TestGroupHeld: with HoldGroups, a group waits for its dead letter however the task has
// died, and goes on in its order whatever then becomes of the dead letter.
func TestGroupHeld(t *testing.T) {
	ctx := context.Background()
	deaths := map[string]func(p *process, l *Lease){
		"given up": func(p *process, l *Lease) {
			require.NoError(p.t, p.DeadLetter(ctx, l.Receipt, errors.New("boom")))
		},
		"out of attempts": func(p *process, l *Lease) {
			require.NoError(p.t, p.Retry(ctx, l.Receipt, RetryOptions{After: -1}))
			l = p.claim("a")
			require.NoError(p.t, p.Retry(ctx, l.Receipt, RetryOptions{}))
		},
		"expired": func(p *process, _ *Lease) {
			p.pass(time.Minute)
			p.claim("a")
			p.pass(time.Minute)
		},
	}
	ends := map[string]struct {
		first string // of those that are worked on then
		end   func(p *process, id ID)
	}{
		"redriven":         {"1", func(p *process, id ID) { require.NoError(p.t, p.RedriveDead(ctx, id)) }},
		"all are redriven": {"1", func(p *process, _ ID) { p.eachDead(p.RedriveAllDead, DeadFilter{}) }},
		"some are redriven, at a rate": {"1", func(p *process, id ID) {
			p.eachDead(p.RedriveAllDead, DeadFilter{
				Queue: "a", Tenants: []string{""}, Rate: 2, Match: func(t *TaskInfo) bool { return t.ID == id },
			})
		}},
		"purged":   {"2", func(p *process, _ ID) { p.eachDead(p.PurgeDead, DeadFilter{}) }},
		"canceled": {"2", func(p *process, id ID) { require.NoError(p.t, p.Cancel(ctx, id)) }},
	}
	for death, die := range deaths {
		for name, c := range ends {
			t.Run(death+", "+name, func(t *testing.T) {
				throughSteps(t, Options{Shards: 2, MaxAttempts: 2}, func(t *testing.T, p *process) {
					configure(t, p.Queue, "a", holdGroups)
					ids := produce(t, p.Queue, named(Task{Queue: "a", Group: "g"}, "1", "2")...)
					p.step()
					die(p, p.claim("a"))
					p.step()
					require.Equal(t, []State{Dead, Blocked}, []State{p.state(ids[0]), p.state(ids[1])})
					ids = append(ids, produce(t, p.Queue, named(Task{Queue: "a", Group: "g"}, "3")...)...)
					p.step()
					require.Equal(t, Blocked, p.state(ids[2]))
					require.Nil(t, claimNow(t, p.Queue, "a"))

					c.end(p, ids[0])
					p.step()
					order := []string{"1", "2", "3"}
					if c.first == "2" {
						order = order[1:]
					}
					requireNext(t, p.Queue, "a", order...)
					p.step()
					requireNoGroups(t, p.Queue)
				})
			})
		}
	}
}

// eachDead does something with one dead letter.
func (p *process) eachDead(how func(context.Context, DeadFilter) (int, error), which DeadFilter) {
	p.t.Helper()
	time.Sleep(time.Millisecond) // those of this millisecond may be left out
	n, err := how(context.Background(), which)
	require.NoError(p.t, err)
	require.Equal(p.t, 1, n)
}

// TestGroupHeldAlone: a dead letter holds the turn also if nobody waits for it, and again
// after it was redriven and has died again. Other groups, and tasks without one, go on.
func TestGroupHeldAlone(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		configure(t, p.Queue, "a", holdGroups)
		first := p.produce(Task{Queue: "a", Group: "g"})
		require.Equal(t, first, p.kill("a"))
		p.step()
		next := p.produce(Task{Queue: "a", Group: "g"})
		p.step()
		require.Equal(t, Blocked, p.state(next))
		other := p.produce(Task{Queue: "a", Group: "h"})
		require.Equal(t, other, p.claim("a").ID)
		free := p.produce(Task{Queue: "a"})
		require.Equal(t, free, p.kill("a"))
		p.step()

		require.NoError(t, p.RedriveDead(ctx, first))
		p.step()
		require.Equal(t, first, p.kill("a"))
		p.step()
		require.Equal(t, []State{Dead, Blocked}, []State{p.state(first), p.state(next)})
		require.NoError(t, p.RedriveDead(ctx, first))
		p.step()
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		p.step()
		require.Equal(t, next, p.claim("a").ID)
	})
}

// TestGroupHeldRetention: a dead letter that holds a turn is kept longer than DeadRetention
// says. One that passes it on is not.
func TestGroupHeldRetention(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		configure(t, p.Queue, "a", func(s *Settings) { s.HoldGroups, s.DeadRetention = true, time.Hour })
		held := p.produceDead(1, Task{Queue: "a", Group: "g"})[0]
		free := p.produceDead(1, Task{Queue: "a"})[0]
		next := p.produce(Task{Queue: "a", Group: "g"})
		p.step()
		p.pass(3 * time.Hour)
		p.step()
		require.Equal(t, []State{Dead, 0, Blocked}, []State{p.state(held), p.state(free), p.state(next)})

		configure(t, p.Queue, "a", func(s *Settings) { s.HoldGroups = false })
		require.NoError(t, p.RedriveDead(ctx, held))
		p.step()
		require.Equal(t, held, p.kill("a"))
		p.step()
		require.Equal(t, Ready, p.state(next))
		p.pass(3 * time.Hour)
		p.step()
		require.Equal(t, []State{0, Ready}, []State{p.state(held), p.state(next)})
	})
}

// TestGroupHeldReconfigured: a change of HoldGroups is for tasks that die after it.
func TestGroupHeldReconfigured(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		ctx := context.Background()
		like := Task{Queue: "a", Group: "g"}
		passed := p.produce(like)
		ids := produce(t, p.Queue, named(like, "1", "2", "3")...)
		require.Equal(t, passed, p.kill("a"))
		p.step()
		configure(t, p.Queue, "a", holdGroups)
		p.step()
		require.Equal(t, ids[0], p.kill("a"))
		configure(t, p.Queue, "a", func(s *Settings) { s.HoldGroups = false })
		p.step()
		require.Equal(t, []State{Dead, Blocked}, []State{p.state(ids[0]), p.state(ids[1])})
		require.Nil(t, claimNow(t, p.Queue, "a"))

		require.NoError(t, p.Cancel(ctx, passed), "it has no turn to pass on")
		p.step()
		require.Equal(t, Blocked, p.state(ids[1]))
		require.NoError(t, p.Cancel(ctx, ids[0]))
		p.step()
		require.Equal(t, ids[1], p.kill("a"))
		p.step()
		require.Equal(t, Ready, p.state(ids[2]))
	})
}

// TestGroupHeldParent: a dead letter that holds a turn may get children; they are canceled
// with its purge, and its group goes on.
func TestGroupHeldParent(t *testing.T) {
	throughSteps(t, Options{Shards: 1, Retention: Forever}, func(t *testing.T, p *process) {
		configure(t, p.Queue, "a", holdGroups)
		held := p.produceDead(1, Task{Queue: "a", Group: "g"})[0]
		next := p.produce(Task{Queue: "a", Group: "g"})
		child := p.produce(Task{Queue: "b", After: []ID{held}})
		p.step()
		p.eachDead(p.PurgeDead, DeadFilter{})
		p.step()
		require.Equal(t, []State{0, Ready, Canceled}, []State{p.state(held), p.state(next), p.state(child)})
	})
}

// TestGroupHeldKey: a dead letter whose idempotency key has been taken by a task that waits
// behind it cannot be redriven, and holds the turn until it is purged or canceled.
func TestGroupHeldKey(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *process) {
		configure(t, p.Queue, "a", holdGroups)
		task := Task{Queue: "a", Group: "g", Unique: Unique{Key: "k", ReleaseOnDead: true}}
		held := p.produceDead(1, task)[0]
		p.step()
		next := p.produce(task)
		p.step()
		require.ErrorIs(t, p.RedriveDead(context.Background(), held), ErrDuplicate)
		p.step()
		require.Equal(t, []State{Dead, Blocked}, []State{p.state(held), p.state(next)})
		p.eachDead(p.PurgeDead, DeadFilter{})
		p.step()
		require.Equal(t, next, p.claim("a").ID)
	})
}

// TestGroupHeldCrash: wherever a crash falls between a death and what follows on the end of
// the dead letter, the order is kept.
func TestGroupHeldCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewCrashableMem()
		opts := Options{Durability: DurabilityDisk, fs: disk}
		q := openForRun(t, opts)
		configure(t, q, "a", holdGroups)
		names := []string{"0", "1", "2", "3"}
		ids := produce(t, q, named(Task{Queue: "a", Group: "g"}, names...)...)
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
				n, err := q.PurgeDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.images), 3*len(names))
		for i, image := range im.images {
			opts.fs = image
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Hour) // leases expire
			_, err := q.RedriveAllDead(ctx, DeadFilter{})
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

// TestGroupHeldRepair: a repair finds out who holds a turn, also when the entry that says so is
// lost. A task that is ready goes before a dead letter that says that it holds the turn.
func TestGroupHeldRepair(t *testing.T) {
	for _, ready := range []bool{false, true} {
		disk := vfs.NewCrashableMem()
		opts := &Options{Shards: 1, fs: disk}
		q, err := Open("queue", opts)
		require.NoError(t, err)
		configure(t, q, "a", holdGroups)
		like := Task{Queue: "a", Group: "g"}
		ids := produce(t, q, named(like, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.Close())

		alter(t, disk, func(db *pebble.DB) map[ID]bool {
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
			return nil
		})
		require.False(t, verifyImage(t, disk, false).OK())
		require.True(t, verifyImage(t, disk, true).OK())
		require.True(t, verifyImage(t, disk, false).OK())

		q, err = Open("queue", opts)
		require.NoError(t, err)
		order := []string{"1", "2", "3"}
		if ready {
			require.Equal(t, Ready, stateOf(t, q, ids[1]))
			order = []string{"2", "1", "3"}
		} else {
			require.Nil(t, claimNow(t, q, "a"))
		}
		require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		for _, name := range order {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, name, string(l.Payload))
			complete(t, q, l)
		}
		q.quiesce(t)
		requireNoGroups(t, q)
		require.NoError(t, errors.Join(q.checkAll(), q.checkMemory(), q.Close()))
	}
}
