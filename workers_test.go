package codeq_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// workersOf lists the workers of a queue.
func workersOf(t *testing.T, q *codeq.Queue) []codeq.WorkerInfo {
	t.Helper()
	workers, err := q.Workers(t.Context())
	require.NoError(t, err)
	return workers
}

// TestWorkers: the entry of each Run in the list, as long as the Run lasts.
func TestWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		require.Empty(t, workersOf(t, q))
		goOn := make(chan struct{})
		var m codeq.Mux
		for _, queue := range []string{"a", "b"} {
			codeq.Handle(&m, queue, func(context.Context, *codeq.Job[[]byte]) error { <-goOn; return nil })
		}
		begun := time.Now().UTC()
		named := startRun(t, q, &m, codeq.RunOptions{Name: "n", Queues: []string{"b"}, Concurrency: 2})
		time.Sleep(time.Minute)
		host, err := os.Hostname()
		require.NoError(t, err)
		byDefault := startRun(t, q, &m, codeq.RunOptions{Concurrency: 7})
		again := startRun(t, q, &m, codeq.RunOptions{Name: "n", Concurrency: 1})
		queuetest.Produce(t, q, codeq.Task{Queue: "b"}, codeq.Task{Queue: "b"})
		synctest.Wait()
		all := workersOf(t, q)
		require.Len(t, all, 3)
		own := fmt.Sprintf("%s:%d", host, os.Getpid())
		byName := make(map[string][]codeq.WorkerInfo)
		busy := 0
		for _, w := range all {
			busy += w.Busy
			w.Busy = 0
			byName[w.Name] = append(byName[w.Name], w)
		}
		require.Equal(t, 2, busy)
		require.Equal(t, map[string][]codeq.WorkerInfo{
			own: {{Name: own, Queues: []string{"a", "b"}, Concurrency: 7, Since: begun.Add(time.Minute)}},
			"n": {
				{Name: "n", Queues: []string{"b"}, Concurrency: 2, Since: begun},
				{Name: "n", Queues: []string{"a", "b"}, Concurrency: 1, Since: begun.Add(time.Minute)},
			},
		}, byName)
		all[0].Queues[0] = "changed" // it is a copy
		close(goOn)
		require.NoError(t, named.End(nil))
		require.NoError(t, again.End(nil))
		synctest.Wait() // for the handler of byDefault, if it had a task
		all = workersOf(t, q)
		require.Equal(t, byName[own], all)
		require.NoError(t, byDefault.End(nil))
		require.Empty(t, workersOf(t, q))

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = q.Workers(ctx)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, q.QuietWorkers(ctx, ""), context.Canceled)
		require.NoError(t, q.Close())
		_, err = q.Workers(t.Context())
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.ErrorIs(t, q.ResumeWorkers(t.Context(), ""), codeq.ErrClosed)
	})
}

// TestWorkerName: the length of a name is bounded.
func TestWorkerName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		long := strings.Repeat("n", 129)
		for _, call := range []func() error{
			func() error { return q.Run(t.Context(), &m, &codeq.RunOptions{Name: long}) },
			func() error { return q.QuietWorkers(t.Context(), long) },
			func() error { return q.ResumeWorkers(t.Context(), long) },
		} {
			err := call()
			require.ErrorIs(t, err, codeq.ErrInvalid)
			require.ErrorContains(t, err, "128 bytes")
		}
		run := startRun(t, q, &m, codeq.RunOptions{Name: long[1:]})
		synctest.Wait()
		require.NoError(t, q.QuietWorkers(t.Context(), long[1:]))
		require.NoError(t, run.End(nil))
	})
}

// TestQuietWorkers: a quiet worker takes no more tasks, and its handlers go on. Another worker
// takes the tasks. Then the first worker goes on.
func TestQuietWorkers(t *testing.T) {
	for _, shards := range []int{1, 2} {
		t.Run(fmt.Sprint("shards=", shards), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, ctx := queuetest.OpenForRun(t, codeq.Options{Shards: shards}), t.Context()
				goOn := make(chan struct{})
				var of [2]struct{ begun, done atomic.Int64 } // by worker
				mux := func(worker int) *codeq.Mux {
					var m codeq.Mux
					codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
						of[worker].begun.Add(1)
						<-goOn
						of[worker].done.Add(1)
						return nil
					})
					return &m
				}
				add := func(n int) {
					for range n {
						queuetest.Produce(t, q, codeq.Task{Queue: "a"})
					}
					synctest.Wait()
				}
				first := startRun(t, q, mux(0), codeq.RunOptions{Name: "one", Concurrency: 10})
				add(3)
				require.EqualValues(t, 3, of[0].begun.Load())
				require.ErrorIs(t, q.QuietWorkers(ctx, "other"), codeq.ErrNotFound)
				for range 2 {
					require.NoError(t, q.QuietWorkers(ctx, "one"))
				}
				add(5)
				time.Sleep(time.Hour)
				require.EqualValues(t, 3, of[0].begun.Load(), "it takes nothing")
				require.Zero(t, of[0].done.Load())
				require.EqualValues(t, 5, queuetest.CountsOf(t, q, "a").Ready)
				w := workersOf(t, q)
				require.Len(t, w, 1)
				require.True(t, w[0].Quiet)
				require.Equal(t, 3, w[0].Busy)

				second := startRun(t, q, mux(1), codeq.RunOptions{Name: "two", Concurrency: 10})
				synctest.Wait()
				require.EqualValues(t, 5, of[1].begun.Load(), "another one takes them")
				close(goOn)
				synctest.Wait()
				require.EqualValues(t, 3, of[0].done.Load(), "its handlers have gone on, and their outcomes are stored")
				require.EqualValues(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
				require.NoError(t, q.QuietWorkers(ctx, ""))
				add(4)
				time.Sleep(time.Hour)
				require.EqualValues(t, 8, of[0].begun.Load()+of[1].begun.Load(), "both are quiet")
				require.NoError(t, q.ResumeWorkers(ctx, "one"))
				synctest.Wait()
				require.EqualValues(t, 7, of[0].done.Load())
				require.EqualValues(t, 5, of[1].done.Load())
				require.NoError(t, first.End(nil))
				add(2)
				require.NoError(t, q.ResumeWorkers(ctx, ""))
				synctest.Wait()
				require.EqualValues(t, 7, of[1].done.Load())
				require.NoError(t, q.QuietWorkers(ctx, "two"))
				require.NoError(t, second.End(nil), "a quiet Run ends")
				require.ErrorIs(t, q.QuietWorkers(ctx, "two"), codeq.ErrNotFound)
				require.NoError(t, q.QuietWorkers(ctx, ""))

				third := startRun(t, q, mux(1), codeq.RunOptions{Name: "two"})
				synctest.Wait()
				require.False(t, workersOf(t, q)[0].Quiet, "it lasts as long as the Run")
				require.NoError(t, q.QuietWorkers(ctx, ""))
				begun := time.Now()
				require.NoError(t, q.Close())
				require.Zero(t, time.Since(begun))
				require.ErrorIs(t, third.Wait(), codeq.ErrClosed)
			})
		})
	}
}

