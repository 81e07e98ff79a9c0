package codeq_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

func TestClaimsWaitInOrder(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
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
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			require.Equal(t, i, <-order)
		}
	})
}

// TestNoWakeUpIsLost: claims and produces find each other, whenever they meet. If a wake-up were
// lost, the bubble would deadlock.
func TestNoWakeUpIsLost(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 2, 4} {
		queuetest.Bubble(t, codeq.Options{Shards: shards, WindowTasks: 2}, func(t *testing.T, q *codeq.Queue) {
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

// TestWindowOverflow: with room for two tasks in memory, claims find 3,000 tasks of several lanes,
// in order.
func TestWindowOverflow(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 1, WindowTasks: 2, WindowBytes: 4 << 10}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		const n = 3000
		for i := 0; i < n; i += 100 {
			var tasks []codeq.Task
			for j := range 100 {
				tasks = append(tasks, codeq.Task{Queue: "a", Tenant: fmt.Sprint(j % 5), Payload: fmt.Append(nil, i+j)})
			}
			_, err := q.ProduceBatch(ctx, tasks)
			require.NoError(t, err)
			if i%1000 == 0 { // claim and release some while the rest arrives
				require.NoError(t, q.Release(ctx, queuetest.ClaimNow(t, q, "a").Receipt, 0))
			}
		}
		last := map[string]int{}
		released := 0
		for i := range n {
			l := queuetest.ClaimNow(t, q, "a")
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
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Zero(t, stats["a"].Total())
	})
}

// TestClaimThatIsLateUsesNoAttempt: a claim ends with its ctx, even while the disk hangs. When the
// disk answers, the tasks of this claim are ready again, even if the queue is being closed.
func TestClaimThatIsLateUsesNoAttempt(t *testing.T) {
	for _, closes := range []bool{false, true} {
		disk := crashfs.New()
		opts := queuetest.OnDisk(disk, &codeq.Options{Shards: 1})
		synctest.Test(t, func(t *testing.T) {
			q, err := codeq.Open("q", opts)
			require.NoError(t, err)
			ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
			open := queuetest.Shut(t, q, 0)
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
			require.Equal(t, 1, queuetest.ClaimNow(t, q, "a").Attempt)
			require.NoError(t, q.Close())
		})
	}
}

// TestLocalClaim: a local lease ends with the process. Any other lease lasts until it expires.
func TestLocalClaim(t *testing.T) {
	ctx := context.Background()
	queuetest.InFlow(t, codeq.Options{Shards: 2, LeaseFor: time.Hour}, func(f *queuetest.FlowTest) {
		queuetest.Produce(f.T, f.Q, codeq.Task{Queue: "local", LeaseFor: time.Minute}, codeq.Task{Queue: "lasting"})
		for _, req := range []codeq.ClaimRequest{{Queues: []string{"local"}, Local: true}, {Queues: []string{"lasting"}}} {
			l, err := f.Q.Claim(ctx, req)
			require.NoError(f, err)
			require.WithinDuration(f, time.Now().Add(time.Hour), l.Deadline, time.Second)
			before := inspect.Of(f.Q).Commits()
			require.NoError(f, f.Q.Extend(ctx, l.Receipt, 2*time.Hour))
			written := inspect.Of(f.Q).Commits() - before
			require.Equal(f, !req.Local, written > 0, "an extension is stored")
		}
		f.Reopen()
		l := queuetest.ClaimNow(f.T, f.Q, "local", "lasting")
		require.Equal(f, "local", l.Queue)
		require.Equal(f, 1, l.Attempt, "nothing has died")
		require.Nil(f, queuetest.ClaimNow(f.T, f.Q, "lasting"))
		time.Sleep(2*time.Hour + time.Second)
		require.Equal(f, 2, queuetest.ClaimNow(f.T, f.Q, "lasting").Attempt)
	})
}

// TestQueueOfManyWaitersDelaysNoOther: the shard serves the claims that wait for one queue group by
// group. Meanwhile, it also serves claims that wait for other queues.
func TestQueueOfManyWaitersDelaysNoOther(t *testing.T) {
	for name, more := range map[string][]string{"queues": nil, "lists": make([]string, dispatch.ShortList)} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{GroupBytes: 4 << 10}), func(t *testing.T, q *codeq.Queue) {
				const n = 100
				// The token identifies the group of the claim.
				claim := func(queue string) (group chan uint64) {
					req := codeq.ClaimRequest{Queues: []string{queue}}
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
				tasks := slices.Repeat([]codeq.Task{{Queue: "a", Payload: make([]byte, 4<<10)}}, n)
				_, err := q.ProduceBatch(t.Context(), append(tasks, codeq.Task{Queue: "b"}))
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

// TestSetsAndQueuesTakeTurns: some claims are for one queue, others for a list with this queue.
// Neither kind waits for the end of the other kind.
func TestSetsAndQueuesTakeTurns(t *testing.T) {
	names, _ := testkit.ManyQueues(100)
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		served := make(map[string]int)
		var mu sync.Mutex
		claim := func(kind string, queues []string) {
			for {
				if _, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: queues}); err != nil {
					return
				}
				mu.Lock()
				served[kind]++
				mu.Unlock()
			}
		}
		for range 4 {
			go claim("one", names[7:8])
			go claim("many", names)
		}
		synctest.Wait()
		for range 40 {
			queuetest.Produce(t, q, codeq.Task{Queue: names[7]})
			synctest.Wait()
		}
		mu.Lock()
		defer mu.Unlock()
		require.GreaterOrEqual(t, served["one"], 10)
		require.GreaterOrEqual(t, served["many"], 10)
	})
}

