package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestGraceLetsHandlersEnd: when ctx ends, Run claims nothing more, and completes the tasks of
// running handlers.
func TestGraceLetsHandlersEnd(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards, Retention: time.Hour})
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
				time.Sleep(10 * time.Second)
				return ctx.Err()
			})
			run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 5, LeaseFor: time.Second})
			queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 20)...)
			time.Sleep(time.Second)
			synctest.Wait()
			require.NoError(t, run.End(errors.New("enough")))
			require.Equal(t, 9*time.Second, run.Took)
			require.Equal(t, codeq.Counts{Done: 5, Ready: 15}, queuetest.CountsOf(t, q, "a"))
			require.Empty(t, run.Reported())
		})
	}
}

// TestGraceCountsFailures: an attempt that fails while Run waits for its handlers counts as ever.
func TestGraceCountsFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			time.Sleep(5 * time.Second)
			return errors.New("boom")
		})
		run := startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		require.NoError(t, run.End(nil))
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.Equal(t, "boom", got.LastError)
	})
}

// TestGraceEnds: after the grace period Run cancels the handlers, and gives their tasks back as if
// they had never been claimed.
func TestGraceEnds(t *testing.T) {
	enough := errors.New("enough")
	for _, tc := range []struct{ grace, took time.Duration }{
		{0, 10 * time.Second}, {time.Minute, time.Minute}, {-1, 0},
	} {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprintf("%v on %d shards", tc.grace, shards), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, codeq.Options{Shards: shards, Backoff: codeq.Backoff{Base: time.Millisecond}})
					var m codeq.Mux
					var mu sync.Mutex
					var causes []error
					codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
						if j.Attempt == 1 {
							return errors.New("boom") // the earlier attempts of a task still count
						}
						<-ctx.Done()
						mu.Lock()
						defer mu.Unlock()
						causes = append(causes, context.Cause(ctx))
						j.FollowUp(codeq.Task{Queue: "b"})
						if len(causes) == 1 {
							return nil // comes too late, like any error
						}
						return codeq.DeadLetter(ctx.Err())
					})
					run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: tc.grace, LeaseFor: time.Second})
					first := queuetest.StartingAt(q, shards-1)
					var ids []codeq.ID
					for range 4 {
						ids = append(ids, queuetest.Produce(t, first, codeq.Task{Queue: "a"})...)
						time.Sleep(time.Second)
					}
					ids = append(ids, queuetest.Produce(t, first, codeq.Task{Queue: "a"})...)
					synctest.Wait()
					require.Equal(t, codeq.Counts{Leased: 4, Ready: 1}, queuetest.CountsOf(t, q, "a"))
					require.NoError(t, run.End(enough))
					require.Equal(t, tc.took, run.Took)
					require.Equal(t, []error{enough, enough, enough, enough}, causes)
					require.Len(t, run.Reported(), 4, "of the first attempts only")

					require.Equal(t, codeq.Counts{Ready: 5}, queuetest.CountsOf(t, q, "a"))
					require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
					for i, id := range ids {
						l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
						require.NoError(t, err)
						require.Equal(t, id, l.ID, "tasks keep their places")
						if i < 4 {
							require.Equal(t, 2, l.Attempt)
							require.Equal(t, "boom", l.LastError)
						} else {
							require.Equal(t, 1, l.Attempt)
						}
					}
					require.NoError(t, queuetest.CheckAll(q))
				})
			})
		}
	}
}

// TestHandlersRunning: Run does not wait for ever for handlers that ignore their context. Their
// tasks are given back, and their later results have no effect.
func TestHandlersRunning(t *testing.T) {
	for _, tc := range []struct{ grace, took time.Duration }{
		{0, 20 * time.Second}, {time.Millisecond, time.Second + time.Millisecond}, {-1, time.Second},
	} {
		t.Run(fmt.Sprint(tc.grace), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
				var m codeq.Mux
				step := make(chan struct{})
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[string]) error {
					switch j.Args {
					case "obedient":
						<-ctx.Done()
					default:
						<-step
					}
					j.FollowUp(codeq.Task{Queue: "b"})
					if j.Args == "fails" {
						return errors.New("boom")
					}
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: tc.grace})
				for _, kind := range []string{`"obedient"`, `"fails"`, `"completes"`} {
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte(kind)})
				}
				synctest.Wait()
				err := run.End(nil)
				require.ErrorIs(t, err, codeq.ErrHandlersRunning)
				require.ErrorContains(t, err, ": 2")
				require.Equal(t, tc.took, run.Took)
				require.Equal(t, codeq.Counts{Ready: 3}, queuetest.CountsOf(t, q, "a"))
				close(step)
				synctest.Wait()
				require.Equal(t, codeq.Counts{Ready: 3}, queuetest.CountsOf(t, q, "a"))
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
				require.Empty(t, run.Reported())
			})
		})
	}
}

