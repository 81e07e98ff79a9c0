package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
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

// stepRecorder counts the calls of steps by name.
type stepRecorder struct {
	mu    sync.Mutex
	calls map[string]int
}

func (r *stepRecorder) note(name string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls = make(map[string]int)
	}
	r.calls[name]++
	return r.calls[name]
}

func (r *stepRecorder) all() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls
}

// step runs a step whose result is its name and number.
func (r *stepRecorder) step(ctx context.Context, name string) (string, error) {
	return codeq.Step(ctx, name, func(context.Context) (string, error) {
		return fmt.Sprint(name, r.note(name)), nil
	})
}

// TestStepsAfterErrors: a handler that fails runs again, and its finished steps return their stored
// results. They are gone when the task is.
func TestStepsAfterErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Backoff: codeq.Backoff{Base: time.Second}})
		var m codeq.Mux
		var steps stepRecorder
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			for i := range 4 {
				name := string(rune('a' + i))
				got, err := steps.step(ctx, name)
				if err != nil {
					return err
				}
				require.Equal(t, name+"1", got)
				if j.Attempt <= i {
					return errors.New("boom")
				}
			}
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, []string{"a", "b"}, namesOf(got))
		require.Equal(t, `"b1"`, string(got.Steps[1].Result))
		require.Equal(t, codeq.StepResult, got.Steps[1].Kind)
		require.NoError(t, queuetest.CheckAll(q))
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, map[string]int{"a": 1, "b": 1, "c": 1, "d": 1}, steps.all())
		_, err := q.Get(t.Context(), id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

func namesOf(t *codeq.TaskInfo) (names []string) {
	for _, s := range t.Steps {
		names = append(names, s.Name)
	}
	return names
}

// TestStepsAreKept: a task that is kept has its steps, and a dead letter that is redriven goes on
// after the last one.
func TestStepsAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Retention: time.Hour})
		var m codeq.Mux
		var steps stepRecorder
		var mended atomic.Bool
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			if _, err := steps.step(ctx, "first"); err != nil {
				return err
			}
			if !mended.Load() {
				return errors.New("boom")
			}
			_, err := steps.step(ctx, "second")
			return err
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Dead, got.State)
		require.Equal(t, []string{"first"}, namesOf(got))
		require.Zero(t, queuetest.Stored(t, q, keys.Step), "they are in the record")
		require.NoError(t, queuetest.CheckAll(q))
		mended.Store(true)
		require.NoError(t, q.RedriveDead(t.Context(), id))
		synctest.Wait()
		got = queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State)
		require.Equal(t, []string{"first", "second"}, namesOf(got))
		require.Equal(t, map[string]int{"first": 1, "second": 1}, steps.all())
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestRedriveFromStep: a redriven dead letter runs a step of a name, and those after it, again.
func TestRedriveFromStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Retention: time.Hour})
		var m codeq.Mux
		var steps stepRecorder
		var mended atomic.Bool
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			if _, err := steps.step(ctx, "first"); err != nil {
				return err
			}
			if _, err := codeq.WaitSignal[string](ctx, "go", time.Hour); err != nil {
				return err
			}
			if _, err := steps.step(ctx, "last"); err != nil || mended.Load() {
				return err
			}
			return errors.New("boom")
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		require.NoError(t, q.Signal(t.Context(), id, "go", "now"))
		synctest.Wait()
		require.Equal(t, []string{"first", "go", "last"}, namesOf(queuetest.InfoOf(t, q, id)))
		for _, name := range []string{"none", strings.Repeat("x", 129)} {
			require.ErrorIs(t, q.RedriveDeadFrom(t.Context(), id, name), codeq.ErrInvalid)
		}
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
		mended.Store(true)
		require.NoError(t, q.RedriveDeadFrom(t.Context(), id, "go"))
		synctest.Wait()
		require.Equal(t, codeq.Scheduled, queuetest.InfoOf(t, q, id).State, "it waits for the signal again")
		require.NoError(t, q.Signal(t.Context(), id, "go", "again"))
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State)
		require.Equal(t, `"again"`, string(got.Steps[1].Result))
		require.Equal(t, map[string]int{"first": 1, "last": 2}, steps.all())
		require.NoError(t, queuetest.CheckAll(q))
		require.ErrorIs(t, q.RedriveDeadFrom(t.Context(), id, "go"), codeq.ErrNotFound)
	})
}

