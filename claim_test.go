package codeq

import (
	"codeq/internal/dispatch"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// bubble runs a test in fake time on a queue in memory, and checks what is
// stored when it ends.
func bubble(t *testing.T, opts Options, test func(t *testing.T, q *Queue)) {
	synctest.Test(t, func(t *testing.T) {
		if opts.fs == nil {
			opts.fs = vfs.NewMem()
		}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		test(t, q)
		synctest.Wait()
		require.NoError(t, q.checkAll())
	})
}

func produce(t *testing.T, q *Queue, tasks ...Task) []ID {
	t.Helper()
	var ids []ID
	for _, task := range tasks {
		id, err := q.Produce(context.Background(), task)
		require.NoError(t, err)
		ids = append(ids, id)
	}
	return ids
}

// claimNow claims without waiting; nil when nothing is ready.
func claimNow(t *testing.T, q *Queue, queues ...string) *Lease {
	t.Helper()
	l, err := q.Claim(context.Background(), ClaimRequest{Queues: queues, NoWait: true})
	if errors.Is(err, ErrEmpty) {
		return nil
	}
	require.NoError(t, err)
	return l
}

func TestClaimOrder(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		produce(t, q,
			Task{Queue: "a", Payload: []byte("low 1")},
			Task{Queue: "a", Payload: []byte("high 1"), Priority: 9},
			Task{Queue: "a", Payload: []byte("low 2")},
			Task{Queue: "a", Payload: []byte("high 2"), Priority: 9},
			Task{Queue: "b", Payload: []byte("other queue"), Priority: 9},
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
	bubble(t, Options{Shards: 1, WindowTasks: 4}, func(t *testing.T, q *Queue) {
		for range 50 {
			produce(t, q, Task{Queue: "a", Tenant: "large"})
		}
		for i := range 5 {
			produce(t, q, Task{Queue: "a", Tenant: fmt.Sprint("small ", i)})
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
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const n = 4000
		for range n {
			produce(t, q, Task{Queue: "a"}, Task{Queue: "b"}, Task{Queue: "c"})
		}
		for range 100 {
			require.Equal(t, "b", claimNow(t, q, "b", "a").Queue, "strict order")
		}
		count := map[string]int{}
		for range 3000 {
			l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a", "b", "c"}, Weights: map[string]int{"b": 2, "c": 3}})
			require.NoError(t, err)
			count[l.Queue]++
		}
		// Each is binomial with a standard deviation of at most 28.
		require.InDelta(t, 500, count["a"], 150)
		require.InDelta(t, 1000, count["b"], 150)
		require.InDelta(t, 1500, count["c"], 150)
	})
}

// TestClaimWaits: a claim that waits is served by a later produce into any
// shard and any of its queues, first come, first served.
func TestClaimWaits(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
				const claims = 300
				got := make(chan ID, claims)
				for range claims {
					go func() {
						l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a", "b"}})
						if err == nil {
							got <- l.ID
						}
					}()
				}
				synctest.Wait()
				require.Empty(t, got)
				seen := make(map[ID]bool)
				for i := range claims {
					id := produce(t, q, Task{Queue: []string{"a", "b"}[i%2]})[0]
					synctest.Wait()
					require.Equal(t, id, <-got)
					seen[id] = true
				}
				require.Len(t, seen, claims)
				for _, s := range q.led() {
					require.NoError(t, s.probe(func(s *shard) error {
						if n := s.claims.Usage().Tickets; n > 2*(2*claims+64) {
							return fmt.Errorf("%d tickets in the wait lists", n)
						}
						return nil
					}))
				}
			})
		})
	}
}

func TestClaimsWaitInOrder(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const claims = 20
		order := make(chan int, claims)
		for i := range claims {
			go func() {
				if _, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}}); err == nil {
					order <- i
				}
			}()
			synctest.Wait()
		}
		for i := range claims {
			produce(t, q, Task{Queue: "a"})
			require.Equal(t, i, <-order)
		}
	})
}

// TestClaimEndsWithContext: a claim that gives up leaves its task to others,
// and thousands of them leave no memory behind.
func TestClaimEndsWithContext(t *testing.T) {
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			cause := errors.New("enough")
			for range 2000 {
				ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, cause)
				_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
				require.ErrorIs(t, err, cause)
				cancel()
			}
			synctest.Wait()
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					if q := s.Queues["a"]; q != nil {
						return fmt.Errorf("%d dead claims are kept", s.claims.Usage().Tickets)
					}
					return nil
				}))
			}
			id := produce(t, q, Task{Queue: "a"})[0]
			require.Equal(t, id, claimNow(t, q, "a").ID)
		})
	}
}