// TestQuietDuringCommit: when QuietWorkers returns, a claim with a commit under way is over, and
// its tasks are handled.
func TestQuietDuringCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var handled atomic.Int64
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { handled.Add(1); return nil })
		run := startRun(t, q, &m, codeq.RunOptions{Name: "n"})
		synctest.Wait()
		queuetest.SlowDown(t, q, 0, time.Second)
		produced := make(chan error, 1)
		go func() { _, err := q.Produce(t.Context(), codeq.Task{Queue: "a"}); produced <- err }()
		synctest.Wait() // the claim is served, and its commit under way
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		err := q.QuietWorkers(short, "n")
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.True(t, workersOf(t, q)[0].Quiet)
		require.Zero(t, handled.Load())
		require.NoError(t, q.QuietWorkers(t.Context(), "n"))
		require.NoError(t, <-produced)
		synctest.Wait()
		require.EqualValues(t, 1, handled.Load())
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		time.Sleep(time.Hour)
		require.EqualValues(t, 1, handled.Load())
		require.NoError(t, run.End(nil))
	})
}

// TestStuckBatch: a batch that goes on after the Timeout of its tasks is one handler.
func TestStuckBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		release := make(chan struct{})
		var m codeq.Mux
		codeq.HandleBatch(&m, "a", codeq.BatchOptions{Max: 3}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			<-release
			return make([]error, len(jobs))
		}, codeq.Policy{Timeout: time.Second})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, ReplaceStuck: 1})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, run.Reported(), 3)
		info, err := q.ProcessInfo(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, info.Stuck)
		workers, err := q.Workers(t.Context())
		require.NoError(t, err)
		require.Len(t, workers[0].Hung, 3)
		require.True(t, workers[0].Hung[2].Replaced)
		close(release)
		require.NoError(t, run.End(nil))
	})
}

// TestReplaceStuck: a handler that goes on after its Timeout gives its place to another one, up to
// the bound. OnError, Workers and ProcessInfo show it.
func TestReplaceStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		release, done, begun := make(chan struct{}), 0, time.Now()
		var m codeq.Mux
		codeq.Handle(&m, "stuck", func(_ context.Context, j *codeq.Job[[]byte]) error {
			<-release
			if string(j.Payload) == "exits" {
				runtime.Goexit()
			}
			return nil
		}, codeq.Policy{Timeout: 10 * time.Second})
		codeq.Handle(&m, "good", func(context.Context, *codeq.Job[[]byte]) error { done++; return nil })
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, ReplaceStuck: 2, Queues: []string{"stuck", "good"}})
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "stuck"}, codeq.Task{Queue: "stuck", Payload: []byte("exits")}, codeq.Task{Queue: "stuck"})
		queuetest.Produce(t, q, codeq.Task{Queue: "good"})
		time.Sleep(10*time.Second + 500*time.Millisecond)
		synctest.Wait()
		require.Empty(t, run.Reported())
		time.Sleep(40 * time.Second)
		synctest.Wait()
		for _, err := range run.Reported() {
			require.ErrorIs(t, err, codeq.ErrHandlersRunning)
		}
		require.Len(t, run.Reported(), 3)
		workers, err := q.Workers(t.Context())
		require.NoError(t, err)
		require.Equal(t, 3, workers[0].Busy)
		require.Len(t, workers[0].Hung, 3)
		for i, h := range workers[0].Hung {
			at := begun.Add(time.Duration(10+11*i) * time.Second).UTC()
			require.Equal(t, codeq.HungHandler{ID: ids[i], Queue: "stuck", Attempt: 1, Since: at, Replaced: i < 2}, h)
		}
		info, err := q.ProcessInfo(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 3, info.Stuck)
		require.Zero(t, done, "the third keeps its place")

		close(release)
		synctest.Wait()
		require.Equal(t, 1, done)
		workers, err = q.Workers(t.Context())
		require.NoError(t, err)
		require.Zero(t, workers[0].Busy)
		queuetest.Produce(t, q, codeq.Task{Queue: "good"})
		synctest.Wait()
		require.Equal(t, 2, done)
		require.NoError(t, run.End(nil))
	})
}