// TestSleepSuspends: a sleeping task uses no worker and no place of a limit, and its run counts as
// no attempt.
func TestSleepSuspends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Retention: time.Hour})
		require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Concurrency = 1 }))
		var m codeq.Mux
		var steps stepRecorder
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			require.Equal(t, 1, j.Attempt)
			name := string(j.Args)
			if _, err := steps.step(ctx, name); err != nil {
				return err
			}
			for i := range 20 {
				if err := codeq.Sleep(ctx, fmt.Sprint("pause ", i), time.Minute); err != nil {
					require.ErrorIs(t, err, codeq.ErrSuspended)
					require.Equal(t, codeq.VerdictSuspended, codeq.VerdictOf(err))
					if _, again := steps.step(ctx, "not yet"); again == nil {
						t.Error("a step runs in a suspended task")
					}
					return err
				}
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("x")}, codeq.Task{Queue: "a", Payload: []byte("y")})
		synctest.Wait()
		require.Equal(t, map[string]int{"x": 1, "y": 1}, steps.all(), "the second task runs while the first one sleeps")
		require.Equal(t, codeq.Counts{Scheduled: 2}, queuetest.CountsOf(t, q, "a"))
		got := queuetest.InfoOf(t, q, ids[0])
		require.Equal(t, []string{"x", "pause 0"}, namesOf(got))
		require.Equal(t, codeq.StepSleep, got.Steps[1].Kind)
		require.NoError(t, q.SetRunAt(t.Context(), ids[0], time.Now()))
		synctest.Wait()
		require.Equal(t, []string{"x", "pause 0", "pause 1"}, namesOf(queuetest.InfoOf(t, q, ids[0])), "the sleep has ended early")
		require.NoError(t, queuetest.CheckAll(q))
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range ids {
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Done, got.State)
			require.Equal(t, 1, got.Attempts)
			require.Len(t, got.History, 2, "%+v", got.History)
			require.Equal(t, codeq.EventSuspended, got.History[0].Outcome)
			require.Len(t, got.Steps, 21)
		}
		require.Empty(t, run.Reported())
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestSleepDecides: a task is suspended, whatever its handler returns or does after Sleep.
func TestSleepDecides(t *testing.T) {
	for name, end := range map[string]func() error{
		"nil": func() error { return nil }, "error": func() error { return errors.New("boom") },
		"dead":  func() error { return codeq.DeadLetter(errors.New("boom")) },
		"panic": func() error { panic("boom") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Retention: time.Hour})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
					if codeq.Sleep(ctx, "pause", time.Minute) != nil {
						return end()
					}
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				require.Equal(t, codeq.Scheduled, queuetest.InfoOf(t, q, id).State)
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
				require.Empty(t, run.Reported())
			})
		})
	}
}

// TestStepsChanged: a step that differs from the stored one makes the task a dead letter; redriven,
// it goes on after its last finished step.
func TestStepsChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Backoff: codeq.Backoff{Base: time.Second}})
		var m codeq.Mux
		var mu sync.Mutex // guards the next two
		names, failing := []string{"a", "b"}, true
		set := func(to []string, fails bool) {
			mu.Lock()
			defer mu.Unlock()
			names, failing = to, fails
		}
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			mu.Lock()
			defer mu.Unlock()
			for _, name := range names {
				if _, err := codeq.Step(ctx, name, func(context.Context) (int, error) { return 1, nil }); err != nil {
					return errors.New("hidden")
				}
			}
			if failing {
				return errors.New("boom")
			}
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		set([]string{"a", "c"}, false)
		time.Sleep(time.Minute)
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Dead, got.State)
		require.Contains(t, got.LastError, `step 2 is "c", and was "b"`)
		set([]string{"a", "b", "c"}, false)
		require.NoError(t, q.RedriveDead(t.Context(), id))
		synctest.Wait()
		_, err := q.Get(t.Context(), id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestStepsRefuse: what cannot be a step is refused.
func TestStepsRefuse(t *testing.T) {
	_, err := codeq.Step(t.Context(), "a", func(context.Context) (int, error) { return 0, nil })
	require.ErrorIs(t, err, codeq.ErrInvalid)
	require.ErrorIs(t, codeq.Sleep(t.Context(), "a", time.Hour), codeq.ErrInvalid)
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			no := func(context.Context) (int, error) { return 0, nil }
			for _, name := range []string{"", strings.Repeat("x", 129), "\xff"} {
				_, err := codeq.Step(ctx, name, no)
				require.ErrorIs(t, err, codeq.ErrInvalid)
				require.ErrorIs(t, codeq.Sleep(ctx, name, time.Hour), codeq.ErrInvalid)
			}
			_, err := codeq.Step(ctx, "outer", func(ctx context.Context) (int, error) {
				_, err := codeq.Step(ctx, "inner", no)
				require.ErrorIs(t, err, codeq.ErrInvalid)
				return 0, nil
			})
			require.NoError(t, err)
			_, err = codeq.Step[int](ctx, "nil", nil)
			require.ErrorIs(t, err, codeq.ErrInvalid)
			for range 2 { // the error of a step is returned, and the step may run again
				boom := errors.New("boom")
				_, err = codeq.Step(ctx, "failing", func(context.Context) (int, error) { return 0, boom })
				require.ErrorIs(t, err, boom)
			}
			_, err = codeq.Step(ctx, "another", no)
			require.ErrorIs(t, err, codeq.ErrInvalid, "the next run would find it in the place of the failed one")
			require.NotErrorIs(t, codeq.Sleep(ctx, "failing", time.Hour), codeq.ErrSuspended)
			_, err = codeq.Step(ctx, "failing", no)
			return err
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
		require.Equal(t, []string{"outer", "failing"}, namesOf(got))
	})
}

