package codeq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
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
		disk := vfs.NewCrashableMem()
		opts := onDisk(disk, &codeq.Options{Shards: 1})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		configure(t, q, "a", holdGroups)
		like := codeq.Task{Queue: "a", Group: "g"}
		ids := produce(t, q, named(like, "1", "2", "3")...)
		require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.Close())

		alter(t, disk, func(db *pebble.DB) map[codeq.ID]bool {
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
