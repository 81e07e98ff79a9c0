package codeq_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// stateOf returns the stored state of a task.
func stateOf(t *testing.T, q *codeq.Queue, id codeq.ID) codeq.State {
	t.Helper()
	info, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return info.State
}

// hammer runs workers that claim tasks of a queue, and end each lease in one way or another until
// the given number is completed. It returns the largest number of leases at a time, by key.
func hammer(t *testing.T, q *codeq.Queue, queue string, workers, tasks int, key func(*codeq.Lease) string) map[string]int {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var (
		mu        sync.Mutex
		completed int
		held      = make(map[string]int)
		most      = make(map[string]int)
		all       sync.WaitGroup
	)
	for range workers {
		all.Go(func() {
			for n := 0; ; n++ {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: 50 * time.Millisecond})
				if err != nil {
					return
				}
				k := key(l)
				mu.Lock()
				held[k]++
				most[k] = max(most[k], held[k])
				mu.Unlock()
				time.Sleep(time.Duration(n%3+1) * time.Millisecond)
				mu.Lock()
				held[k]-- // before the end of the lease, which others may see at once
				mu.Unlock()
				switch n % 8 {
				case 5:
					err = q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{After: -1})
				case 6:
					err = q.Release(context.Background(), l.Receipt, time.Millisecond)
				case 7:
					time.Sleep(100 * time.Millisecond) // it expires
				default:
					err = q.Complete(context.Background(), l.Receipt, nil)
					mu.Lock()
					if completed++; completed == tasks {
						stop()
					}
					mu.Unlock()
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	return most
}

// TestQueueConcurrency: a queue never has more leases than its limit, however many workers there
// are, and uses the whole limit.
func TestQueueConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		const tasks, limit = 300, 5
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = limit })
		for range tasks {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
		}
		most := hammer(t, q, "a", 16, tasks, func(*codeq.Lease) string { return "" })
		require.Equal(t, limit, most[""])
		queuetest.RequireSettled(t, q)

		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"b"}, Max: tasks})
		require.NoError(t, err)
		require.Greater(t, len(batch), limit, "another queue")
	})
}

// TestConcurrencyWakes: a waiting claim is served at the moment when a place becomes free, for any
// cause.
func TestConcurrencyWakes(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name string
		end  func(t *testing.T, q *codeq.Queue, l *codeq.Lease) error
	}{
		{"complete", func(_ *testing.T, q *codeq.Queue, l *codeq.Lease) error { return q.Complete(ctx, l.Receipt, nil) }},
		{"retry", func(_ *testing.T, q *codeq.Queue, l *codeq.Lease) error {
			return q.Retry(ctx, l.Receipt, codeq.RetryOptions{})
		}},
		{"release", func(_ *testing.T, q *codeq.Queue, l *codeq.Lease) error { return q.Release(ctx, l.Receipt, time.Hour) }},
		{"dead letter", func(_ *testing.T, q *codeq.Queue, l *codeq.Lease) error { return q.DeadLetter(ctx, l.Receipt, nil) }},
		{"cancel", func(_ *testing.T, q *codeq.Queue, l *codeq.Lease) error { return q.Cancel(ctx, l.ID) }},
		{"raised", func(_ *testing.T, q *codeq.Queue, _ *codeq.Lease) error {
			return q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
		}},
		{"removed", func(_ *testing.T, q *codeq.Queue, _ *codeq.Lease) error {
			return q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 0 })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			forShards(t, func(t *testing.T, q *codeq.Queue) {
				queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
				for range 9 {
					queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				}
				l := queuetest.ClaimNow(t, q, "a")
				require.Nil(t, queuetest.ClaimNow(t, q, "a"))
				first, second := waitingClaim(t, q, "a"), waitingClaim(t, q, "a")
				queuetest.RequireSettled(t, q)
				require.NoError(t, c.end(t, q, l))
				synctest.Wait()
				require.Len(t, first, 1, "first come, first served")
				if c.name == "removed" {
					require.Len(t, second, 1)
				} else {
					require.Empty(t, second)
				}
				queuetest.RequireSettled(t, q)
			})
		})
	}
	t.Run("expiry", func(t *testing.T) {
		forShards(t, func(t *testing.T, q *codeq.Queue) {
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
			for range 9 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			l := queuetest.ClaimNow(t, q, "a")
			got := waitingClaim(t, q, "a")
			begin := time.Now()
			<-got
			require.Equal(t, l.Deadline, time.Now().UTC())
			require.Greater(t, time.Since(begin), 10*time.Second)
			queuetest.RequireSettled(t, q)
		})
	})
}

