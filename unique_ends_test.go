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
			_, err := s.Rules.Alter(keys.ID(parent), engine.AlterCancel, 0)
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
			_, err := s.Rules.Complete(engine.Receipt{ID: keys.ID(l.Receipt.ID), Token: l.Receipt.Token}, nil, nil, false)
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

// TestUniqueEnds: the moment when a key becomes free after its task has ended.
func TestUniqueEnds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		unique codeq.Unique
		kept   map[codeq.State]bool // until an hour after the produce
	}{
		{"until the end", codeq.Unique{}, nil},
		{"for an hour", codeq.Unique{For: time.Hour}, map[codeq.State]bool{codeq.Done: true, codeq.Canceled: true, codeq.Dead: true}},
		{"unless completed", codeq.Unique{For: time.Hour, ReleaseOnComplete: true}, map[codeq.State]bool{codeq.Canceled: true, codeq.Dead: true}},
		{"unless dead", codeq.Unique{For: time.Hour, ReleaseOnDead: true}, map[codeq.State]bool{codeq.Done: true, codeq.Canceled: true}},
		{"unless either", codeq.Unique{For: time.Hour, ReleaseOnComplete: true, ReleaseOnDead: true}, map[codeq.State]bool{codeq.Canceled: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for state, end := range endings {
				t.Run(state.String(), func(t *testing.T) {
					queuetest.ThroughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
						task := queuetest.Keyed("k")
						task.Unique.For = tc.unique.For
						task.Unique.ReleaseOnComplete = tc.unique.ReleaseOnComplete
						task.Unique.ReleaseOnDead = tc.unique.ReleaseOnDead
						id := p.Store(task)
						p.Step()
						p.Pass(20 * time.Minute)
						end(p, id)
						p.Step()
						require.Equal(t, state, p.StateOf(id))
						if tc.kept[state] {
							p.Taken(task, id)
							p.Pass(40*time.Minute - time.Millisecond)
							p.Step()
							p.Taken(task, id)
							p.Pass(time.Millisecond)
							p.Step()
						}
						require.Zero(t, p.Stored(keys.Unique))
						require.Zero(t, p.Stored(keys.Freed))
						next := p.Store(task)
						require.NotEqual(t, id, next)
						p.Taken(task, next)
					})
				})
			}
		})
	}
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

// TestReleaseKey: a released key goes to the next task, for any state of the first one. The end of
// the first task does not touch the key any more.
func TestReleaseKey(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, tc := range []struct {
		name  string
		reach func(p *queuetest.Process, id codeq.ID)
		ended bool
		taken time.Duration
	}{
		{"waiting", func(*queuetest.Process, codeq.ID) {}, false, 0},
		{"waiting, for an hour", func(*queuetest.Process, codeq.ID) {}, false, time.Hour},
		{"leased", func(p *queuetest.Process, _ codeq.ID) { p.Take("a") }, false, 0},
		{"leased, for an hour", func(p *queuetest.Process, _ codeq.ID) { p.Take("a") }, false, time.Hour},
		{"done, for an hour", endings[codeq.Done], true, time.Hour},
		{"dead, for an hour", endings[codeq.Dead], true, time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2, LeaseFor: time.Hour, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
				task := queuetest.Keyed("k")
				task.Unique.For = tc.taken
				first := p.Store(task)
				tc.reach(p, first)
				p.Step()
				p.Taken(task, first)
				require.NoError(t, p.ReleaseKey(ctx, codeq.UniqueKey{Queue: "a", Key: "k"}))
				p.Step()
				require.ErrorIs(t, p.ReleaseKey(ctx, keyFor(task)), codeq.ErrNotFound)
				p.Pass(10 * time.Minute)
				second := p.Store(task)
				require.NotEqual(t, first, second)
				if !tc.ended {
					require.NoError(t, p.Cancel(ctx, first))
				}
				p.Step()
				p.Taken(task, second)
				require.NoError(t, p.Cancel(ctx, second))
				if tc.taken > 0 {
					p.Pass(tc.taken - time.Millisecond) // of the second, not of the first
					p.Taken(task, second)
					p.Pass(time.Millisecond)
				}
				p.Step()
				require.ErrorIs(t, p.ReleaseKey(ctx, keyFor(task)), codeq.ErrNotFound)
				require.Zero(t, p.Stored(keys.Unique))
				require.Zero(t, p.Stored(keys.Freed))
			})
		})
	}
}

