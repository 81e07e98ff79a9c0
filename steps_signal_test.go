package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// signalRecorder notes, by task, what its waits for signals return, and the numbers of its runs.
type signalRecorder struct {
	mu   sync.Mutex
	got  map[codeq.ID][]string
	runs map[codeq.ID]int
}

func (r *signalRecorder) note(id codeq.ID, value string, err error) error {
	if errors.Is(err, codeq.ErrSuspended) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil:
		r.got[id] = append(r.got[id], value)
	case errors.Is(err, codeq.ErrNoSignal):
		r.got[id] = append(r.got[id], "none")
		return nil
	}
	return err
}

func (r *signalRecorder) of(id codeq.ID) (got []string, runs int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got[id], r.runs[id]
}

// waiting makes the handler of a queue wait an hour for each of the names, one after the other.
func (r *signalRecorder) waiting(m *codeq.Mux, queue string, names ...string) {
	codeq.Handle(m, queue, func(ctx context.Context, j *codeq.Job[[]byte]) error {
		r.mu.Lock()
		if r.got == nil {
			r.got, r.runs = make(map[codeq.ID][]string), make(map[codeq.ID]int)
		}
		r.got[j.ID] = nil
		r.runs[j.ID]++
		r.mu.Unlock()
		for _, name := range names {
			value, err := codeq.WaitSignal[string](ctx, name, time.Hour)
			if err := r.note(j.ID, value, err); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestWaitSignal: a task waits for a signal without a worker, an attempt or a place of a limit, and
// goes on when it comes. One that comes before is kept until the task waits for it.
func TestWaitSignal(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards, Retention: time.Hour, MaxAttempts: 1})
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
			var m codeq.Mux
			var waits signalRecorder
			waits.waiting(&m, "a", "first", "second")
			startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
			ids := queuetest.Produce(t, q, codeq.Task{Queue: "a", Group: "g"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", Group: "g"})
			synctest.Wait()
			require.Equal(t, codeq.Counts{Scheduled: 2, Blocked: 1}, queuetest.CountsOf(t, q, "a"), "a task that waits keeps its turn")
			got := queuetest.InfoOf(t, q, ids[0])
			require.Equal(t, []string{"first"}, namesOf(got))
			require.Equal(t, codeq.StepNoSignal, got.Steps[0].Kind)
			require.NoError(t, queuetest.CheckAll(q))

			require.NoError(t, q.Signal(t.Context(), ids[0], "second", "early"))
			synctest.Wait()
			_, runs := waits.of(ids[0])
			require.Equal(t, 1, runs, "another signal makes no task go on")
			require.NoError(t, queuetest.CheckAll(q))
			require.NoError(t, q.Signal(t.Context(), ids[0], "first", "late"))
			synctest.Wait()
			got = queuetest.InfoOf(t, q, ids[0])
			require.Equal(t, codeq.Done, got.State)
			require.Equal(t, 1, got.Attempts)
			require.Equal(t, []codeq.StepKind{codeq.StepSignal, codeq.StepSignal}, []codeq.StepKind{got.Steps[0].Kind, got.Steps[1].Kind})
			require.Equal(t, `"late"`, string(got.Steps[0].Result))
			values, runs := waits.of(ids[0])
			require.Equal(t, []string{"late", "early"}, values)
			require.Equal(t, 3, runs)
			require.Equal(t, codeq.Scheduled, queuetest.InfoOf(t, q, ids[1]).State, "it is the signal of another task")
			require.Equal(t, codeq.Scheduled, queuetest.InfoOf(t, q, ids[2]).State, "it has got the turn")
			require.NoError(t, queuetest.CheckAll(q))
		})
	}
}

// TestWaitSignalEnds: a wait whose time has passed stays one without a signal in all later runs. A
// signal that comes after it is for the next wait of its name.
func TestWaitSignalEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Minute}})
		var m codeq.Mux
		fails := true
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			for i, timeout := range []time.Duration{time.Hour, 0, time.Hour, time.Hour} {
				_, err := codeq.WaitSignal[string](ctx, "s", timeout)
				if i == 2 && err == nil {
					_, err = codeq.WaitSignal[string](ctx, "s", timeout)
					require.ErrorIs(t, err, codeq.ErrInvalid, "the task has got the signal")
					require.NotErrorIs(t, err, codeq.ErrSuspended)
					return nil
				}
				if i == 1 && errors.Is(err, codeq.ErrNoSignal) && fails {
					fails = false
					return errors.New("boom")
				}
				if !errors.Is(err, codeq.ErrNoSignal) {
					return err
				}
			}
			return errors.New("no signal")
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		require.Len(t, queuetest.InfoOf(t, q, id).Steps, 2)
		require.NoError(t, q.Signal(t.Context(), id, "s", "x")) // in the wait between two attempts
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State, "it does not wait for the signal")
		require.NoError(t, queuetest.CheckAll(q))
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		got = queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
		var kinds []codeq.StepKind
		for _, s := range got.Steps {
			kinds = append(kinds, s.Kind)
		}
		require.Equal(t, []codeq.StepKind{codeq.StepNoSignal, codeq.StepNoSignal, codeq.StepSignal}, kinds)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSignalAmidARun: a signal that comes after a handler has begun to wait, and before its run has