// TestNoWakeUpIsLost: claims and produces that meet at any moment find each
// other. Were one lost, the bubble would deadlock.
func TestNoWakeUpIsLost(t *testing.T) {
	for _, shards := range []int{1, 2, 4} {
		bubble(t, Options{Shards: shards, WindowTasks: 2}, func(t *testing.T, q *Queue) {
			const callers, each = 16, 200
			var wg sync.WaitGroup
			var mu sync.Mutex
			seen := make(map[ID]bool)
			for range callers {
				wg.Go(func() {
					for range each {
						if _, err := q.Produce(context.Background(), Task{Queue: "a"}); err != nil {
							t.Error(err)
						}
					}
				})
				wg.Go(func() {
					for range each {
						l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
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
	bubble(t, Options{Shards: 1, WindowTasks: 3}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		var tasks []Task
		for i := range 10 {
			tasks = append(tasks, Task{Queue: "a", Payload: []byte{byte(i)}})
		}
		ids, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		next := 0
		for next < len(ids) {
			leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
			require.NoError(t, err)
			require.LessOrEqual(t, len(leases), 4)
			for _, l := range leases {
				require.Equal(t, ids[next], l.ID)
				require.Equal(t, []byte{byte(next)}, l.Payload)
				next++
			}
		}
		_, err = q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
		require.ErrorIs(t, err, ErrEmpty)
	})
}

// TestWindowOverflow: with room for two tasks in memory, ten thousand over
// several lanes are all found again, in order.
func TestWindowOverflow(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 2, WindowBytes: 4 << 10}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		const n = 10_000
		for i := 0; i < n; i += 100 {
			var tasks []Task
			for j := range 100 {
				tasks = append(tasks, Task{Queue: "a", Tenant: fmt.Sprint(j % 5), Payload: fmt.Append(nil, i+j)})
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

// TestLocalClaim: a local lease ends with the process, any other lasts until it expires.
func TestLocalClaim(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 2, LeaseFor: time.Hour}, func(f *flowTest) {
		produce(f.T, f.q, Task{Queue: "local", LeaseFor: time.Minute}, Task{Queue: "lasting"})
		for _, req := range []ClaimRequest{{Queues: []string{"local"}, Local: true}, {Queues: []string{"lasting"}}} {
			l, err := f.q.Claim(ctx, req)
			require.NoError(f, err)
			require.WithinDuration(f, time.Now().Add(time.Hour), l.Deadline, time.Second)
			before := f.q.shard(f.q.shardOf(l.ID)).commits.Load()
			require.NoError(f, f.q.Extend(ctx, l.Receipt, 2*time.Hour))
			written := f.q.shard(f.q.shardOf(l.ID)).commits.Load() - before
			require.Equal(f, !req.Local, written > 0, "an extension is stored")
		}
		f.reopen()
		l := claimNow(f.T, f.q, "local", "lasting")
		require.Equal(f, "local", l.Queue)
		require.Equal(f, 2, l.Attempt)
		require.Nil(f, claimNow(f.T, f.q, "lasting"))
		time.Sleep(2*time.Hour + time.Second)
		require.Equal(f, 2, claimNow(f.T, f.q, "lasting").Attempt)
	})
}

// TestQueueOfManyWaitersDelaysNoOther: while the claims that wait for one queue are served group by group,
// those that wait for others are, too.
func TestQueueOfManyWaitersDelaysNoOther(t *testing.T) {
	for name, more := range map[string][]string{"queues": nil, "lists": make([]string, dispatch.ShortList)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{Shards: 1, groupBytes: 4 << 10}, func(t *testing.T, q *Queue) {
				const n = 100
				claim := func(queue string) (group chan uint64) { // the token tells the group in which it was served
					req := ClaimRequest{Queues: []string{queue}}
					for i := range more {
						req.Queues = append(req.Queues, fmt.Sprint(queue, i))
					}
					group = make(chan uint64, 1)
					go func() {
						if l, err := q.Claim(t.Context(), req); err == nil {
							group <- l.Receipt.Token
						}
					}()
					synctest.Wait()
					return group
				}
				var many []chan uint64
				for range n {
					many = append(many, claim("a"))
				}
				one := claim("b")
				tasks := slices.Repeat([]Task{{Queue: "a", Payload: make([]byte, 4<<10)}}, n)
				_, err := q.ProduceBatch(t.Context(), append(tasks, Task{Queue: "b"}))
				require.NoError(t, err)
				served, groups, before := <-one, make(map[uint64]bool), 0
				for _, group := range many {
					token := <-group
					if groups[token] = true; token < served {
						before++
					}
				}
				require.Less(t, before, 10)
				require.Greater(t, len(groups), n/2)
			})
		})
	}
}