// TestStepBounds: too many steps, or results that are too large, make the task a dead letter with
// the steps before.
func TestStepBounds(t *testing.T) {
	for name, c := range map[string]struct{ size, steps int }{"steps": {1, 1000}, "bytes": {128<<10 - 10, 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
					for i := range 2000 {
						if _, err := codeq.Step(ctx, fmt.Sprint(i), func(context.Context) ([]byte, error) {
							require.Less(t, i, 1000, "a step begins that cannot be stored")
							return make([]byte, c.size), nil
						}); err != nil {
							return err
						}
					}
					return nil
				})
				startRun(t, q, &m, codeq.RunOptions{})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Dead, got.State)
				require.Len(t, got.Steps, c.steps)
				require.NoError(t, queuetest.CheckAll(q))
			})
		})
	}
}

// TestStepsSurviveCrashes: the disk at the end of a process that dies after any step has the steps
// whose calls have returned.
func TestStepsSurviveCrashes(t *testing.T) {
	for _, shards := range []int{1, 3} {
		for n := range 4 {
			disk := crashfs.New()
			opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk, Retention: time.Hour})
			var steps stepRecorder
			var crashed *crashfs.Disk
			handler := func(stop bool) func(context.Context, *codeq.Job[[]byte]) error {
				return func(ctx context.Context, j *codeq.Job[[]byte]) error {
					for i := range 4 {
						if stop && i == n {
							return untilCancelled(ctx, j)
						}
						got, err := steps.step(ctx, fmt.Sprint("step", i))
						if err != nil {
							return err
						}
						require.Equal(t, fmt.Sprintf("step%d1", i), got)
					}
					return nil
				}
			}
			var id codeq.ID
			t.Run("process", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, opts)
					var m codeq.Mux
					codeq.Handle(&m, "a", handler(true))
					startRun(t, q, &m, codeq.RunOptions{Grace: -1})
					id = queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
					synctest.Wait()
					crashed = disk.CrashClone(vfs.CrashCloneCfg{})
				})
			})
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, *queuetest.OnDisk(crashed, &opts))
				require.Equal(t, n, len(queuetest.InfoOf(t, q, id).Steps))
				require.NoError(t, queuetest.CheckAll(q))
				var m codeq.Mux
				codeq.Handle(&m, "a", handler(false))
				startRun(t, q, &m, codeq.RunOptions{})
				time.Sleep(time.Hour / 2)
				synctest.Wait()
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Done, got.State)
				require.Len(t, got.Steps, 4)
				require.Len(t, steps.all(), 4)
				for name, calls := range steps.all() {
					require.Equal(t, 1, calls, name)
				}
				require.NoError(t, queuetest.CheckAll(q))
			})
		}
	}
}

