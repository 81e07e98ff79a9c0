package codeq

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

func keyed(key string) Task { return Task{Queue: "a", Unique: Unique{Key: key}} }

// TestReplaceCorrupt: a task that cannot be read is no duplicate; its shard stops.
func TestReplaceCorrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		defer func() { require.ErrorIs(t, q.Close(), ErrCorrupt) }()
		task := keyed("k")
		task.Unique.Replace = true
		id := produce(t, q, task)[0]
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			return s.Group.Batch.Set(keys.AppendByID(nil, keys.Index, id), []byte{0xff}, nil)
		}))
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, ErrUncertain)
		require.ErrorIs(t, err, ErrCorrupt)
		_, err = q.Produce(context.Background(), task)
		require.ErrorIs(t, err, ErrFailed)
	})
}

// TestNewKeysReadNothing: that a key is new is known without a look at the disk, however many there
// are, also after Open, when all are listed; until then the others are looked up.
func TestNewKeysReadNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New()})
		q := openForRun(t, opts)
		const batch = 5000
		n := (engine.MostUniques()/batch + 2) * batch
		next := 0
		produceNew := func() (reads int) {
			tasks := make([]Task, batch)
			for i := range tasks {
				tasks[i] = keyed(strconv.Itoa(next))
				next++
			}
			before := q.readsOf(t)
			_, err := q.ProduceBatch(t.Context(), tasks)
			require.NoError(t, err)
			return q.readsOf(t) - before
		}
		const chance = 20 // keys with the fingerprint of another: one is to be expected
		for next < n {
			require.Less(t, produceNew(), chance)
		}
		require.NoError(t, q.checkMemory())
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		listed := func() (all bool, n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				u := s.Probe().Usage().Uniques
				all, n = u.Listed, u.Prints
				return nil
			}))
			return all, n
		}
		require.NoError(t, q.checkMemory())
		id := produce(t, q, keyed("while they are listed"))[0] // perhaps
		holder, err := q.Produce(t.Context(), keyed("while they are listed"))
		require.ErrorIs(t, err, ErrDuplicate)
		require.Equal(t, id, holder)
		synctest.Wait()
		all, now := listed()
		require.True(t, all)
		require.Equal(t, n+1, now)
		require.Less(t, produceNew(), chance)
		_, err = q.Produce(t.Context(), keyed("0"))
		require.ErrorIs(t, err, ErrDuplicate)
		requireSettled(t, q)
		require.NoError(t, q.Close())
	})
}

// TestTooManyFingerprints: beyond their bound there are none, and keys are looked up.
func TestTooManyFingerprints(t *testing.T) {
	t.Parallel()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ids := produce(t, q, keyed("first"))
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.Probe().TooManyUniques(testkit.Sized(64<<10, 64<<10, 0))
			return nil
		}))
		for _, key := range []string{"second", "third"} {
			ids = append(ids, produce(t, q, keyed(key))...)
		}
		for i, key := range []string{"first", "second", "third"} {
			holder, err := q.Produce(t.Context(), keyed(key))
			require.ErrorIs(t, err, ErrDuplicate)
			require.Equal(t, ids[i], holder)
		}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			require.True(t, s.Probe().Usage().Uniques.TooMany)
			require.Zero(t, s.Probe().Usage().Uniques.Prints)
			return nil
		}))
		requireSettled(t, q)
	})
}

// TestKeyOfCanceledChild: the key of a task that is canceled with its parent is
// freed in time, also if another key becomes free in the same group.
func TestKeyOfCanceledChild(t *testing.T) {
	throughSteps(t, Options{Shards: 1}, func(t *testing.T, p *Process) {
		parent := p.Store(Task{Queue: "parents"})
		early, child := keyed("early"), keyed("child")
		early.Unique.For, child.Unique.For = time.Minute, time.Hour
		child.After = []ID{parent}
		p.Store(child)
		require.NoError(t, p.Cancel(context.Background(), p.Store(early)))
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			_, err := s.Alter(keys.ID(parent), engine.AlterCancel, 0)
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

// TestChildIsScheduled: a task whose parents have ended waits for its time, also
// if the time of another one comes in the same group.
func TestChildIsScheduled(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
		start := p.Now()
		parent := p.Store(Task{Queue: "parents"})
		child := p.Store(Task{Queue: "a", After: []ID{parent}, RunAt: start.Add(time.Hour)})
		p.Store(Task{Queue: "others", RunAt: start.Add(time.Minute)})
		l := p.Take("parents")
		p.Step()
		p.Pass(time.Minute - time.Millisecond)
		require.NoError(t, p.shard(0).probe(func(s *shard) error {
			p.Skew.Add(int64(time.Millisecond)) // for the next group, which lets the child go on
			_, err := s.Complete(l.Receipt.inner(), nil, nil, false)
			return err
		}))
		p.Check()
		require.Equal(t, Scheduled, p.StateOf(child))
		require.Equal(t, Counts{Ready: 1}, countsOf(t, p.Queue, "others"))
		p.Pass(time.Hour)
		require.Equal(t, Ready, p.StateOf(child))
	})
}

// readsOf is how many entries the owner of the only shard has read.
func (q *Queue) readsOf(t *testing.T) (n int) {
	require.NoError(t, q.shard(0).probe(func(s *shard) error { n = s.Probe().Usage().Read; return nil }))
	return n
}
