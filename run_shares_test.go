package codeq_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// orderOfRun produces tasks in the queues a, b and c, and returns the order of these queues in a
// Run with one worker.
func orderOfRun(t *testing.T, each int, opts codeq.RunOptions) (order []string) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		for _, name := range []string{"c", "a", "b"} {
			codeq.Handle(&m, name, func(_ context.Context, j *codeq.Job[[]byte]) error {
				order = append(order, j.Queue)
				return nil
			})
			_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: name}}, each))
			require.NoError(t, err)
		}
		opts.Concurrency = 1
		run := startRun(t, q, &m, opts)
		synctest.Wait()
		require.NoError(t, run.End(nil))
	})
	return order
}

func occurrences(order []string, name string) (n int) {
	for _, o := range order {
		if o == name {
			n++
		}
	}
	return n
}

// TestShareOfQueues: Run works on several queues equally, in strict order, or in proportion to
// weights. The bounds are six standard deviations wide.
func TestShareOfQueues(t *testing.T) {
	t.Run("equal by default", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{})
		require.Len(t, order, 1200)
		for _, name := range []string{"a", "b", "c"} {
			require.InDelta(t, 200, occurrences(order[:600], name), 70, name)
		}
	})
	t.Run("strict", func(t *testing.T) {
		order := orderOfRun(t, 20, codeq.RunOptions{Queues: []string{"b", "c", "a"}})
		want := slices.Concat(
			slices.Repeat([]string{"b"}, 20), slices.Repeat([]string{"c"}, 20), slices.Repeat([]string{"a"}, 20))
		require.Equal(t, want, order)
	})
	t.Run("some of the mux", func(t *testing.T) {
		order := orderOfRun(t, 5, codeq.RunOptions{Queues: []string{"b"}})
		require.Equal(t, slices.Repeat([]string{"b"}, 5), order)
	})
	t.Run("weights", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{Queues: []string{"a", "b", "c"}, Weights: map[string]int{"a": 6, "b": 3}})
		require.Len(t, order, 1200)
		require.InDelta(t, 300, occurrences(order[:500], "a"), 66)
		require.InDelta(t, 150, occurrences(order[:500], "b"), 62)
		require.InDelta(t, 50, occurrences(order[:500], "c"), 41)
	})
	t.Run("weights of all queues", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{Weights: map[string]int{"a": 6, "b": 3}})
		require.Len(t, order, 1200)
		require.InDelta(t, 300, occurrences(order[:500], "a"), 66)
		require.InDelta(t, 150, occurrences(order[:500], "b"), 62)
		require.InDelta(t, 50, occurrences(order[:500], "c"), 41)
	})
}

// TestSharesOverShards: the shares of queues follow their weights, for any distribution of the
// tasks over the shards, also while another queue is paused. The bounds are six standard deviations
// wide.
func TestSharesOverShards(t *testing.T) {
	for _, more := range []int{0, 20, 1000} { // with them, the list is a long one
		t.Run(fmt.Sprint(more, " more queues"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Shards: 4})
				req := codeq.ClaimRequest{Queues: []string{"critical", "paused", "bulk"}, Weights: map[string]int{"critical": 9, "paused": 5}, NoWait: true}
				for n := range more {
					req.Queues = append(req.Queues, fmt.Sprint("idle", n))
				}
				require.NoError(t, q.Pause(t.Context(), "paused"))
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "critical"}}, 700)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					queuetest.Produce(t, queuetest.StartingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "paused"}, {Queue: "bulk"}}, 300)...)
				}
				counts := make(map[string]int)
				for range 600 {
					l, err := q.Claim(t.Context(), req)
					require.NoError(t, err)
					counts[l.Queue]++
					require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
				}
				require.InDelta(t, 540, counts["critical"], 44, "%v", counts)
				require.Equal(t, 600, counts["critical"]+counts["bulk"])
			})
		})
	}
}

// TestSharesOfLongRun: a Run of many queues, few of them with tasks, works on these in proportion
// to their weights, for any distribution of the tasks over the shards.
func TestSharesOfLongRun(t *testing.T) {
	t.Parallel()
	for _, queues := range []int{10, 1000} {
		t.Run(fmt.Sprint(queues, " queues"), func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 4}, func(t *testing.T, q *codeq.Queue) {
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "heavy"}}, 1000)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					queuetest.Produce(t, queuetest.StartingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "light"}}, 250)...)
				}
				const most = 800
				var handled, heavy atomic.Int64
				ctx, cancel := context.WithCancel(t.Context())
				var m codeq.Mux
				handle := func(_ context.Context, j *codeq.Job[[]byte]) error {
					time.Sleep(time.Second)
					if n := handled.Add(1); n == most {
						cancel()
					} else if n < most && j.Queue == "heavy" {
						heavy.Add(1)
					}
					return nil
				}
				codeq.Handle(&m, "heavy", handle)
				codeq.Handle(&m, "light", handle)
				for n := range queues - 2 {
					codeq.Handle(&m, fmt.Sprint("idle", n), handle)
				}
				require.NoError(t, q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 4, Weights: map[string]int{"heavy": 9}}))
				require.InDelta(t, most*9/10, heavy.Load(), 6*math.Sqrt(most*.09))
			})
		})
	}
}

