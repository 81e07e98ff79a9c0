package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

func TestLeaseExpires(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		first := claimNow(t, q, "a")
		time.Sleep(999 * time.Millisecond)
		require.NoError(t, q.Extend(ctx, first.Receipt, time.Second))
		time.Sleep(999 * time.Millisecond)
		require.NoError(t, q.Complete(ctx, first.Receipt, nil), "extended")

		second := claimNow(t, q, "a")
		time.Sleep(time.Second)
		for name, err := range map[string]error{
			"Complete":   q.Complete(ctx, second.Receipt, nil),
			"Extend":     q.Extend(ctx, second.Receipt, time.Second),
			"Retry":      q.Retry(ctx, second.Receipt, codeq.RetryOptions{}),
			"Release":    q.Release(ctx, second.Receipt, 0),
			"DeadLetter": q.DeadLetter(ctx, second.Receipt, nil),
		} {
			require.ErrorIs(t, err, codeq.ErrLeaseLost, name)
		}
		again := claimNow(t, q, "a")
		require.Equal(t, second.ID, again.ID)
		require.Equal(t, 2, again.Attempt)
		require.Greater(t, again.Receipt.Token, second.Receipt.Token)
		require.Equal(t, "lease expired", again.LastError)
		require.NoError(t, q.Complete(ctx, again.Receipt, nil))
		require.ErrorIs(t, q.Complete(ctx, again.Receipt, nil), codeq.ErrLeaseLost, "finished twice")
	})
}

// TestExpiryWakesAWaiter: a task is handed on within 50 ms of its lease's end,
// without any call that would remind the shard.
func TestExpiryWakesAWaiter(t *testing.T) {
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		for _, d := range []time.Duration{10 * time.Millisecond, 1234 * time.Millisecond, 10 * time.Minute} {
			id := produce(t, q, codeq.Task{Queue: "a"})[0]
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: d})
			require.NoError(t, err)
			start := time.Now()
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			took := time.Since(start)
			require.GreaterOrEqual(t, took, d)
			require.LessOrEqual(t, took, d+50*time.Millisecond)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
	})
}

func TestLeaseForOfTheTask(t *testing.T) {
	bubble(t, codeq.Options{LeaseFor: time.Minute}, func(t *testing.T, q *codeq.Queue) {
		produce(t, q, codeq.Task{Queue: "a", LeaseFor: time.Hour}, codeq.Task{Queue: "a"})
		require.Equal(t, time.Hour, time.Until(claimNow(t, q, "a").Deadline))
		require.Equal(t, time.Minute, time.Until(claimNow(t, q, "a").Deadline))
	})
}

func TestScheduledTasks(t *testing.T) {
	t.Parallel()
	bubble(t, codeq.Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		const n = 3000
		start := time.Now()
		for i := 0; i < n; i += 500 {
			var tasks []codeq.Task
			for j := range 500 {
				tasks = append(tasks, codeq.Task{Queue: "a", RunAt: start.Add(time.Duration(1+(i+j)%10) * time.Hour)})
			}
			_, err := q.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
		}
		require.Nil(t, claimNow(t, q, "a"))
		for hour := 1; hour <= 10; hour++ {
			time.Sleep(time.Until(start.Add(time.Duration(hour) * time.Hour)))
			synctest.Wait()
			stats, err := q.Stats(ctx)
			require.NoError(t, err)
			require.EqualValues(t, n/10, stats["a"].Ready, "after hour %d", hour)
			for range n / 10 {
				l := claimNow(t, q, "a")
				require.NotNil(t, l)
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			}
			require.Nil(t, claimNow(t, q, "a"))
		}
	})
}

func TestRetries(t *testing.T) {
	opts := codeq.Options{Shards: 1, MaxAttempts: 4, Backoff: codeq.Backoff{Base: time.Second, Max: 3 * time.Second, Jitter: -1}}
	bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		id := produce(t, q, codeq.Task{Queue: "a", Payload: []byte("p")})[0]
		for attempt, wait := range []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second} {
			start := time.Now()
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, wait, time.Since(start))
			require.Equal(t, attempt+1, l.Attempt)
			require.Equal(t, "p", string(l.Payload))
			require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("no luck")}))
		}
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, codeq.Dead, info.State)
		require.Equal(t, 4, info.Attempts)
		require.Equal(t, "no luck", info.LastError)
	})
}

func TestRelease(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		ids := produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		require.NoError(t, q.Release(ctx, claimNow(t, q, "a").Receipt, 0))
		other := claimNow(t, q, "a")
		require.Equal(t, ids[1], other.ID, "what was released stands behind what is ready")
		require.NoError(t, q.Complete(ctx, other.Receipt, nil))
		l := claimNow(t, q, "a")
		require.Equal(t, ids[0], l.ID)
		require.Equal(t, 1, l.Attempt, "the attempt did not count")
		require.NoError(t, q.Release(ctx, l.Receipt, time.Hour))
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, ids[0], claimNow(t, q, "a").ID)
	})
}

