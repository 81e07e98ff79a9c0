package codeq_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestOrderOverShards: claims take the tasks of a queue in the order of their
// priorities, and those of one priority in that of their age, whatever shards they lie in.
func TestOrderOverShards(t *testing.T) {
	bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		chance := testkit.Seeded(t)
		const tasks = 200
		var want []codeq.Task
		for i := range tasks {
			task := codeq.Task{Queue: "a", Priority: chance.IntN(3), Payload: fmt.Append(nil, i)}
			produce(t, startingAt(q, chance.IntN(3)), task)
			want = append(want, task)
			time.Sleep(time.Millisecond)
		}
		slices.SortStableFunc(want, func(a, b codeq.Task) int { return cmp.Compare(b.Priority, a.Priority) })
		for i, task := range want {
			var l *codeq.Lease
			if i%2 == 0 {
				l = claimNow(t, q, "a")
			} else {
				var err error
				l, err = q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"b", "a"}})
				require.NoError(t, err)
			}
			require.Equal(t, string(task.Payload), string(l.Payload), "claim %d", i)
			if i%7 == 0 { // what comes later is more urgent, or less
				late := codeq.Task{Queue: "a", Priority: 4, Payload: fmt.Append(nil, "late ", i)}
				produce(t, startingAt(q, chance.IntN(3)), late)
				require.Equal(t, string(late.Payload), string(claimNow(t, q, "a").Payload))
			}
		}
		require.Nil(t, claimNow(t, q, "a"))
	})
}

// TestBatchEndsBeforeUrgent: a batch ends where another shard has something more urgent, also
// if chance begins at the wrong shard.
func TestBatchEndsBeforeUrgent(t *testing.T) {
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		batch := func(q *codeq.Queue, n int) (got string) {
			leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: n})
			require.NoError(t, err)
			for _, l := range leases {
				got += fmt.Sprint(l.Priority)
			}
			return got
		}
		for _, p := range []int{5, 3, 1} {
			produce(t, startingAt(q, 0), codeq.Task{Queue: "a", Priority: p})
		}
		for _, p := range []int{4, 2, 0} {
			produce(t, startingAt(q, 1), codeq.Task{Queue: "a", Priority: p})
		}
		require.Equal(t, "5", batch(startingAt(q, 1), 10))
		require.Equal(t, "4", batch(startingAt(q, 0), 10))
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
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		produceFor(t, startingAt(q, 0), codeq.Task{Queue: "a"}, 1000, "large")
		time.Sleep(time.Second)
		produceFor(t, startingAt(q, 1), codeq.Task{Queue: "a"}, 1, "small")
		got := tenantsOf(t, q, "a", 200) // each has half a chance
		require.Contains(t, got, "small")
		produceFor(t, startingAt(q, 1), codeq.Task{Queue: "a"}, 1, "large", "small")
		require.Contains(t, tenantsOf(t, q, "a", 200), "small")
	})
}

// TestBatchOverManyQueuesKeepsItsTokens: a batch over a list of many queues that ends where another
// shard has something more urgent takes no token of that queue's rate.
func TestBatchOverManyQueuesKeepsItsTokens(t *testing.T) {
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		names, _ := manyQueues(100)
		first, second := names[0], names[1]
		configure(t, q, second, func(s *codeq.Settings) { s.Rate, s.Burst = 1, 2 })
		produce(t, startingAt(q, 0), codeq.Task{Queue: first}, codeq.Task{Queue: second})
		produce(t, startingAt(q, 1), codeq.Task{Queue: second, Priority: 5})
		var got []string
		for range 3 {
			leases, err := startingAt(q, 0).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: names, Max: 4, NoWait: true})
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
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		batch := func(q *codeq.Queue, weights map[string]int, n int, queues ...string) (got string) {
			leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: queues, Weights: weights, Max: n, NoWait: true})
			require.NoError(t, err)
			for _, l := range leases {
				got += l.Queue
			}
			return got
		}
		one := startingAt(q, 0)
		for _, name := range []string{"c", "a", "b", "c", "a", "b"} {
			produce(t, one, codeq.Task{Queue: name})
		}
		require.Equal(t, "aabbc", batch(q, nil, 5, "a", "x", "b", "c"))
		require.Equal(t, "c", batch(q, nil, 5, "a", "b", "c"))
		for range 2 {
			produce(t, one, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}, codeq.Task{Queue: "c"})
		}
		got := []byte(batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"))
		slices.Sort(got)
		require.Len(t, slices.Compact(slices.Clone(got)), 3, string(got))
		require.Len(t, batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"), 1)

		produce(t, one, codeq.Task{Queue: "a"}, codeq.Task{Queue: "c"})
		produce(t, startingAt(q, 1), codeq.Task{Queue: "b"})
		require.Equal(t, "a", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "b", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "c", batch(one, nil, 5, "a", "b", "c"))
		requireSettled(t, q)
	})
}

// TestBatchEndsBehindParked: a batch ends where another shard has something more urgent, also if
// what is as urgent here has to wait for room in the limit of its key.
func TestBatchEndsBehindParked(t *testing.T) {
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.ConcurrencyPerKey, s.Rate, s.Burst = 1, 1, 3 }))
		urgent := codeq.Task{Queue: "a", Priority: 5, LimitKey: "k"}
		of := shardOf(produce(t, q, urgent, urgent)[0], 2) // that of the key
		produce(t, startingAt(q, of), codeq.Task{Queue: "a"})
		time.Sleep(time.Second)
		produce(t, startingAt(q, 1-of), codeq.Task{Queue: "a", Priority: 5})
		for _, want := range []int{5, 5, 0} { // and no token of the rate is lost
			leases, err := startingAt(q, of).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			require.Equal(t, want, leases[0].Priority)
		}
	})
}

// TestBatchEndsBeforeParking: a batch that ends where another shard has something more urgent
// parks nothing of what it may not have.
func TestBatchEndsBeforeParking(t *testing.T) {
	bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		of := shardOf(produce(t, q, codeq.Task{Queue: "a", Priority: 5, LimitKey: "k"}, codeq.Task{Queue: "a", LimitKey: "k"})[0], 2)
		produce(t, startingAt(q, 1-of), codeq.Task{Queue: "a", Priority: 5})
		leases, err := startingAt(q, of).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, codeq.Counts{Ready: 2, Leased: 1}, countsOf(t, q, "a"))
	})
}

// TestStrictOrderBehindVoidTickets: claims that have given up, or were served elsewhere, keep no
// claim from the queue that is first in its order.
func TestStrictOrderBehindVoidTickets(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		var waiting []context.CancelFunc
		claim := func(queues ...string) chan string {
			ctx, cancel := context.WithCancel(t.Context())
			waiting = append(waiting, cancel)
			got := make(chan string, 1)
			go func() {
				if l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: queues}); err == nil {
					got <- l.Queue
				} else {
					got <- err.Error()
				}
			}()
			synctest.Wait()
			return got
		}
		gone := claim("a")
		produce(t, q, codeq.Task{Queue: "b"})
		goOn := hold(q, 0)
		synctest.Wait()
		go func() { _, _ = q.Produce(t.Context(), codeq.Task{Queue: "a"}) }()
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
