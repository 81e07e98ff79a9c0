package codeq_test

import (
	"context"
	"errors"
	"fmt"
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

// familyMux has handlers of parents, which produce a child each, and of children. how is the end of
// a child, by its payload.
func familyMux(how func(ctx context.Context, j *codeq.Job[string]) error, ended func(j *codeq.Job[string], result string, err error) error) *codeq.Mux {
	m := new(codeq.Mux)
	codeq.Handle(m, "children", how)
	codeq.Handle(m, "parents", func(ctx context.Context, j *codeq.Job[string]) error {
		task, err := codeq.NewTask("children", j.Args)
		if err != nil {
			return err
		}
		task.MaxAttempts = 1
		result, err := codeq.Child[string](ctx, "child", task)
		if errors.Is(err, codeq.ErrSuspended) {
			return err
		}
		return ended(j, result, err)
	})
	return m
}

// TestChild: a parent waits for its child without a worker, and gets its result or how it has
// failed. That stays, whatever becomes of the child.
func TestChild(t *testing.T) {
	for _, shards := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards, Retention: 10 * time.Hour})
			var cancel codeq.ID
			var runs atomic.Int32
			m := familyMux(func(ctx context.Context, j *codeq.Job[string]) error {
				switch j.Args {
				case "dies":
					return errors.New("boom")
				case "is canceled":
					return codeq.Snooze(time.Minute)
				}
				time.Sleep(time.Minute)
				return j.SetResultValue(j.Args + "!")
			}, func(j *codeq.Job[string], result string, err error) error {
				if runs.Add(1); j.Attempt == 1 {
					return codeq.RetryAfter(time.Hour, errors.New("once more"))
				}
				text := ""
				if failed := new(codeq.CallError); errors.As(err, &failed) {
					text = fmt.Sprint(failed.Outcome.State, " ", failed.Outcome.LastError)
				}
				return j.SetResultValue(result + " " + text)
			})
			startRun(t, q, m, codeq.RunOptions{Concurrency: 3})
			ids := make(map[string]codeq.ID)
			for _, how := range []string{"lives", "dies", "is canceled"} {
				task, err := codeq.NewTask("parents", how)
				require.NoError(t, err)
				ids[how] = queuetest.Produce(t, q, task)[0]
			}
			time.Sleep(time.Second)
			synctest.Wait()
			got := queuetest.InfoOf(t, q, ids["lives"])
			require.Equal(t, codeq.Scheduled, got.State)
			require.Equal(t, codeq.StepChild, got.Steps[0].Kind)
			child, err := codeq.ParseID(string(got.Steps[0].Result))
			require.NoError(t, err)
			require.Equal(t, "children", queuetest.InfoOf(t, q, child).Queue)
			cancel, err = codeq.ParseID(string(queuetest.InfoOf(t, q, ids["is canceled"]).Steps[0].Result))
			require.NoError(t, err)
			require.NoError(t, queuetest.CheckAll(q))
			time.Sleep(5 * time.Minute)
			require.NoError(t, q.Cancel(t.Context(), cancel))
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Equal(t, int32(3), runs.Load(), "each has ended once for its parent")
			require.NoError(t, queuetest.CheckAll(q))
			dead, err := codeq.ParseID(string(queuetest.InfoOf(t, q, ids["dies"]).Steps[0].Result))
			require.NoError(t, err)
			require.NoError(t, q.Forget(t.Context(), dead))
			time.Sleep(2 * time.Hour)
			synctest.Wait()
			for how, want := range map[string]string{"lives": `"lives! "`, "dies": `" dead boom"`, "is canceled": `" canceled "`} {
				got := queuetest.InfoOf(t, q, ids[how])
				require.Equal(t, codeq.Done, got.State, got.LastError)
				require.Equal(t, want, string(got.Result))
				require.Len(t, got.Steps, 2)
				require.Equal(t, 2, got.Attempts)
			}
			require.NoError(t, queuetest.CheckAll(q))
		})
	}
}