// TestSharesBehindLimits: claims get the free places by the weights of the queues, for any
// distribution of the tasks over the shards, even if the limits of both queues stop claims now and
// then.
func TestSharesBehindLimits(t *testing.T) {
	for _, more := range []int{0, 20} { // with them, the list is a long one
		t.Run(fmt.Sprint(more, " more queues"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Shards: 4})
				req := codeq.ClaimRequest{Queues: []string{"critical", "bulk"}, Weights: map[string]int{"critical": 9}}
				for n := range more {
					req.Queues = append(req.Queues, fmt.Sprint("idle", n))
				}
				for _, name := range req.Queues[:2] {
					queuetest.Configure(t, q, name, func(s *codeq.Settings) { s.Concurrency = 5 })
				}
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "critical"}}, 3200)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					queuetest.Produce(t, queuetest.StartingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "bulk"}}, 800)...)
				}
				const claims = 3000
				var made, critical atomic.Int64
				var workers sync.WaitGroup
				for range 6 {
					workers.Go(func() {
						for made.Add(1) <= claims {
							l, err := q.Claim(t.Context(), req)
							require.NoError(t, err)
							if l.Queue == "critical" {
								critical.Add(1)
							}
							time.Sleep(time.Duration(rand.ExpFloat64() * float64(time.Millisecond)))
							require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
						}
					})
				}
				workers.Wait()
				// Of six tasks at work, 5, 4 or 3 are critical with the probabilities 0.757,
				// 0.210 and 0.031, if a claim takes a critical one nine times of ten while
				// both have places.
				require.InDelta(t, claims*0.787, critical.Load(), claims*0.04)
			})
		})
	}
}

// TestStrictOrderHolds: a task of an earlier queue overtakes waiting tasks of a later one.
func TestStrictOrderHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		var order []string
		step := make(chan struct{})
		for _, name := range []string{"first", "second"} {
			codeq.Handle(&m, name, func(_ context.Context, j *codeq.Job[[]byte]) error {
				order = append(order, j.Queue)
				<-step
				return nil
			})
		}
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, Queues: []string{"first", "second"}})
		queuetest.Produce(t, q, codeq.Task{Queue: "second"}, codeq.Task{Queue: "second"})
		synctest.Wait()
		queuetest.Produce(t, q, codeq.Task{Queue: "first"})
		for range 3 {
			step <- struct{}{}
			synctest.Wait()
		}
		require.Equal(t, []string{"second", "first", "second"}, order)
	})
}

// TestConcurrency: as many handlers run at a time as Concurrency allows, and no more.
func TestConcurrency(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		for _, concurrency := range []int{0, 1, 7} {
			for _, batch := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d on %d shards, batch %t", concurrency, shards, batch), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						q := queuetest.OpenForRun(t, codeq.Options{Shards: shards})
						want := concurrency
						if want == 0 {
							want = 4 * runtime.GOMAXPROCS(0)
						}
						total := 3*want + 1
						var m codeq.Mux
						var running, done atomic.Int64
						step := make(chan struct{})
						codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
							assert.LessOrEqual(t, running.Add(1), int64(want))
							<-step
							running.Add(-1)
							done.Add(1)
							return nil
						})
						run := startRun(t, q, &m, codeq.RunOptions{Concurrency: concurrency})
						tasks := slices.Repeat([]codeq.Task{{Queue: "a"}}, total)
						if batch {
							_, err := q.ProduceBatch(t.Context(), tasks)
							require.NoError(t, err)
						} else {
							queuetest.Produce(t, q, tasks...)
						}
						for left := total; left > 0; left-- {
							synctest.Wait()
							require.EqualValues(t, min(left, want), running.Load(), "with %d tasks left", left)
							require.EqualValues(t, min(left, want), queuetest.CountsOf(t, q, "a").Leased,
								"nothing is claimed for which no worker is free")
							step <- struct{}{}
						}
						synctest.Wait()
						require.NoError(t, run.End(nil))
						require.EqualValues(t, total, done.Load())
						require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
					})
				})
			}
		}
	}
}

// TestManyWorkers: a Run of very many workers costs no more than its tasks need, and obeys ctx and
// Close from the beginning.
func TestManyWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		began, gate := make(chan struct{}, 30), make(chan struct{})
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			began <- struct{}{}
			<-gate
			return nil
		})
		before := runtime.NumGoroutine()
		first := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1_000_000})
		second := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1_000_000})
		synctest.Wait()
		require.Less(t, runtime.NumGoroutine(), before+50)
		for range cap(began) {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		synctest.Wait()
		require.Len(t, began, cap(began), "all at once")
		close(gate)
		first.Cancel(context.Canceled)
		<-first.Done
		require.NoError(t, first.Err)
		require.NoError(t, q.Close())
		<-second.Done
		require.ErrorIs(t, second.Err, codeq.ErrClosed)
	})
}