// TestStepOfUnknownOutcome: after the store of a step whose outcome its caller does not know, no
// other step is taken for it, and the next run finds the stored one.
func TestStepOfUnknownOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Second}})
		var m codeq.Mux
		var steps stepRecorder
		buffer := []byte("first")
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			goOn := func() {}
			short, cancel := context.WithCancel(ctx)
			defer cancel()
			got, err := codeq.Step(short, "first", func(context.Context) ([]byte, error) {
				steps.note("first")
				goOn = queuetest.Hold(q, 0)
				go func() { synctest.Wait(); cancel() }()
				return buffer, nil
			})
			if j.Attempt == 1 {
				copy(buffer, "other") // it belongs to the handler
				require.ErrorIs(t, err, codeq.ErrUncertain)
				goOn()
				for _, name := range []string{"first", "second"} {
					_, again := steps.step(ctx, name)
					require.ErrorIs(t, again, codeq.ErrUncertain)
				}
				require.ErrorIs(t, codeq.Sleep(ctx, "pause", time.Hour), codeq.ErrUncertain)
				return err
			}
			require.NoError(t, err)
			require.Equal(t, "first", string(got))
			_, err = steps.step(ctx, "second")
			return err
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(time.Minute)
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
		require.Equal(t, []string{"first", "second"}, namesOf(got))
		require.Equal(t, map[string]int{"first": 1, "second": 1}, steps.all())
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestStepAtTheEndOfItsContext: a step that has done its work is stored, although its context has
// ended meanwhile. After that no step begins, and no task is suspended.
func TestStepAtTheEndOfItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Minute}})
		var m codeq.Mux
		var steps stepRecorder
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if _, err := codeq.Step(ctx, "slow", func(context.Context) (int, error) {
				time.Sleep(time.Minute + time.Millisecond)
				return steps.note("slow"), nil
			}); err != nil {
				return err
			}
			if j.Attempt == 1 {
				require.ErrorIs(t, codeq.Sleep(ctx, "next", time.Hour), context.DeadlineExceeded)
			}
			_, err := steps.step(ctx, "next")
			return err
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Timeout: time.Minute})[0]
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.Equal(t, []string{"slow"}, namesOf(got))
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.Equal(t, map[string]int{"slow": 1, "next": 1}, steps.all())
	})
}

// TestCanceledTaskBeginsNoStep: neither a step nor a sleep begins after the task was canceled.
func TestCanceledTaskBeginsNoStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		var steps stepRecorder
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			_, err := codeq.Step(ctx, "first", func(context.Context) (int, error) {
				require.NoError(t, q.Cancel(t.Context(), j.ID)) // it ends ctx
				<-ctx.Done()                                    // the handler has been told
				return 1, nil
			})
			require.ErrorIs(t, err, codeq.ErrLeaseLost)
			_, err = steps.step(ctx, "second")
			require.Error(t, err)
			require.NotErrorIs(t, codeq.Sleep(ctx, "pause", time.Hour), codeq.ErrSuspended)
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		require.Equal(t, codeq.Canceled, queuetest.InfoOf(t, q, id).State)
		require.Empty(t, steps.all())
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// wildError is an error whose methods do what they should not.
type wildError struct{ act func() }

func (e wildError) Error() string { return "wild" }

func (e wildError) Is(error) bool { e.act(); return false }

// TestSleepWithWildErrors: the error of a handler that sleeps ends neither worker nor sleep.
func TestSleepWithWildErrors(t *testing.T) {
	for name, act := range map[string]func(){"panic": func() { panic("boom") }, "exit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Retention: time.Hour})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
					if codeq.Sleep(ctx, "pause", time.Minute) != nil {
						return wildError{act}
					}
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
				ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				time.Sleep(time.Hour / 2)
				synctest.Wait()
				for _, id := range ids {
					require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
				}
				require.NoError(t, run.End(nil))
				require.Empty(t, run.Reported())
			})
		})
	}
}

// TestStepAfterAPanic: a deferred step does not take the place of the one that panics.
func TestStepAfterAPanic(t *testing.T) {
	for name, act := range map[string]func(){"panic": func() { panic("boom") }, "exit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Second}})
				var m codeq.Mux
				var steps stepRecorder
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) (err error) {
					defer func() {
						if _, again := steps.step(ctx, "close"); err == nil {
							err = again
						}
						if j.Attempt == 1 {
							require.Error(t, codeq.Sleep(ctx, "pause", time.Hour))
						}
					}()
					_, err = codeq.Step(ctx, "work", func(context.Context) (int, error) {
						if j.Attempt == 1 {
							act()
						}
						return steps.note("work"), nil
					})
					return err
				})
				startRun(t, q, &m, codeq.RunOptions{})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				time.Sleep(time.Minute)
				synctest.Wait()
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Done, got.State, got.LastError)
				require.Equal(t, []string{"work", "close"}, namesOf(got))
				require.Equal(t, map[string]int{"work": 1, "close": 1}, steps.all())
			})
		})
	}
}