// TestChildIsProducedOnce: a run that fails, or whose process dies, after it has produced the child
// and before it is suspended, does not produce another one; a child that has ended first is found.
func TestChildIsProducedOnce(t *testing.T) {
	for _, how := range []string{"error", "crash"} {
		t.Run(how, func(t *testing.T) {
			disk := crashfs.New()
			opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: 3, Durability: codeq.DurabilityDisk, Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Minute}})
			var produced atomic.Int32
			mux := func(stop bool) *codeq.Mux {
				m := familyMux(func(ctx context.Context, j *codeq.Job[string]) error {
					produced.Add(1)
					return j.SetResultValue(j.Args)
				}, func(j *codeq.Job[string], result string, err error) error {
					if err != nil {
						return codeq.DeadLetter(err)
					}
					return j.SetResultValue(result)
				})
				m.Use(func(next codeq.Handler) codeq.Handler {
					return func(ctx context.Context, l *codeq.Lease) error {
						if err := next(ctx, l); !errors.Is(err, codeq.ErrSuspended) || !stop {
							return err
						}
						<-ctx.Done() // the child ends meanwhile, and the process dies
						return ctx.Err()
					}
				})
				return m
			}
			var id codeq.ID
			var crashed *crashfs.Disk
			t.Run("process", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, opts)
					startRun(t, q, mux(how == "crash"), codeq.RunOptions{Grace: -1})
					task, err := codeq.NewTask("parents", "x")
					require.NoError(t, err)
					id = queuetest.Produce(t, q, task)[0]
					time.Sleep(time.Second)
					synctest.Wait()
					crashed = disk.CrashClone(vfs.CrashCloneCfg{})
				})
			})
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, *queuetest.OnDisk(crashed, &opts))
				startRun(t, q, mux(false), codeq.RunOptions{})
				time.Sleep(time.Hour / 2)
				synctest.Wait()
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Done, got.State, got.LastError)
				require.Equal(t, int32(1), produced.Load())
				require.NoError(t, queuetest.CheckAll(q))
			})
		})
	}
}

// TestChildOfPausedParent: a parent that goes on days after the end of its child has its result,
// though the child wants to be kept for less.
func TestChildOfPausedParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "parent", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			_, err := codeq.Child[[]byte](ctx, "child", codeq.Task{Queue: "child", Retention: time.Second})
			return err
		})
		codeq.Handle(&m, "child", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			j.SetResult([]byte("paid"))
			return q.Pause(ctx, "parent")
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "parent", Retention: codeq.Forever})[0]
		time.Sleep(3 * 24 * time.Hour)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, q.Resume(t.Context(), "parent"))
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, got.State, got.LastError)
		require.Equal(t, "paid", string(got.Steps[1].Result))
	})
}

// TestChildRefuses: a child in the group of its parent or after it, with a key, or without a queue
// is refused.
func TestChildRefuses(t *testing.T) {
	_, err := codeq.Child[int](t.Context(), "a", codeq.Task{Queue: "a"})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			for _, task := range []codeq.Task{
				{Queue: "a", Group: "g"}, {Queue: "b", Unique: codeq.Unique{Key: "k"}}, {Queue: "b", After: []codeq.ID{j.ID}}, {},
			} {
				_, err := codeq.Child[int](ctx, "child", task)
				require.ErrorIs(t, err, codeq.ErrInvalid)
				require.NotErrorIs(t, err, codeq.ErrSuspended)
			}
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Group: "g"})[0]
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.Zero(t, queuetest.Stored(t, q, keys.Step))
	})
}

// TestChildIsLookedAt: a parent that is not told of the end of its child looks for itself.
func TestChildIsLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Retention: time.Hour})
		m := familyMux(func(context.Context, *codeq.Job[string]) error { return codeq.Snooze(100 * time.Hour) }, func(*codeq.Job[string], string, error) error { return nil })
		startRun(t, q, m, codeq.RunOptions{})
		task, err := codeq.NewTask("parents", "x")
		require.NoError(t, err)
		id := queuetest.Produce(t, q, task)[0]
		time.Sleep(60 * time.Hour)
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Len(t, got.Steps, 1)
		require.NoError(t, q.SetRunAt(t.Context(), id, time.Now()))
		synctest.Wait()
		require.Len(t, queuetest.InfoOf(t, q, id).Steps, 1)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestDeadChildIsForgotten: a dead child is kept as long as other dead letters, and for a week at
// least, whether it has died before its parent waits for it, or after.
func TestDeadChildIsForgotten(t *testing.T) {
	t.Parallel()
	for _, took := range []time.Duration{0, 10 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: 1})
			require.NoError(t, q.Configure(t.Context(), "children", func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
			m := familyMux(func(context.Context, *codeq.Job[string]) error {
				time.Sleep(took)
				return errors.New("no stock")
			}, func(*codeq.Job[string], string, error) error { return nil })
			startRun(t, q, m, codeq.RunOptions{Concurrency: 2})
			task, err := codeq.NewTask("parents", "x")
			require.NoError(t, err)
			queuetest.Produce(t, q, task)
			time.Sleep(6 * 24 * time.Hour)
			synctest.Wait()
			require.EqualValues(t, 1, queuetest.CountsOf(t, q, "children").Dead)
			time.Sleep(2 * 24 * time.Hour)
			synctest.Wait()
			require.Zero(t, queuetest.CountsOf(t, q, "children").Dead)
		})
	}
}