// TestOrderWithClockSetBack: a task that returns to its lane again and again
// stands behind what was ready before, and before what becomes ready later, also
// while the wall clock is behind the time by which the lane is ordered.
func TestOrderWithClockSetBack(t *testing.T) {
	t.Parallel()
	const others = 20
	verbs := map[string]func(*codeq.Queue, *codeq.Lease) error{
		"release": func(q *codeq.Queue, l *codeq.Lease) error { return q.Release(context.Background(), l.Receipt, 0) },
		"snooze": func(q *codeq.Queue, l *codeq.Lease) error {
			return q.Release(context.Background(), l.Receipt, time.Millisecond)
		},
		"retry": func(q *codeq.Queue, l *codeq.Lease) error {
			return q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{After: -1})
		},
		"retry later": func(q *codeq.Queue, l *codeq.Lease) error {
			return q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{After: 1})
		},
		"redrive": func(q *codeq.Queue, l *codeq.Lease) error {
			return errors.Join(q.DeadLetter(context.Background(), l.Receipt, nil), q.RedriveDead(context.Background(), l.ID))
		},
		"run now": func(q *codeq.Queue, l *codeq.Lease) error {
			return errors.Join(q.Release(context.Background(), l.Receipt, time.Hour),
				q.SetRunAt(context.Background(), l.ID, time.Time{}))
		},
	}
	for name, putBack := range verbs {
		for _, reopens := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, reopened %t", name, reopens), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var offset time.Duration
					opts := onDisk(crashfs.New(), &codeq.Options{Shards: 1, MaxAttempts: 1000})
					inspect.Options(opts).Wall = func() time.Time { return time.Now().Add(offset) }
					q, err := codeq.Open("queue", opts)
					require.NoError(t, err)
					set := func(d time.Duration) {
						if !reopens {
							synctest.Wait()
							offset += d
							return
						}
						require.NoError(t, q.Close())
						offset += d
						q, err = codeq.Open("queue", opts)
						require.NoError(t, err)
					}
					returns := produce(t, q, codeq.Task{Queue: "a"})[0]
					for range others {
						time.Sleep(10 * time.Millisecond)
						produce(t, q, codeq.Task{Queue: "a"})
					}
					set(time.Hour)
					produce(t, q, codeq.Task{Queue: "a"}) // of the future
					set(-2 * time.Hour)
					turns := 0
					for range others + 1 {
						l := claimNow(t, q, "a")
						if l.ID == returns {
							turns++
							require.NoError(t, putBack(q, l))
							time.Sleep(10 * time.Millisecond)
							l = claimNow(t, q, "a")
							require.NotEqual(t, returns, l.ID, "it goes first again")
						}
						require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
						produce(t, q, codeq.Task{Queue: "a"})
						time.Sleep(10 * time.Millisecond)
					}
					require.Equal(t, 1, turns)
					require.Equal(t, returns, claimNow(t, q, "a").ID, "what came later does not go first")
					require.NoError(t, checkAll(q))
					require.NoError(t, q.Close())
				})
			})
		}
	}
}

// TestHungTaskGoesBehind: a task whose lease runs out keeps its place the first time, and
// goes behind the others of its lane the second time. Restarts do not count.
func TestHungTaskGoesBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs, ctx := crashfs.New(), context.Background()
		open := func() *codeq.Queue {
			q, err := codeq.Open("queue", onDisk(fs, &codeq.Options{Shards: 1, MaxAttempts: 100, LeaseFor: time.Minute}))
			require.NoError(t, err)
			return q
		}
		q := open()
		ids := produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		hangs, other := ids[0], ids[1]
		expire := func() {
			t.Helper()
			require.Equal(t, hangs, claimNow(t, q, "a").ID)
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		for _, local := range []bool{true, false, true} { // three restarts end leases
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Local: local})
			require.NoError(t, err)
			require.Equal(t, hangs, l.ID)
			require.NoError(t, q.Close())
			if !local {
				time.Sleep(2 * time.Minute)
			}
			q = open()
			synctest.Wait()
		}
		expire()
		require.Equal(t, hangs, claimNow(t, q, "a").ID, "the first time it keeps its place")
		time.Sleep(time.Minute)
		synctest.Wait()
		l := claimNow(t, q, "a")
		require.Equal(t, other, l.ID, "the second time it goes behind")
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		info, err := q.Get(ctx, hangs)
		require.NoError(t, err)
		require.Equal(t, 3, info.Attempts, "the local leases have counted none")
		require.WithinDuration(t, time.Now(), info.At, 0, "since when it is ready again")
		require.NoError(t, checkAll(q))
		require.NoError(t, q.Close())
	})
}
