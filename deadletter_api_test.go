package codeq_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
)

// TestRedriveKey: a redriven task takes its key again, unless another task has
// it by now.
func TestRedriveKey(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		task := keyed("k")
		first := p.Store(task)
		p.Kill("a")
		second := p.Store(task)
		p.Step()
		var duplicate *codeq.DuplicateError
		require.ErrorAs(t, p.RedriveDead(ctx, first), &duplicate)
		require.Equal(t, codeq.DuplicateError{Key: "k", ID: second}, *duplicate)
		n, err := p.RedriveAllDead(ctx, codeq.DeadFilter{})
		require.NoError(t, err)
		require.Zero(t, n)
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(first))
		p.Kill("a")
		require.NoError(t, p.RedriveDead(ctx, first))
		p.Step()
		p.Taken(task, first)
		require.ErrorIs(t, p.RedriveDead(ctx, second), codeq.ErrDuplicate)
		p.Kill("a")
		n, err = p.RedriveAllDead(ctx, codeq.DeadFilter{}) // of the two, one
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.Step()
		require.Equal(t, codeq.Counts{Ready: 1, Dead: 1}, countsOf(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		require.Zero(t, p.Stored(keys.Unique))
	})
}

// TestRedriveKeyFor: a task that is redriven while its key is still taken holds
// it as long as it lives, and for the rest of For.
func TestRedriveKeyFor(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		task := keyed("k")
		task.Unique.For = time.Hour
		id := p.Store(task)
		p.Kill("a")
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		p.Pass(time.Hour - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Millisecond)
		require.Zero(t, p.Stored(keys.Unique))

		id = p.Store(task)
		p.Kill("a")
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		p.Pass(2 * time.Hour)
		p.Taken(task, id)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))

		id = p.Store(task)
		p.Kill("a")
		p.Pass(2 * time.Hour) // the key becomes free, and nobody takes it
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, id))
		p.Step()
		p.Taken(task, id)
		p.Kill("a")
		p.Step()
		require.Zero(t, p.Stored(keys.Unique), "For is counted from the produce")
	})
}

// TestRedriveOfGroup: the group of a dead letter goes on without it; when it is
// redriven it waits for its turn.
func TestRedriveOfGroup(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		dead := p.Store(codeq.Task{Queue: "a", Group: "g"})
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		p.Kill("a")
		p.Step()
		require.NoError(t, p.RedriveDead(ctx, dead))
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(dead))
		l := p.Take("a")
		require.Equal(t, next, l.ID)
		require.Nil(t, claimNow(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.Step()
		require.Equal(t, dead, p.Kill("a"))
		require.NoError(t, p.RedriveDead(ctx, dead)) // nobody else is there
		p.Step()
		require.Equal(t, codeq.Ready, p.StateOf(dead))
	})
}

// TestRedriveParent: a task waits for a dead parent, and goes on when it was
// redriven and is completed.
func TestRedriveParent(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "parents", func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
		parent := p.Store(codeq.Task{Queue: "parents"})
		child := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		p.Check()
		p.Kill("parents")
		p.Step()
		late := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		p.Pass(2 * time.Hour) // it is kept, since others wait for it
		p.Step()
		require.Equal(t, []codeq.State{codeq.Dead, codeq.Blocked, codeq.Blocked}, []codeq.State{p.StateOf(parent), p.StateOf(child), p.StateOf(late)})
		require.NoError(t, p.RedriveDead(ctx, parent))
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(child))
		require.NoError(t, p.Complete(ctx, p.Take("parents").Receipt, nil))
		p.Step()
		require.Equal(t, []codeq.State{codeq.Ready, codeq.Ready}, []codeq.State{p.StateOf(child), p.StateOf(late)})
	})
}

// TestPurgeParent: what waits for a dead letter that is purged is canceled.
func TestPurgeParent(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 3, Retention: codeq.Forever}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		parent := p.Store(codeq.Task{Queue: "parents"})
		child := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		grandchild := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{child}})
		p.Check()
		p.Kill("parents")
		p.Step()
		n, err := p.PurgeDead(ctx, codeq.DeadFilter{})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		p.Step()
		require.Zero(t, p.StateOf(parent))
		require.Equal(t, []codeq.State{codeq.Canceled, codeq.Canceled}, []codeq.State{p.StateOf(child), p.StateOf(grandchild)})
	})
}