// TestOrderOverShards: claims take the tasks of a queue by priority, and tasks of the same priority
// by age, whatever their shards.
func TestOrderOverShards(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		chance := testkit.Seeded(t)
		const tasks = 200
		var want []codeq.Task
		for i := range tasks {
			task := codeq.Task{Queue: "a", Priority: chance.IntN(3), Payload: fmt.Append(nil, i)}
			queuetest.Produce(t, queuetest.StartingAt(q, chance.IntN(3)), task)
			want = append(want, task)
			time.Sleep(time.Millisecond)
		}
		slices.SortStableFunc(want, func(a, b codeq.Task) int { return cmp.Compare(b.Priority, a.Priority) })
		for i, task := range want {
			var l *codeq.Lease
			if i%2 == 0 {
				l = queuetest.ClaimNow(t, q, "a")
			} else {
				var err error
				l, err = q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"b", "a"}})
				require.NoError(t, err)
			}
			require.Equal(t, string(task.Payload), string(l.Payload), "claim %d", i)
			if i%7 == 0 { // a later task may be more urgent
				late := codeq.Task{Queue: "a", Priority: 4, Payload: fmt.Append(nil, "late ", i)}
				queuetest.Produce(t, queuetest.StartingAt(q, chance.IntN(3)), late)
				require.Equal(t, string(late.Payload), string(queuetest.ClaimNow(t, q, "a").Payload))
			}
		}
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
	})
}

// TestBatchEndsBeforeUrgent: a batch ends where another shard has a more urgent task, even if the
// claim begins at the wrong shard by chance.
func TestBatchEndsBeforeUrgent(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		batch := func(q *codeq.Queue, n int) (got string) {
			leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: n})
			require.NoError(t, err)
			for _, l := range leases {
				got += fmt.Sprint(l.Priority)
			}
			return got
		}
		for _, p := range []int{5, 3, 1} {
			queuetest.Produce(t, queuetest.StartingAt(q, 0), codeq.Task{Queue: "a", Priority: p})
		}
		for _, p := range []int{4, 2, 0} {
			queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "a", Priority: p})
		}
		require.Equal(t, "5", batch(queuetest.StartingAt(q, 1), 10))
		require.Equal(t, "4", batch(queuetest.StartingAt(q, 0), 10))
		require.Equal(t, "3", batch(q, 10))
		require.NoError(t, q.Pause(t.Context(), "a"))
		require.NoError(t, q.Resume(t.Context(), "a"))
		require.Equal(t, "2", batch(q, 10))
		require.Equal(t, "1", batch(q, 10))
		require.Equal(t, "0", batch(q, 10))
		queuetest.RequireSettled(t, q)
	})
}

// TestBatchOverManyQueuesKeepsItsTokens: a batch over a list of many queues ends where another
// shard has a more urgent task. It takes no token from the rate of that task's queue.
func TestBatchOverManyQueuesKeepsItsTokens(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		names, _ := testkit.ManyQueues(100)
		first, second := names[0], names[1]
		queuetest.Configure(t, q, second, func(s *codeq.Settings) { s.Rate, s.Burst = 1, 2 })
		queuetest.Produce(t, queuetest.StartingAt(q, 0), codeq.Task{Queue: first}, codeq.Task{Queue: second})
		queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: second, Priority: 5})
		var got []string
		for range 3 {
			leases, err := queuetest.StartingAt(q, 0).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: names, Max: 4, NoWait: true})
			require.NoError(t, err)
			for _, l := range leases {
				got = append(got, l.Queue)
			}
		}
		require.Equal(t, []string{first, second, second}, got)
	})
}