// ended, makes the task go on at once.
func TestSignalAmidARun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			value, err := codeq.WaitSignal[int](ctx, "s", time.Hour)
			if err != nil {
				require.NoError(t, q.Signal(ctx, j.ID, "s", 7))
				require.ErrorIs(t, q.Signal(ctx, j.ID, "s", 7), codeq.ErrDuplicate)
				return err
			}
			return j.SetResultValue(value)
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
		require.Equal(t, "7", string(got.Result))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSignalsAtOnce: no signal is missed, in any order of tasks and signals.
func TestSignalsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Retention: 24 * time.Hour})
		var m codeq.Mux
		var waits signalRecorder
		names := []string{"s", "t", "u"}
		waits.waiting(&m, "a", names...)
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 8})
		ids := queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 100)...)
		var all sync.WaitGroup
		for _, id := range ids {
			for _, name := range names {
				all.Go(func() {
					if err := q.Signal(t.Context(), id, name, name); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		synctest.Wait()
		for _, id := range ids {
			require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
			got, _ := waits.of(id)
			require.Equal(t, names, got)
		}
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSignalRefuses: what no task can take is refused, and nothing is stored.
func TestSignalRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		ctx := t.Context()
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		for _, name := range []string{"", strings.Repeat("x", 129), "\xff"} {
			require.ErrorIs(t, q.Signal(ctx, id, name, 1), codeq.ErrInvalid)
		}
		require.ErrorIs(t, q.Signal(ctx, id, "s", make([]byte, 64<<10)), codeq.ErrInvalid)
		require.ErrorIs(t, q.Signal(ctx, id, "s", 1, nil), codeq.ErrInvalid)
		require.Error(t, q.Signal(ctx, id, "s", func() {}))
		require.ErrorIs(t, q.Signal(ctx, codeq.ID{1}, "s", 1), codeq.ErrNotFound)
		_, err := codeq.WaitSignal[int](ctx, "s", time.Hour)
		require.ErrorIs(t, err, codeq.ErrInvalid)
		require.Zero(t, queuetest.Stored(t, q, keys.Step))

		for i := range 64 {
			require.NoError(t, q.Signal(ctx, id, fmt.Sprint(i), i))
		}
		require.ErrorIs(t, q.Signal(ctx, id, "one more", 1), codeq.ErrInvalid)
		err = q.Signal(ctx, id, "0", 1)
		var duplicate *codeq.DuplicateError
		require.ErrorAs(t, err, &duplicate)
		require.Equal(t, codeq.DuplicateError{Signal: "0", ID: id}, *duplicate)
		require.ErrorContains(t, err, `has got signal "0" before`)
		large := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		require.NoError(t, q.Signal(ctx, large, "s", make([]byte, 40<<10)))
		require.ErrorIs(t, q.Signal(ctx, large, "t", make([]byte, 40<<10)), codeq.ErrInvalid)
		require.Equal(t, 2, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSignalsGoWithTheirTask: signals that were not taken are gone when the task has ended, however
// it ends. A redriven one refuses again those that it has taken, and no others.
func TestSignalsGoWithTheirTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
		ctx := t.Context()
		for _, retention := range []time.Duration{0, time.Hour} {
			for name, end := range map[string]func(l *codeq.Lease) error{
				"complete": func(l *codeq.Lease) error { return q.Complete(ctx, l.Receipt, nil) },
				"cancel":   func(l *codeq.Lease) error { return q.Cancel(ctx, l.ID) },
				"dead":     func(l *codeq.Lease) error { return q.DeadLetter(ctx, l.Receipt, errors.New("boom")) },
				"cancel waiting": func(l *codeq.Lease) error {
					return errors.Join(q.Release(ctx, l.Receipt, time.Hour), q.Cancel(ctx, l.ID))
				},
			} {
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Retention: retention})[0]
				require.NoError(t, q.Signal(ctx, id, "before", 1))
				l := queuetest.ClaimNow(t, q, "a")
				require.NoError(t, q.Signal(ctx, id, "during", 1))
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, end(l), name)
				require.ErrorIs(t, q.Signal(ctx, id, "after", 1), codeq.ErrNotFound)
				require.Zero(t, queuetest.Stored(t, q, keys.Step), name)
				require.NoError(t, queuetest.CheckAll(q))
			}
		}

		var m codeq.Mux
		codeq.Handle(&m, "b", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if _, err := codeq.WaitSignal[int](ctx, "s", time.Hour); err != nil {
				return err
			}
			return codeq.DeadLetter(errors.New("boom"))
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "b"})[0]
		require.NoError(t, q.Signal(ctx, id, "t", 1))
		require.NoError(t, q.Signal(ctx, id, "s", 1))
		synctest.Wait()
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, queuetest.CheckAll(q))
		queuetest.Configure(t, q, "b", func(s *codeq.Settings) { s.Paused = true })
		require.NoError(t, q.RedriveDead(ctx, id))
		require.ErrorIs(t, q.Signal(ctx, id, "s", 1), codeq.ErrDuplicate)
		require.NoError(t, q.Signal(ctx, id, "t", 1))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSignalsSurviveCrashes: after a crash, and after an export of the disk and its import, signals