// TestCloseDuringRun: Close ends Run as the end of ctx does.
func TestCloseDuringRun(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			disk := crashfs.New()
			opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: shards, Retention: time.Hour})
			q := queuetest.OpenForRun(t, opts)
			var m codeq.Mux
			var cause error
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[int]) error {
				select {
				case <-ctx.Done():
					cause = context.Cause(ctx)
				case <-time.After(time.Duration(j.Args) * time.Second):
				}
				return ctx.Err()
			})
			busy := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2, LeaseFor: time.Second})
			var idle codeq.Mux
			codeq.Handle(&idle, "idle", untilCancelled)
			waiting := startRun(t, q, &idle, codeq.RunOptions{})
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("5")}, codeq.Task{Queue: "a", Payload: []byte("20")})
			synctest.Wait()
			start := time.Now()
			require.NoError(t, q.Close())
			require.Equal(t, 10*time.Second, time.Since(start))
			require.ErrorIs(t, waiting.Wait(), codeq.ErrClosed)
			require.ErrorIs(t, busy.Wait(), codeq.ErrClosed)
			require.ErrorIs(t, cause, codeq.ErrClosed)
			require.ErrorIs(t, q.Run(t.Context(), &m, nil), codeq.ErrClosed, "after Close")

			q = queuetest.OpenForRun(t, opts)
			require.Equal(t, codeq.Counts{Done: 1, Ready: 1}, queuetest.CountsOf(t, q, "a"))
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, 1, l.Attempt)
		})
	}
}

// TestRunOnFailedShard: when a shard fails, Run ends with the error of the shard. The contexts of
// handlers with tasks of that shard end, and handlers with tasks of other shards end undisturbed.
func TestRunOnFailedShard(t *testing.T) {
	for _, concurrency := range []int{6, 7} { // with and without claims that wait
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Shards: 3})
				var m codeq.Mux
				var mu sync.Mutex
				causes := make(map[int][]error)
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Second):
					}
					mu.Lock()
					defer mu.Unlock()
					shard := queuetest.ShardOf(j.ID, 3)
					causes[shard] = append(causes[shard], context.Cause(ctx))
					return ctx.Err()
				})
				run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: 15 * time.Second, Grace: time.Minute, Concurrency: concurrency})
				for i := range 3 {
					queuetest.Produce(t, queuetest.StartingAt(q, i), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				}
				synctest.Wait()
				queuetest.FailShard(t, q, 1)
				_, err := queuetest.StartingAt(q, 1).Produce(t.Context(), codeq.Task{Queue: "b"})
				require.ErrorIs(t, err, codeq.ErrUncertain)
				require.ErrorIs(t, err, testkit.ErrDisk)

				err = run.Wait()
				require.ErrorIs(t, err, codeq.ErrFailed)
				require.ErrorIs(t, err, testkit.ErrDisk)
				require.Equal(t, []error{nil, nil}, causes[0])
				require.Equal(t, []error{nil, nil}, causes[2])
				require.Len(t, causes[1], 2)
				for _, cause := range causes[1] {
					require.ErrorIs(t, cause, codeq.ErrFailed)
				}
				require.NotEmpty(t, run.Reported())
			})
		})
	}
}

// TestRunWaitsForCommits: workers do not wait for the commit of a completion,
// but Run does.
func TestRunWaitsForCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		step := make(chan struct{})
		var handled atomic.Int64
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			<-step
			handled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		synctest.Wait()
		open := queuetest.Shut(t, q, 0)
		close(step)
		synctest.Wait()
		require.EqualValues(t, 2, handled.Load())
		run.Cancel(nil)
		time.Sleep(25 * time.Second) // longer than the grace, shorter than a lease
		synctest.Wait()
		select {
		case <-run.Done:
			t.Fatal("Run has returned before the last commit")
		default:
		}
		close(open)
		require.NoError(t, run.Wait())
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestStuckShardDelaysNoCancel: at the end of the grace period all handlers are cancelled, even if
// a shard is slow to take a task back.
func TestStuckShardDelaysNoCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
		var m codeq.Mux
		var cancelled atomic.Int64
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			<-ctx.Done()
			cancelled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: 10 * time.Second})
		for i := range 2 {
			queuetest.Produce(t, queuetest.StartingAt(q, i), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		}
		synctest.Wait()
		var gates []chan struct{}
		for i := range 2 {
			gates = append(gates, queuetest.Shut(t, q, i))
		}
		run.Cancel(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 4, cancelled.Load())
		for _, g := range gates {
			close(g)
		}
		require.NoError(t, run.Wait())
		require.Equal(t, codeq.Counts{Ready: 4}, queuetest.CountsOf(t, q, "a"))
	})
}