// TestConcurrencyLowered: after the limit is lowered, leases stay, and new ones come only when
// there is room below the new limit.
func TestConcurrencyLowered(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		var held []*codeq.Lease
		for range 4 { // before there is any limit
			held = append(held, queuetest.ClaimNow(t, q, "a"))
		}
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 5 })
		held = append(held, queuetest.ClaimNow(t, q, "a"))
		require.NotNil(t, held[4])
		require.Nil(t, queuetest.ClaimNow(t, q, "a"), "leases that are older than the limit count")

		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
		for i := range 3 {
			require.Nil(t, queuetest.ClaimNow(t, q, "a"), "%d leases", 5-i)
			require.NoError(t, q.Extend(t.Context(), held[i].Receipt, time.Hour), "a lease was taken away")
			queuetest.Complete(t, q, held[i])
		}
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		queuetest.Complete(t, q, held[3])
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		queuetest.RequireSettled(t, q)
	})
}

// TestConcurrencyRestart: leases from before a restart count against the limit.
func TestConcurrencyRestart(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: shards})
			q := queuetest.OpenForRun(t, opts)
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
			for range 20 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			first := queuetest.ClaimNow(t, q, "a")
			require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
			require.NoError(t, q.Close())

			q = queuetest.OpenForRun(t, opts)
			queuetest.RequireSettled(t, q)
			require.Nil(t, queuetest.ClaimNow(t, q, "a"))
			queuetest.Complete(t, q, first)
			require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
			require.Nil(t, queuetest.ClaimNow(t, q, "a"))
			queuetest.RequireSettled(t, q)
		})
	}
}

// timesOfClaims makes that many claims at the same time, and completes their tasks. It returns when
// each claim was served, from the beginning.
func timesOfClaims(t *testing.T, q *codeq.Queue, queue string, claims int) []time.Duration {
	begin := time.Now()
	got := make(chan time.Duration, claims)
	for range claims {
		go func() {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}})
			if err == nil {
				got <- time.Since(begin)
				_ = q.Complete(context.Background(), l.Receipt, nil)
			}
		}()
	}
	times := make([]time.Duration, claims)
	for i := range times {
		times[i] = <-got
	}
	return times
}

// every returns n times: the first ones, as many as burst, are 0, and the others follow at
// intervals.
func every(interval time.Duration, burst, n int) []time.Duration {
	times := make([]time.Duration, n)
	for i := burst; i < n; i++ {
		times[i] = time.Duration(i-burst+1) * interval
	}
	return times
}

// TestRate: claims that wait are served on time, in one shard or several.
func TestRate(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 10, 3 })
		for range 60 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))
		queuetest.RequireSettled(t, q)

		time.Sleep(10 * time.Second) // no more tokens gather than the burst
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))

		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 2.5, 1 })
		require.Equal(t, every(400*time.Millisecond, 0, 5), timesOfClaims(t, q, "a", 5))
		time.Sleep(10 * time.Second)
		require.Equal(t, every(400*time.Millisecond, 1, 5), timesOfClaims(t, q, "a", 5), "the lower burst")
		queuetest.RequireSettled(t, q)
	})
}

// TestRateNoWait: a claim with NoWait gets ErrEmpty while there is no token, and a batch gets as
// many tasks as there are tokens.
func TestRateNoWait(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate = 3.5 }) // and so a burst of 4
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 20})
		require.NoError(t, err)
		require.Len(t, batch, 4)
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		time.Sleep(285 * time.Millisecond)
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		time.Sleep(time.Millisecond)
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		require.Nil(t, queuetest.ClaimNow(t, q, "a"))
		queuetest.RequireSettled(t, q)
	})
}

// TestRateChanged: waiting claims follow a new rate at once.
func TestRateChanged(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		rate := func(r float64) { queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = r, 1 }) }
		rate(0.001)
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		first, second, third := waitingClaim(t, q, "a"), waitingClaim(t, q, "a"), waitingClaim(t, q, "a")
		rate(10)
		begin := time.Now()
		<-first
		require.Equal(t, 100*time.Millisecond, time.Since(begin))
		rate(0.5)
		<-second
		require.Equal(t, 2100*time.Millisecond, time.Since(begin))
		require.Empty(t, third)
		rate(0)
		synctest.Wait()
		require.Len(t, third, 1, "no rate any more")
		for range 10 {
			require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		}
		queuetest.RequireSettled(t, q)
	})
}

// TestRateRestart: after Open the bucket has no more tokens than have gathered since the last
// claim, so that restarts do not exceed the rate.
func TestRateRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2})
		q := queuetest.OpenForRun(t, opts)
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 4, 4 })
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		require.NoError(t, q.Close())
		for i := range 3 {
			q = queuetest.OpenForRun(t, opts)
			if i == 0 { // nothing has been claimed
				for range 4 {
					queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "a"))
				}
			}
			require.Nil(t, queuetest.ClaimNow(t, q, "a"))
			// of the claims of the last second, some are not stored
			require.LessOrEqual(t, timesOfClaims(t, q, "a", 3)[2], 2*time.Second)
			queuetest.RequireSettled(t, q)
			require.NoError(t, q.Close())
		}
	})
}

