package codeq_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestStallEndsNoLease: a worker that asks in time keeps its lease, or ends it, however
// late the owner gets to it; whoever asks too late has lost it, and so has who has died.
func TestStallEndsNoLease(t *testing.T) {
	verbs := map[string]func(*codeq.Queue, codeq.Receipt) error{
		"complete": func(q *codeq.Queue, r codeq.Receipt) error { return q.Complete(context.Background(), r, nil) },
		"retry": func(q *codeq.Queue, r codeq.Receipt) error {
			return q.Retry(context.Background(), r, codeq.RetryOptions{After: time.Hour})
		},
		"release": func(q *codeq.Queue, r codeq.Receipt) error { return q.Release(context.Background(), r, time.Hour) },
		"extend":  func(q *codeq.Queue, r codeq.Receipt) error { return q.Extend(context.Background(), r, time.Hour) },
	}
	for name, verb := range verbs {
		for _, opts := range []codeq.Options{{}, {InboxDepth: 1}, {GroupCap: 1}} {
			t.Run(fmt.Sprintf("%s/depth %d, cap %d", name, opts.InboxDepth, opts.GroupCap), func(t *testing.T) {
				opts.LeaseFor = 30 * time.Second
				bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
					produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
					l, dead := claimNow(t, q, "a"), claimNow(t, q, "a")
					open := shut(t, q, 0)
					for range 5 { // one for the commit that stalls, the others are before the verb
						go func() { _, _ = q.Produce(context.Background(), codeq.Task{Queue: "b"}) }()
						synctest.Wait()
					}
					time.Sleep(29 * time.Second)
					done := make(chan error, 1)
					go func() { done <- verb(q, l.Receipt) }()
					time.Sleep(20 * time.Second)
					close(open)
					require.NoError(t, <-done)

					again, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
					require.NoError(t, err)
					require.Equal(t, dead.ID, again.ID)
					require.LessOrEqual(t, time.Since(dead.Deadline), 50*time.Second, "who has died is found in time")
					require.ErrorIs(t, verb(q, dead.Receipt), codeq.ErrLeaseLost)
				})
			})
		}
	}
}

// TestLateForLease: without a stall, what comes after the deadline comes too late, and
// what comes before it does not, also if the owner decides it in a later group.
func TestLateForLease(t *testing.T) {
	bubble(t, codeq.Options{LeaseFor: time.Second, GroupCap: 1}, func(t *testing.T, q *codeq.Queue) {
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		early, late := claimNow(t, q, "a"), claimNow(t, q, "a")
		slow := slowDown(t, q, 0, 100*time.Millisecond)
		time.Sleep(990 * time.Millisecond)
		errs := make(chan error, 4)
		for range 3 {
			go func() {
				errs <- q.Configure(context.Background(), "b", func(s *codeq.Settings) { s.Paused = !s.Paused })
			}()
		}
		synctest.Wait()
		require.NoError(t, q.Complete(t.Context(), early.Receipt, nil))
		require.Greater(t, slow.Commits.Load(), int64(1))
		for range 3 {
			require.NoError(t, <-errs)
		}
		time.Sleep(time.Second)
		require.ErrorIs(t, q.Complete(t.Context(), late.Receipt, nil), codeq.ErrLeaseLost)
	})
}

// TestStallOfGrant: a lease that was granted in a commit longer than itself is good for work.
func TestStallOfGrant(t *testing.T) {
	bubble(t, codeq.Options{LeaseFor: 30 * time.Second}, func(t *testing.T, q *codeq.Queue) {
		produce(t, q, codeq.Task{Queue: "a"})
		open := shut(t, q, 0)
		leased := make(chan *codeq.Lease, 1)
		go func() { leased <- claimNow(t, q, "a") }()
		time.Sleep(time.Minute)
		close(open)
		l := <-leased
		time.Sleep(29 * time.Second)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
	})
}

// TestStallsUnderRun: Run renews in time whatever the owner does, and so every task is run once.
func TestStallsUnderRun(t *testing.T) {
	bubble(t, codeq.Options{LeaseFor: 30 * time.Second}, func(t *testing.T, q *codeq.Queue) {
		rng := testkit.Seeded(t)
		var mu sync.Mutex // guards rng
		chance := func(n int) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			return time.Duration(rng.IntN(n))
		}
		var m codeq.Mux
		var calls atomic.Int64
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			calls.Add(1)
			select {
			case <-time.After(chance(200) * time.Second):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		const tasks = 50
		for range tasks {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		ctx, stop := context.WithCancel(t.Context())
		run := make(chan error, 1)
		go func() {
			run <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 5, OnError: func(_ *codeq.Lease, err error) { t.Error(err) }})
		}()
		for countsOf(t, q, "a").Total() > 0 {
			open := shut(t, q, 0)
			go func() { _, _ = q.Produce(context.Background(), codeq.Task{Queue: "b"}) }()
			time.Sleep(chance(60_000) * time.Millisecond)
			close(open)
			time.Sleep(chance(20_000) * time.Millisecond)
		}
		stop()
		<-run
		require.EqualValues(t, tasks, calls.Load())
	})
}