// TestReleaseKeyAtOnce: a key is released in the same group that produces or completes its task.
// The end of the task does not touch the key afterwards.
func TestReleaseKeyAtOnce(t *testing.T) {
	for _, taken := range []time.Duration{0, time.Hour} {
		queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
			ctx := t.Context()
			task := queuetest.Keyed("k")
			task.Unique.For = taken
			together := func(calls ...func() error) {
				t.Helper()
				goOn, errs := queuetest.Hold(q, 0), make([]error, len(calls))
				synctest.Wait()
				for i, call := range calls {
					go func() { errs[i] = call() }()
					synctest.Wait()
				}
				goOn()
				synctest.Wait()
				for _, err := range errs {
					require.NoError(t, err)
				}
			}
			release := func() error { return q.ReleaseKey(ctx, keyFor(task)) }
			var first codeq.ID
			together(func() (err error) { first, err = q.Produce(ctx, task); return err }, release)
			require.NoError(t, queuetest.CheckAll(q))
			second := queuetest.Produce(t, q, task)[0]
			l := queuetest.ClaimNow(t, q, "a")
			require.Equal(t, first, l.ID)
			queuetest.Complete(t, q, l)
			_, err := q.Produce(ctx, task)
			require.Equal(t, second, queuetest.Duplicates(t, err)[0])

			l = queuetest.ClaimNow(t, q, "a")
			require.Equal(t, second, l.ID)
			if taken == 0 {
				together(release, func() error { return q.Complete(ctx, l.Receipt, nil) })
			} else {
				together(func() error { return q.Complete(ctx, l.Receipt, nil) }, release)
			}
			queuetest.Produce(t, q, task)
			require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "a"))
		})
	}
}

// TestUniqueClock: if the clock is set back, a key stays taken neither longer nor shorter. If it is
// set forward, the key becomes free early, but never before the end of its task.
func TestUniqueClock(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		task := queuetest.Keyed("k")
		task.Unique.For = 10 * time.Minute
		id := p.Store(task)
		p.Step()
		p.SetClock(time.Hour)
		p.Taken(task, id) // the task has not ended
		p.SetClock(-time.Hour)
		p.Step()
		p.Taken(task, id)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		require.Zero(t, p.Stored(keys.Unique), "its time had come once")

		id = p.Store(task) // while the clock of the IDs, which never goes back, is ahead

		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		p.Step()
		p.Taken(task, id)
		p.SetClock(-time.Hour)
		p.Step()
		p.Pass(10*time.Minute - time.Millisecond)
		p.Taken(task, id)
		p.Pass(time.Minute) // by then the owner has read the clock
		require.Zero(t, p.Stored(keys.Unique))

		id = p.Store(task)
		require.NoError(t, p.Cancel(ctx, id))
		p.Taken(task, id)
		p.SetClock(4 * time.Hour)
		next := p.Store(task) // at once, even before it is removed
		require.NotEqual(t, id, next)
		p.Step()
		p.Pass(2 * time.Minute)
		p.Taken(task, next)
		require.Equal(t, 1, p.Stored(keys.Freed), "that of the second")

		require.NoError(t, p.Cancel(ctx, next))
		p.Taken(task, next)
		p.SetClock(4 * time.Hour)
		p.Pass(time.Minute)
		require.Zero(t, p.Stored(keys.Unique))
		require.Zero(t, p.Stored(keys.Freed))
	})
}