// TestRateAndConcurrency: a claim that gets no token uses no place, and one that gets no place uses
// no token.
func TestRateAndConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst, s.Concurrency = 1, 2, 1 })
		for range 10 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		l := queuetest.ClaimNow(t, q, "a")
		for range 5 {
			require.Nil(t, queuetest.ClaimNow(t, q, "a"), "no place")
		}
		queuetest.Complete(t, q, l)
		l = queuetest.ClaimNow(t, q, "a")
		require.NotNil(t, l, "the second token")
		queuetest.Complete(t, q, l)
		for range 5 {
			require.Nil(t, queuetest.ClaimNow(t, q, "a"), "no token")
		}
		time.Sleep(time.Second)
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		queuetest.RequireSettled(t, q)
	})
}

// TestPausedTakesNoRoom: a claim that waits for a paused queue is served when the queue resumes.
func TestPausedTakesNoRoom(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency, s.Rate, s.Burst = 1, 1, 1 })
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		require.NoError(t, q.Pause(t.Context(), "a"))
		got := waitingClaim(t, q, "a")
		queuetest.RequireSettled(t, q)
		require.NoError(t, q.Resume(t.Context(), "a"))
		synctest.Wait()
		require.Len(t, got, 1)
		queuetest.RequireSettled(t, q)
	})
}

// requireNext requires that claims of a queue get tasks with these payloads in turn, and then no
// further one. It completes them.
func requireNext(t *testing.T, q *codeq.Queue, queue string, names ...string) {
	t.Helper()
	for _, name := range names {
		l := queuetest.ClaimNow(t, q, queue)
		require.NotNil(t, l, "no task instead of %q", name)
		require.Equal(t, name, string(l.Payload))
		queuetest.Complete(t, q, l)
	}
	require.Nil(t, queuetest.ClaimNow(t, q, queue))
}

// waitingClaim starts a Claim, and returns the channel for its lease.
func waitingClaim(t *testing.T, q *codeq.Queue, queue string) <-chan *codeq.Lease {
	got := make(chan *codeq.Lease, 1)
	go func() {
		if l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{queue}}); err == nil {
			got <- l
		}
	}()
	synctest.Wait()
	require.Empty(t, got, "the claim did not wait")
	return got
}

// TestRateOfNearlyNothing: a wait that is longer than a time.Duration can be does not become a
// short one.
func TestRateOfNearlyNothing(t *testing.T) {
	for _, rate := range []float64{1e-9, 1e-12, math.SmallestNonzeroFloat64} {
		queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate = rate })
			queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
			require.NotNil(t, queuetest.ClaimNow(t, q, "a"), "the burst")
			got := waitingClaim(t, q, "a")
			queuetest.RequireSettled(t, q)
			time.Sleep(2 * longestLease)
			require.Empty(t, got)
			queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Rate = 0 })
			synctest.Wait()
			require.Len(t, got, 1)
		})
	}
}

// TestConcurrencyPerKey: no key has more leases than its limit while workers take all tasks that
// they can get, and each key uses its whole limit.
func TestConcurrencyPerKey(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		const tasks, limit, keys = 300, 3, 5
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = limit })
		for i := range tasks {
			queuetest.Produce(t, q, codeq.Task{Queue: "a", LimitKey: fmt.Sprint("key ", i%keys), Priority: i % 2})
		}
		most := hammer(t, q, "a", 24, tasks, func(l *codeq.Lease) string { return l.LimitKey })
		require.Len(t, most, keys)
		for key, n := range most {
			require.Equal(t, limit, n, key)
		}
		queuetest.RequireSettled(t, q)
		queuetest.RequireNoLimits(t, q)
	})
}

// TestClaimThatParksManyDelaysNoOther: work that is put off to the next group goes on, even if an
// earlier claim looks long for a task.
func TestClaimThatParksManyDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New(), GroupBytes: 4 << 10})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		const n = 3000
		tasks := slices.Repeat([]codeq.Task{{Queue: "a", LimitKey: "k", Payload: make([]byte, 100)}}, n)
		_, err = q.ProduceBatch(t.Context(), append(tasks, codeq.Task{Queue: "b"}))
		require.NoError(t, err)
		require.NoError(t, q.Close())
		q, err = codeq.Open("queue", &opts) // the windows are empty
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
		groups, found := 0, 0
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			s.Commit = committing{s.Commit, func() {
				if groups++; found == 0 && s.Rules.Names.Queues["b"].Counts.Leased > 0 {
					found = groups
				}
			}}
			return nil
		}))
		goOn := queuetest.Hold(q, 0)
		var claims sync.WaitGroup
		for _, queue := range []string{"a", "b"} {
			claims.Go(func() { queuetest.ClaimNow(t, q, queue) })
			synctest.Wait()
		}
		goOn()
		claims.Wait()
		synctest.Wait()
		require.Greater(t, groups, 50, "the other claim parks tasks in many groups")
		require.NotZero(t, found)
		require.Less(t, found, 10)
	})
}