// are as they were, and tasks wait for the same ones.
func TestSignalsSurviveCrashes(t *testing.T) {
	for _, how := range []string{"crash", "transfer"} {
		t.Run(how, func(t *testing.T) {
			disk := crashfs.New()
			opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, Retention: time.Hour})
			var crashed *crashfs.Disk
			var m codeq.Mux
			var waits signalRecorder
			waits.waiting(&m, "a", "first", "second")
			t.Run("process", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, opts)
					startRun(t, q, &m, codeq.RunOptions{Grace: -1})
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "1"}}, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "2"}})
					synctest.Wait()
					for key, name := range map[string]string{"1": "first", "2": "second"} {
						require.NoError(t, q.Signal(t.Context(), byKey(t, q, key).ID, name, key))
					}
					synctest.Wait()
					crashed = disk.CrashClone(vfs.CrashCloneCfg{})
				})
			})
			synctest.Test(t, func(t *testing.T) {
				opts := *queuetest.OnDisk(crashed, &opts)
				if how == "transfer" {
					transferred(t, crashed, 2)
					opts.Shards = 2
				}
				dir := map[string]string{"crash": "q", "transfer": "new"}[how]
				q, err := codeq.Open(dir, &opts)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, q.Close()) })
				require.NoError(t, queuetest.CheckAll(q))
				startRun(t, q, &m, codeq.RunOptions{})
				synctest.Wait()
				one, two := byKey(t, q, "1"), byKey(t, q, "2")
				require.ErrorIs(t, q.Signal(t.Context(), one.ID, "first", "again"), codeq.ErrDuplicate)
				require.ErrorIs(t, q.Signal(t.Context(), two.ID, "second", "again"), codeq.ErrDuplicate)
				require.NoError(t, q.Signal(t.Context(), one.ID, "second", "1"))
				require.NoError(t, q.Signal(t.Context(), two.ID, "first", "2"))
				synctest.Wait()
				require.NoError(t, queuetest.CheckAll(q))
				for key, id := range map[string]codeq.ID{"1": one.ID, "2": two.ID} {
					require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
					values, _ := waits.of(id)
					require.Equal(t, []string{key, key}, values)
				}
			})
		})
	}
}

func byKey(t *testing.T, q *codeq.Queue, key string) *codeq.TaskInfo {
	t.Helper()
	info, err := q.FindByKey(t.Context(), codeq.UniqueKey{Queue: "a", Key: key})
	require.NoError(t, err)
	return info
}
