package codeq_test

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestReplaceCorrupt: an unreadable task is no duplicate. Its shard stops.
func TestReplaceCorrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		defer func() { require.ErrorIs(t, q.Close(), codeq.ErrCorrupt) }()
		task := queuetest.Keyed("k")
		task.Unique.Replace = true
		id := queuetest.Produce(t, q, task)[0]
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			return s.Rules.Group.Batch.Set(keys.AppendByID(nil, keys.Index, id), []byte{0xff}, nil)
		}))
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.ErrorIs(t, err, codeq.ErrCorrupt)
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, codeq.ErrFailed)
	})
}

// TestNewKeysReadNothing: the shard recognizes a new key without a read, for any number of keys.
// After Open this holds once all keys are listed; until then the unlisted keys are looked up.
func TestNewKeysReadNothing(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New()})
		q := queuetest.OpenForRun(t, opts)
		const batch = 5000
		n := (engine.MostUniques()/batch + 2) * batch
		next := 0
		produceNew := func() (reads int) {
			tasks := make([]codeq.Task, batch)
			for i := range tasks {
				tasks[i] = queuetest.Keyed(strconv.Itoa(next))
				next++
			}
			before := readsOf(t, q)
			_, err := q.ProduceBatch(t.Context(), tasks)
			require.NoError(t, err)
			return readsOf(t, q) - before
		}
		const chance = 20 // keys with the fingerprint of another key: about one is expected
		for next < n {
			require.Less(t, produceNew(), chance)
		}
		require.NoError(t, queuetest.CheckMemory(q))
		require.NoError(t, q.Close())

		q = queuetest.OpenForRun(t, opts)
		listed := func() (all bool, n int) {
			require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				u := s.Rules.Probe().Usage().Uniques
				all, n = u.Listed, u.Prints
				return nil
			}))
			return all, n
		}
		require.NoError(t, queuetest.CheckMemory(q))
		id := queuetest.Produce(t, q, queuetest.Keyed("while they are listed"))[0] // perhaps
		holder, err := q.Produce(t.Context(), queuetest.Keyed("while they are listed"))
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		require.Equal(t, id, holder)
		synctest.Wait()
		all, now := listed()
		require.True(t, all)
		require.Equal(t, n+1, now)
		require.Less(t, produceNew(), chance)
		_, err = q.Produce(t.Context(), queuetest.Keyed("0"))
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		queuetest.RequireSettled(t, q)
		require.NoError(t, q.Close())
	})
}

// TestTooManyFingerprints: beyond their bound there are no fingerprints, and keys are looked up.
func TestTooManyFingerprints(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ids := queuetest.Produce(t, q, queuetest.Keyed("first"))
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			s.Rules.Probe().TooManyUniques(testkit.Sized(64<<10, 0))
			return nil
		}))
		for _, key := range []string{"second", "third"} {
			ids = append(ids, queuetest.Produce(t, q, queuetest.Keyed(key))...)
		}
		for i, key := range []string{"first", "second", "third"} {
			holder, err := q.Produce(t.Context(), queuetest.Keyed(key))
			require.ErrorIs(t, err, codeq.ErrDuplicate)
			require.Equal(t, ids[i], holder)
		}
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			require.True(t, s.Rules.Probe().Usage().Uniques.TooMany)
			require.Zero(t, s.Rules.Probe().Usage().Uniques.Prints)
			return nil
		}))
		queuetest.RequireSettled(t, q)
	})
}

// TestKeyOfCanceledChild: a task is canceled with its parent, and its key becomes free in time,
// even if another key becomes free in the same group.
func TestKeyOfCanceledChild(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		parent := p.Store(codeq.Task{Queue: "parents"})
		early, child := queuetest.Keyed("early"), queuetest.Keyed("child")
		early.Unique.For, child.Unique.For = time.Minute, time.Hour
		child.After = []codeq.ID{parent}
		p.Store(child)
		require.NoError(t, p.Cancel(context.Background(), p.Store(early)))
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, inspect.Of(p.Queue).Owner(0, func(s *inspect.Owner) error {
			_, err := s.Rules.Alter(keys.ID(parent), engine.AlterCancel, engine.AlterTo{})
			p.Skew.Add(int64(time.Millisecond)) // for the next group, which cancels the child
			return err
		}))
		p.Check()
		require.Equal(t, 1, p.Stored(keys.Freed))
		p.Pass(time.Hour)
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))
	})
}

// TestChildIsScheduled: after the end of its parents a task waits for its own time, even if the
// time of another task comes in the same group.
func TestChildIsScheduled(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
		start := p.Now()
		parent := p.Store(codeq.Task{Queue: "parents"})
		child := p.Store(codeq.Task{Queue: "a", After: []codeq.ID{parent}, RunAt: start.Add(time.Hour)})
		p.Store(codeq.Task{Queue: "others", RunAt: start.Add(time.Minute)})
		l := p.Take("parents")
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, inspect.Of(p.Queue).Owner(0, func(s *inspect.Owner) error {
			p.Skew.Add(int64(time.Millisecond)) // for the next group, when the child goes on
			_, err := s.Rules.Complete(engine.Receipt{ID: keys.ID(l.Receipt.ID), Token: l.Receipt.Token}, nil, 0, nil, false)
			return err
		}))
		p.Check()
		require.Equal(t, codeq.Scheduled, p.StateOf(child))
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, p.Queue, "others"))
		p.Pass(time.Hour)
		require.Equal(t, codeq.Ready, p.StateOf(child))
	})
}

// readsOf returns how many entries the owner of the only shard has read.
func readsOf(t *testing.T, q *codeq.Queue) (n int) {
	require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error { n = s.Rules.Probe().Usage().Read; return nil }))
	return n
}

// TestReleaseKeyOfScope: ReleaseKey finds the key by the same fields as Produce.
func TestReleaseKeyOfScope(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 4}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		task := codeq.Task{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Unique: codeq.Unique{Key: "k"}}
		id := p.Store(task)
		p.Step()
		for _, other := range []codeq.UniqueKey{
			{Queue: "b", Tenant: "t", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Group: "g", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", LimitKey: "l", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", Key: "k"},
			{Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "K"},
		} {
			require.ErrorIs(t, p.ReleaseKey(ctx, other), codeq.ErrNotFound)
		}
		p.Taken(task, id)
		require.NoError(t, p.ReleaseKey(ctx, codeq.UniqueKey{
			Queue: "a", Tenant: "t", Group: "g", LimitKey: "l", Key: "k",
		}))
		require.NotEqual(t, id, p.Store(task))
	})
}
