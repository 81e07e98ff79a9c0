package codeq_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
)

func TestClaimOrder(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		produce(t, q,
			codeq.Task{Queue: "a", Payload: []byte("low 1")},
			codeq.Task{Queue: "a", Payload: []byte("high 1"), Priority: 9},
			codeq.Task{Queue: "a", Payload: []byte("low 2")},
			codeq.Task{Queue: "a", Payload: []byte("high 2"), Priority: 9},
			codeq.Task{Queue: "b", Payload: []byte("other queue"), Priority: 9},
		)
		for _, want := range []string{"high 1", "high 2", "low 1", "low 2"} {
			require.Equal(t, want, string(claimNow(t, q, "a").Payload))
		}
		require.Nil(t, claimNow(t, q, "a"))
		require.Nil(t, claimNow(t, q, "unknown"))
	})
}

// TestTenantsTakeTurns: a tenant with many tasks delays another's one task by
// no more than a turn, also when only a part of them is in memory.
func TestTenantsTakeTurns(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, WindowTasks: 4}, func(t *testing.T, q *codeq.Queue) {
		for range 50 {
			produce(t, q, codeq.Task{Queue: "a", Tenant: "large"})
		}
		for i := range 5 {
			produce(t, q, codeq.Task{Queue: "a", Tenant: fmt.Sprint("small ", i)})
		}
		seen := map[string]int{}
		for range 6 {
			seen[claimNow(t, q, "a").Tenant]++
		}
		require.Len(t, seen, 6, "each tenant has had one turn: %v", seen)
		for range 49 {
			require.Equal(t, "large", claimNow(t, q, "a").Tenant)
		}
		require.Nil(t, claimNow(t, q, "a"))
	})
}

func TestClaimSeveralQueues(t *testing.T) {
	t.Parallel()
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const n = 4000
		for range n {
			produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}, codeq.Task{Queue: "c"})
		}
		for range 100 {
			require.Equal(t, "b", claimNow(t, q, "b", "a").Queue, "strict order")
		}
		count := map[string]int{}
		for range 3000 {
			l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a", "b", "c"}, Weights: map[string]int{"b": 2, "c": 3}})
			require.NoError(t, err)
			count[l.Queue]++
		}
		// Each is binomial with a standard deviation of at most 28.
		require.InDelta(t, 500, count["a"], 150)
		require.InDelta(t, 1000, count["b"], 150)
		require.InDelta(t, 1500, count["c"], 150)
	})
}

func TestClaimsWaitInOrder(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const claims = 20
		order := make(chan int, claims)
		for i := range claims {
			go func() {
				if _, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}}); err == nil {
					order <- i
				}
			}()
			synctest.Wait()
		}
		for i := range claims {
			produce(t, q, codeq.Task{Queue: "a"})
			require.Equal(t, i, <-order)
		}
	})
}

// TestNoWakeUpIsLost: claims and produces that meet at any moment find each
// other. Were one lost, the bubble would deadlock.
func TestNoWakeUpIsLost(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 2, 4} {
		bubble(t, codeq.Options{Shards: shards, WindowTasks: 2}, func(t *testing.T, q *codeq.Queue) {
			const callers, each = 16, 200
			var wg sync.WaitGroup
			var mu sync.Mutex
			seen := make(map[codeq.ID]bool)
			for range callers {
				wg.Go(func() {
					for range each {
						if _, err := q.Produce(context.Background(), codeq.Task{Queue: "a"}); err != nil {
							t.Error(err)
						}
					}
				})
				wg.Go(func() {
					for range each {
						l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						if seen[l.ID] {
							t.Errorf("task %s was claimed twice", l.ID)
						}
						seen[l.ID] = true
						mu.Unlock()
						if err := q.Complete(context.Background(), l.Receipt, nil); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			require.Len(t, seen, callers*each)
		})
	}
}

func TestClaimBatch(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1, WindowTasks: 3}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		var tasks []codeq.Task
		for i := range 10 {
			tasks = append(tasks, codeq.Task{Queue: "a", Payload: []byte{byte(i)}})
		}
		ids, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		next := 0
		for next < len(ids) {
			leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
			require.NoError(t, err)
			require.LessOrEqual(t, len(leases), 4)
			for _, l := range leases {
				require.Equal(t, ids[next], l.ID)
				require.Equal(t, []byte{byte(next)}, l.Payload)
				next++
			}
		}
		_, err = q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
		require.ErrorIs(t, err, codeq.ErrEmpty)
	})
}

// TestWindowOverflow: with room for two tasks in memory, ten thousand over
// several lanes are all found again, in order.
func TestWindowOverflow(t *testing.T) {
	t.Parallel()
	bubble(t, codeq.Options{Shards: 1, WindowTasks: 2, WindowBytes: 4 << 10}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		const n = 10_000
		for i := 0; i < n; i += 100 {
			var tasks []codeq.Task
			for j := range 100 {
				tasks = append(tasks, codeq.Task{Queue: "a", Tenant: fmt.Sprint(j % 5), Payload: fmt.Append(nil, i+j)})
			}
			_, err := q.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
			if i%1000 == 0 { // some are claimed and returned while the rest arrives
				require.NoError(t, q.Release(ctx, claimNow(t, q, "a").Receipt, 0))
			}
		}
		last := map[string]int{}
		released := 0
		for i := range n {
			l := claimNow(t, q, "a")
			require.NotNil(t, l, "task %d of %d", i, n)
			var number int
			_, err := fmt.Sscan(string(l.Payload), &number)
			require.NoError(t, err)
			if number < last[l.Tenant] {
				released++
			}
			last[l.Tenant] = max(last[l.Tenant], number)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
		require.LessOrEqual(t, released, n/1000, "only what was released may come late")
		require.Nil(t, claimNow(t, q, "a"))
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Zero(t, stats["a"].Total())
	})
}

// TestClaimThatIsLateUsesNoAttempt: a claim ends with its ctx, also while the disk hangs. The task
// that it has got is ready again when the disk answers, also if the queue is being closed.
func TestClaimThatIsLateUsesNoAttempt(t *testing.T) {
	for _, closes := range []bool{false, true} {
		disk := crashfs.New()
		opts := onDisk(disk, &codeq.Options{Shards: 1})
		synctest.Test(t, func(t *testing.T) {
			q, err := codeq.Open("q", opts)
			require.NoError(t, err)
			ids := produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
			open := shut(t, q, 0)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 2, LeaseFor: time.Hour})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			closed := make(chan error, 1)
			if closes {
				go func() { closed <- q.Close() }()
				synctest.Wait()
			}
			close(open)
			if closes {
				require.NoError(t, <-closed)
				q, err = codeq.Open("q", opts)
				require.NoError(t, err)
			}
			synctest.Wait()
			for _, id := range ids {
				info, err := q.Get(t.Context(), id)
				require.NoError(t, err)
				require.Equal(t, codeq.Ready, info.State)
				require.Zero(t, info.Attempts)
			}
			require.Equal(t, 1, claimNow(t, q, "a").Attempt)
			require.NoError(t, q.Close())
		})
	}
}
