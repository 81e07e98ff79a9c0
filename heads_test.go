package codeq

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestHeadsOfWhatCannotBeClaimed: a queue that is paused, or has no room, attracts no claims
// and ends no batches, and is found when it has room again.
func TestHeadsOfWhatCannotBeClaimed(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		words := func(queue string) (heads []bool) {
			synctest.Wait()
			for shard := range 2 {
				heads = append(heads, q.heads.Has(queue, shard))
			}
			return heads
		}
		produce(t, q.startingAt(0), Task{Queue: "a"})
		produce(t, q.startingAt(1), Task{Queue: "a"}, Task{Queue: "a"})
		require.Equal(t, []bool{true, true}, words("a"))
		require.NoError(t, q.Pause(t.Context(), "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		require.NoError(t, q.Resume(t.Context(), "a"))
		require.Equal(t, []bool{true, true}, words("a"))
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 1 })
		l := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		complete(t, q, l)
		require.Contains(t, words("a"), true)
		requireNextAny(t, q, "a", 2)
		require.Equal(t, []bool{false, false}, words("a"))
		configure(t, q, "a", func(s *Settings) { s.Concurrency, s.Rate, s.Burst = 0, 1, 1 })
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"}, Task{Queue: "a"})
		claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		for range 2 {
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
		}
		requireSettled(t, q)
	})
}

// requireNextAny claims and completes so many tasks, in any order, one by one.
func requireNextAny(t *testing.T, q *Queue, queue string, n int) {
	t.Helper()
	for range n {
		complete(t, q, claimNow(t, q, queue))
	}
}

// TestBatchEndsBehindParked: a batch ends where another shard has something more urgent, also if
// what is as urgent here has to wait for room in the limit of its key.
func TestBatchEndsBehindParked(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.ConcurrencyPerKey, s.Rate, s.Burst = 1, 1, 3 }))
		urgent := Task{Queue: "a", Priority: 5, LimitKey: "k"}
		of := produce(t, q, urgent, urgent)[0].shard(2) // that of the key
		produce(t, q.startingAt(of), Task{Queue: "a"})
		time.Sleep(time.Second)
		produce(t, q.startingAt(1-of), Task{Queue: "a", Priority: 5})
		for _, want := range []int{5, 5, 0} { // and no token of the rate is lost
			leases, err := q.startingAt(of).ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			require.Equal(t, want, leases[0].Priority)
		}
	})
}

// TestBatchEndsBeforeParking: a batch that ends where another shard has something more urgent
// parks nothing of what it may not have.
func TestBatchEndsBeforeParking(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		of := produce(t, q, Task{Queue: "a", Priority: 5, LimitKey: "k"}, Task{Queue: "a", LimitKey: "k"})[0].shard(2)
		produce(t, q.startingAt(1-of), Task{Queue: "a", Priority: 5})
		leases, err := q.startingAt(of).ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, Counts{Ready: 2, Leased: 1}, countsOf(t, q, "a"))
	})
}

// TestStrictOrderBehindVoidTickets: claims that have given up, or were served elsewhere, keep no
// claim from the queue that is first in its order.
func TestStrictOrderBehindVoidTickets(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		var waiting []context.CancelFunc
		claim := func(queues ...string) chan string {
			ctx, cancel := context.WithCancel(t.Context())
			waiting = append(waiting, cancel)
			got := make(chan string, 1)
			go func() {
				if l, err := q.Claim(ctx, ClaimRequest{Queues: queues}); err == nil {
					got <- l.Queue
				} else {
					got <- err.Error()
				}
			}()
			synctest.Wait()
			return got
		}
		gone := claim("a")
		produce(t, q, Task{Queue: "b"})
		goOn := hold(q, 0)
		synctest.Wait()
		go func() { _, _ = q.Produce(t.Context(), Task{Queue: "a"}) }()
		synctest.Wait()
		next := claim("a", "b") // in one group with the task, before the list is looked at
		waiting[0]()
		synctest.Wait()
		goOn()
		require.Equal(t, "codeq: context canceled", <-gone)
		require.Equal(t, "a", <-next)
		require.Equal(t, "b", claimNow(t, q, "b").Queue)
	})
}