// TestBatchOverQueues: a batch takes tasks from its queues in their order, and ends where the next
// task is in another shard.
func TestBatchOverQueues(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		batch := func(q *codeq.Queue, weights map[string]int, n int, queues ...string) (got string) {
			leases, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: queues, Weights: weights, Max: n, NoWait: true})
			require.NoError(t, err)
			for _, l := range leases {
				got += l.Queue
			}
			return got
		}
		one := queuetest.StartingAt(q, 0)
		for _, name := range []string{"c", "a", "b", "c", "a", "b"} {
			queuetest.Produce(t, one, codeq.Task{Queue: name})
		}
		require.Equal(t, "aabbc", batch(q, nil, 5, "a", "x", "b", "c"))
		require.Equal(t, "c", batch(q, nil, 5, "a", "b", "c"))
		for range 2 {
			queuetest.Produce(t, one, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}, codeq.Task{Queue: "c"})
		}
		got := []byte(batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"))
		slices.Sort(got)
		require.Len(t, slices.Compact(slices.Clone(got)), 3, string(got))
		require.Len(t, batch(one, map[string]int{"a": 1}, 5, "a", "b", "c"), 1)

		queuetest.Produce(t, one, codeq.Task{Queue: "a"}, codeq.Task{Queue: "c"})
		queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "b"})
		require.Equal(t, "a", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "b", batch(one, nil, 5, "a", "b", "c"))
		require.Equal(t, "c", batch(one, nil, 5, "a", "b", "c"))
		queuetest.RequireSettled(t, q)
	})
}

// TestBatchEndsBehindParked: a batch ends where another shard has a more urgent task. This holds
// even if an equally urgent task in this shard waits for room in the limit of its key.
func TestBatchEndsBehindParked(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.ConcurrencyPerKey, s.Rate, s.Burst = 1, 1, 3 }))
		urgent := codeq.Task{Queue: "a", Priority: 5, LimitKey: "k"}
		of := queuetest.ShardOf(queuetest.Produce(t, q, urgent, urgent)[0], 2) // the shard of the key
		queuetest.Produce(t, queuetest.StartingAt(q, of), codeq.Task{Queue: "a"})
		time.Sleep(time.Second)
		queuetest.Produce(t, queuetest.StartingAt(q, 1-of), codeq.Task{Queue: "a", Priority: 5})
		for _, want := range []int{5, 5, 0} { // and no token of the rate is lost
			leases, err := queuetest.StartingAt(q, of).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
			require.NoError(t, err)
			require.Len(t, leases, 1)
			require.Equal(t, want, leases[0].Priority)
		}
	})
}

// TestBatchEndsBeforeParking: a batch that ends where another shard has a more urgent task parks no
// task that it may not take.
func TestBatchEndsBeforeParking(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		of := queuetest.ShardOf(queuetest.Produce(t, q, codeq.Task{Queue: "a", Priority: 5, LimitKey: "k"}, codeq.Task{Queue: "a", LimitKey: "k"})[0], 2)
		queuetest.Produce(t, queuetest.StartingAt(q, 1-of), codeq.Task{Queue: "a", Priority: 5})
		leases, err := queuetest.StartingAt(q, of).ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 4, NoWait: true})
		require.NoError(t, err)
		require.Len(t, leases, 1)
		require.Equal(t, codeq.Counts{Ready: 2, Leased: 1}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestStrictOrderBehindVoidTickets: the tickets of claims that gave up, or were served elsewhere,
// do not keep another claim from the first queue in its order.
func TestStrictOrderBehindVoidTickets(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
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
		queuetest.Produce(t, q, codeq.Task{Queue: "b"})
		goOn := queuetest.Hold(q, 0)
		synctest.Wait()
		go func() { _, _ = q.Produce(t.Context(), codeq.Task{Queue: "a"}) }()
		synctest.Wait()
		next := claim("a", "b") // in the same group as the task, before the shard looks at the list
		waiting[0]()
		synctest.Wait()
		goOn()
		require.Equal(t, "codeq: context canceled", <-gone)
		require.Equal(t, "a", <-next)
		require.Equal(t, "b", queuetest.ClaimNow(t, q, "b").Queue)
	})
}