// committing calls a function before each commit.
type committing struct {
	inspect.Committer
	before func()
}

func (c committing) Commit(b *pebble.Batch) error {
	c.before()
	return c.Committer.Commit(b)
}

// countedGate counts the visits of claims at a gate.
type countedGate struct {
	dispatch.Gateway
	looks *atomic.Int64
}

func (g countedGate) Look(d *dispatch.Dispatcher, now time.Time) (bool, time.Duration) {
	g.looks.Add(1)
	return g.Gateway.Look(d, now)
}

// TestRatesOfManyQueues: when the rate of one queue admits a claim, the rates of other queues are
// not looked at.
func TestRatesOfManyQueues(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const queues = 100
		var looks atomic.Int64
		name := func(i int) string { return fmt.Sprint("q", i) }
		for i := range queues {
			queuetest.Configure(t, q, name(i), func(s *codeq.Settings) { s.Rate, s.Burst = 1/float64(i+1), 1 })
			require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				s.Claims.SetGateway(s.Claims.Of(s.Rules.Names.Queues[name(i)]), countedGate{s.Claims.Of(s.Rules.Names.Queues[name(i)]).Gateway(), &looks})
				return nil
			}))
			queuetest.Produce(t, q, codeq.Task{Queue: name(i)}, codeq.Task{Queue: name(i)})
			require.NotNil(t, queuetest.ClaimNow(t, q, name(i)))
		}
		served := make(chan *codeq.Lease, queues)
		for i := range queues {
			go func() {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{name(i)}})
				if err == nil {
					served <- l
				}
			}()
		}
		synctest.Wait()
		before := looks.Load()
		time.Sleep(2 * queues * time.Second)
		require.Len(t, served, queues)
		require.LessOrEqual(t, looks.Load()-before, int64(4*queues))
	})
}

// TestClosedGateRefillsNothing: claims that wait at a limit of concurrency leave the shard at rest,
// even when the windows of the lanes evict each other.
func TestClosedGateRefillsNothing(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, WindowTasks: 2, WindowBytes: 1}, func(t *testing.T, q *codeq.Queue) {
		for _, tenant := range []string{"x", "y"} {
			for range 6 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: tenant})
			}
		}
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
		queuetest.ClaimNow(t, q, "a")
		l := queuetest.ClaimNow(t, q, "a")
		got := make(chan *codeq.Lease, 1)
		go func() {
			l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
			if err == nil {
				got <- l
			}
		}()
		require.True(t, fallsAsleep(t, q), "the shard never sleeps")
		require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		next := <-got
		require.True(t, fallsAsleep(t, q))
		require.NoError(t, q.Complete(context.Background(), next.Receipt, nil))
		queuetest.RequireSettled(t, q)
	})
}

// fallsAsleep reports whether a shard comes to rest and stays at rest while other goroutines run.
// It does not call synctest.Wait, which would never return if the shard did not rest.
func fallsAsleep(t *testing.T, q *codeq.Queue) bool {
	groups := func() int64 {
		st, err := q.StorageStats()
		require.NoError(t, err)
		return st.Shards[0].Upkeep[codeq.UpkeepGroup].Count
	}
	for range 1000 {
		before := groups()
		for range 200 {
			runtime.Gosched()
		}
		if groups() == before {
			return true
		}
	}
	return false
}

// TestLimitIsForgotten: when the last task that waited for room is canceled, nothing is held for a
// key without leases.
func TestLimitIsForgotten(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a", LimitKey: "k"}, codeq.Task{Queue: "a", LimitKey: "k"}, codeq.Task{Queue: "a", LimitKey: "k"})
		l := queuetest.ClaimNow(t, q, "a")
		require.Nil(t, queuetest.ClaimNow(t, q, "a"), "the others wait for room")
		queuetest.Complete(t, q, l)
		queuetest.RequireSettled(t, q) // the second is ready, the third waits
		require.NoError(t, q.Cancel(t.Context(), ids[2]))
		queuetest.RequireSettled(t, q)
		queuetest.RequireNoLimits(t, q)
	})
}
