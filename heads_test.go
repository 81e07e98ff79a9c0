package codeq

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOrderOverShards: claims take the tasks of a queue in the order of their
// priorities, and those of one priority in that of their age, whatever shards they lie in.
func TestOrderOverShards(t *testing.T) {
	bubble(t, Options{Shards: 3}, func(t *testing.T, q *Queue) {
		chance := seeded(t)
		const tasks = 200
		var want []Task
		for i := range tasks {
			task := Task{Queue: "a", Priority: chance.IntN(3), Payload: fmt.Append(nil, i)}
			produce(t, q.startingAt(chance.IntN(3)), task)
			want = append(want, task)
			time.Sleep(time.Millisecond)
		}
		slices.SortStableFunc(want, func(a, b Task) int { return cmp.Compare(b.Priority, a.Priority) })
		for i, task := range want {
			var l *Lease
			if i%2 == 0 {
				l = claimNow(t, q, "a")
			} else {
				var err error
				l, err = q.Claim(t.Context(), ClaimRequest{Queues: []string{"b", "a"}})
				require.NoError(t, err)
			}
			require.Equal(t, string(task.Payload), string(l.Payload), "claim %d", i)
			if i%7 == 0 { // what comes later is more urgent, or less
				late := Task{Queue: "a", Priority: 4, Payload: fmt.Append(nil, "late ", i)}
				produce(t, q.startingAt(chance.IntN(3)), late)
				require.Equal(t, string(late.Payload), string(claimNow(t, q, "a").Payload))
			}
		}
		require.Nil(t, claimNow(t, q, "a"))
	})
}

// TestBatchEndsBeforeUrgent: a batch ends where another shard has something more urgent, also
// if chance begins at the wrong shard.
func TestBatchEndsBeforeUrgent(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		batch := func(q *Queue, n int) (got string) {
			leases, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: n})
			require.NoError(t, err)
			for _, l := range leases {
				got += fmt.Sprint(l.Priority)
			}
			return got
		}
		for _, p := range []int{5, 3, 1} {
			produce(t, q.startingAt(0), Task{Queue: "a", Priority: p})
		}
		for _, p := range []int{4, 2, 0} {
			produce(t, q.startingAt(1), Task{Queue: "a", Priority: p})
		}
		require.Equal(t, "5", batch(q.startingAt(1), 10))
		require.Equal(t, "4", batch(q.startingAt(0), 10))
		require.Equal(t, "3", batch(q, 10))
		require.NoError(t, q.Pause(t.Context(), "a"))
		require.NoError(t, q.Resume(t.Context(), "a"))
		require.Equal(t, "2", batch(q, 10))
		require.Equal(t, "1", batch(q, 10))
		require.Equal(t, "0", batch(q, 10))
		requireSettled(t, q)
	})
}

// TestTenantsTakeTurnsOverShards: a tenant's one task in one shard is not behind the older
// backlog of another tenant in the other shard.
func TestTenantsTakeTurnsOverShards(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		produceFor(t, q.startingAt(0), Task{Queue: "a"}, 1000, "large")
		time.Sleep(time.Second)
		produceFor(t, q.startingAt(1), Task{Queue: "a"}, 1, "small")
		got := tenantsOf(t, q, "a", 200) // each has half a chance
		require.Contains(t, got, "small")
		produceFor(t, q.startingAt(1), Task{Queue: "a"}, 1, "large", "small")
		require.Contains(t, tenantsOf(t, q, "a", 200), "small")
	})
}

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

// TestBatchOverManyQueuesKeepsItsTokens: a batch over a list of many queues that ends where another shard
// has something more urgent takes no token of that queue's rate.
func TestBatchOverManyQueuesKeepsItsTokens(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		names, _ := manyQueues(100)
		first, second := names[0], names[1]
		configure(t, q, second, func(s *Settings) { s.Rate, s.Burst = 1, 2 })
		produce(t, q.startingAt(0), Task{Queue: first}, Task{Queue: second})
		produce(t, q.startingAt(1), Task{Queue: second, Priority: 5})
		var got []string
		for range 3 {
			leases, err := q.startingAt(0).ClaimBatch(t.Context(), ClaimRequest{Queues: names, Max: 4, NoWait: true})
			require.NoError(t, err)
			for _, l := range leases {
				got = append(got, l.Queue)
			}
		}
		require.Equal(t, []string{first, second, second}, got)
	})
}

// TestBatchOverQueues: a batch is filled from the queues that follow, in their order, and ends
// where a task that comes first is in another shard.
func TestBatchOverQueues(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		batch := func(q *Queue, weights map[string]int, n int, queues ...string) (got string) {
			leases, err := q.ClaimBatch(t.Context(), ClaimRequest{Queues: queues, Weights: weights, Max: n, NoWait: true})
			require.NoError(t, err)
			for _, l := range leases {
				got += l.Queue
			}
			return got
		}
		one := q.startingAt(0)
		for _, name := range []string{"c", "a", "b", "c", "a", "b"} {
			produce(t, one, Task{Queue: name})
		}
		require.Equal(t, "aabbc", batch(q, nil, 5, "a", "x", "b", "c"))
		require.Equal(t, "c", batch(q, nil, 5, "a", "b", "c"))
		for range 2 {
			produce(t, one, Task{Queue: "a"}, Task{Queue: "b"}, Task{Queue: "c"})
		}
		got := []byte(batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"))
		slices.Sort(got)
		require.Len(t, slices.Compact(slices.Clone(got)), 3, string(got))
		require.Len(t, batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"), 1)

		produce(t, one, Task{Queue: "a"}, Task{Queue: "c"})
		produce(t, q.startingAt(1), Task{Queue: "b"})
		require.Equal(t, "a", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "b", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "c", batch(one, nil, 5, "a", "b", "c"))
		requireSettled(t, q)
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
		held := make(chan struct{})
		go func() { _ = q.shard(0).probe(func(*shard) error { <-held; return nil }) }()
		synctest.Wait()
		go func() { _, _ = q.Produce(t.Context(), Task{Queue: "a"}) }()
		synctest.Wait()
		next := claim("a", "b") // in one group with the task, before the list is looked at
		waiting[0]()
		synctest.Wait()
		close(held)
		require.Equal(t, "codeq: context canceled", <-gone)
		require.Equal(t, "a", <-next)
		require.Equal(t, "b", claimNow(t, q, "b").Queue)
	})
}