// TestPurgeKey: the key of a dead letter that is purged is taken for the rest of For.
func TestPurgeKey(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		task := keyed("k")
		task.Unique.For = time.Hour
		id := p.Store(task)
		p.Kill("a")
		_, err := p.PurgeDead(context.Background(), codeq.DeadFilter{})
		require.NoError(t, err)
		p.Step()
		require.Zero(t, p.StateOf(id))
		p.Pass(time.Hour - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Millisecond)
		p.Step()
		require.Zero(t, p.Stored(keys.Unique))
	})
}

// TestDeadLettersMatch: Match sees each dead letter once, with all that Get shows.
func TestDeadLettersMatch(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *codeq.Process) {
		ids := p.StoreDead(20, codeq.Task{Queue: "a", Payload: []byte("x"), Headers: map[string]string{"h": "v"}})
		p.Step()
		seen := make(map[codeq.ID]bool)
		n, err := p.RedriveAllDead(context.Background(), codeq.DeadFilter{Match: func(i *codeq.TaskInfo) bool {
			require.False(t, seen[i.ID])
			seen[i.ID] = true
			require.Equal(t, infoOf(t, p.Queue, i.ID), i)
			return i.ID == ids[3]
		}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Len(t, seen, 20)
		require.Equal(t, ids[3], p.Take("a").ID)
	})
}

// TestDeadRetention: dead letters are forgotten after the time that the
// settings give, at most an eighth later, unless they are redriven before.
func TestDeadRetention(t *testing.T) {
	t.Parallel()
	throughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *codeq.Process) {
		ctx := context.Background()
		before := p.StoreDead(3, codeq.Task{Queue: "a"}) // kept without end
		require.NoError(t, p.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = 8 * time.Hour }))
		after := p.StoreDead(3, codeq.Task{Queue: "a"})
		other := p.StoreDead(1, codeq.Task{Queue: "b"})
		p.Step()
		p.Pass(4 * time.Hour)
		require.NoError(t, p.RedriveDead(ctx, after[0]))
		p.Step()
		require.Equal(t, after[0], p.Kill("a")) // its time begins anew
		require.NoError(t, p.RedriveDead(ctx, after[1]))
		p.Pass(4*time.Hour - time.Millisecond)
		p.Step()
		require.Equal(t, codeq.Dead, p.StateOf(after[2]))
		p.Pass(time.Hour + time.Millisecond)
		p.Step()
		require.Zero(t, p.StateOf(after[2]))
		require.ErrorIs(t, p.RedriveDead(ctx, after[2]), codeq.ErrNotFound)
		require.Equal(t, codeq.Dead, p.StateOf(after[0]))
		require.Equal(t, codeq.Ready, p.StateOf(after[1]))
		p.Pass(4 * time.Hour)
		p.Step()
		require.Zero(t, p.StateOf(after[0]))
		for _, id := range append(before, other...) {
			require.Equal(t, codeq.Dead, p.StateOf(id))
		}
		require.Equal(t, codeq.Counts{Ready: 1, Dead: 3}, countsOf(t, p.Queue, "a"))
	})
}

// TestDeadRetentionClock: a clock that is set forward forgets dead letters
// early, one that is set back keeps them longer.
func TestDeadRetentionClock(t *testing.T) {
	throughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *codeq.Process) {
		require.NoError(t, p.Configure(context.Background(), "a", func(s *codeq.Settings) { s.DeadRetention = 10 * time.Minute }))
		id := p.StoreDead(1, codeq.Task{Queue: "a"})[0]
		p.SetClock(-time.Hour)
		p.Step()
		p.Pass(time.Hour)
		require.Equal(t, codeq.Dead, p.StateOf(id))
		p.SetClock(time.Hour)
		p.Pass(time.Minute)
		p.Step()
		require.Zero(t, p.StateOf(id))
		require.Equal(t, codeq.Counts{}, countsOf(t, p.Queue, "a"))
	})
}
