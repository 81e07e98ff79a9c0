package codeq_test

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
)

// stateOf is the state in which a task is stored.
func stateOf(t *testing.T, q *codeq.Queue, id codeq.ID) codeq.State {
	t.Helper()
	info, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return info.State
}

// hammer lets workers claim tasks of a queue and end each lease one way or the
// other until as many are completed, and watches how many leases there are.
// It returns the largest number by key.
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

// TestLimitKeyCanceledOnTheWay: a task that was let go on and is withdrawn
// before it is leased leaves its room to the next.
func TestLimitKeyCanceledOnTheWay(t *testing.T) {
	for name, withdraw := range map[string]func(q *codeq.Queue, id codeq.ID) error{
		"canceled": func(q *codeq.Queue, id codeq.ID) error { return q.Cancel(context.Background(), id) },
		"put off": func(q *codeq.Queue, id codeq.ID) error {
			return q.SetRunAt(context.Background(), id, time.Now().Add(time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
				configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
				ids := produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4")...)
				first := claimNow(t, q, "a")
				require.Nil(t, claimNow(t, q, "a"))
				complete(t, q, first)
				synctest.Wait()
				require.Equal(t, codeq.Ready, stateOf(t, q, ids[1]))
				require.Equal(t, codeq.Blocked, stateOf(t, q, ids[2]))
				require.NoError(t, withdraw(q, ids[1]))
				requireSettled(t, q)
				requireNext(t, q, "a", "3", "4")
			})
		})
	}
}

// TestQueueConcurrency: a queue never has more leases than it may, however many
// workers there are, and makes use of them all.
func TestQueueConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		const tasks, limit = 300, 5
		configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = limit })
		for range tasks {
			produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
		}
		most := hammer(t, q, "a", 16, tasks, func(*codeq.Lease) string { return "" })
		require.Equal(t, limit, most[""])
		requireSettled(t, q)

		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"b"}, Max: tasks})
		require.NoError(t, err)
		require.Greater(t, len(batch), limit, "another queue")
	})
}

// TestConcurrencyWakes: a claim that waits is served at the moment at which
// there is room, whatever makes it.
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
				configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
				for range 9 {
					produce(t, q, codeq.Task{Queue: "a"})
				}
				l := claimNow(t, q, "a")
				require.Nil(t, claimNow(t, q, "a"))
				first, second := waitingClaim(t, q, "a"), waitingClaim(t, q, "a")
				requireSettled(t, q)
				require.NoError(t, c.end(t, q, l))
				synctest.Wait()
				require.Len(t, first, 1, "first come, first served")
				if c.name == "removed" {
					require.Len(t, second, 1)
				} else {
					require.Empty(t, second)
				}
				requireSettled(t, q)
			})
		})
	}
	t.Run("expiry", func(t *testing.T) {
		forShards(t, func(t *testing.T, q *codeq.Queue) {
			configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 1 })
			for range 9 {
				produce(t, q, codeq.Task{Queue: "a"})
			}
			l := claimNow(t, q, "a")
			got := waitingClaim(t, q, "a")
			begin := time.Now()
			<-got
			require.Equal(t, l.Deadline, time.Now().UTC())
			require.Greater(t, time.Since(begin), 10*time.Second)
			requireSettled(t, q)
		})
	})
}

// TestConcurrencyLowered: no lease is taken away, and none granted before there
// is room below the new limit.
func TestConcurrencyLowered(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		for range 20 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		var held []*codeq.Lease
		for range 4 { // before there is any limit
			held = append(held, claimNow(t, q, "a"))
		}
		configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 5 })
		held = append(held, claimNow(t, q, "a"))
		require.NotNil(t, held[4])
		require.Nil(t, claimNow(t, q, "a"), "leases that are older than the limit count")

		configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
		for i := range 3 {
			require.Nil(t, claimNow(t, q, "a"), "%d leases", 5-i)
			require.NoError(t, q.Extend(t.Context(), held[i].Receipt, time.Hour), "a lease was taken away")
			complete(t, q, held[i])
		}
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, held[3])
		require.NotNil(t, claimNow(t, q, "a"))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestConcurrencyBatch: a batch takes no more than there is room for.
func TestConcurrencyBatch(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 3 })
		produce(t, q, named(codeq.Task{Queue: "a"}, "1", "2", "3", "4", "5")...)
		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 5})
		require.NoError(t, err)
		require.Len(t, batch, 3)
		complete(t, q, batch[1])
		batch, err = q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 5})
		require.NoError(t, err)
		require.Len(t, batch, 1)
		requireSettled(t, q)
	})
}

// TestConcurrencyRestart: leases from before a restart count against the limit.
func TestConcurrencyRestart(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			opts := *onDisk(crashfs.New(), &codeq.Options{Shards: shards})
			q := openForRun(t, opts)
			configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency = 2 })
			for range 20 {
				produce(t, q, codeq.Task{Queue: "a"})
			}
			first := claimNow(t, q, "a")
			require.NotNil(t, claimNow(t, q, "a"))
			require.NoError(t, q.Close())

			q = openForRun(t, opts)
			requireSettled(t, q)
			require.Nil(t, claimNow(t, q, "a"))
			complete(t, q, first)
			require.NotNil(t, claimNow(t, q, "a"))
			require.Nil(t, claimNow(t, q, "a"))
			requireSettled(t, q)
		})
	}
}

// TestLimitKeyParks: tasks without room step aside, so that others get past
// them, and come back in the order in which they were produced.
func TestLimitKeyParks(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 2 })
		ids := produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4", "5")...)
		other := produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "other"}, "other")...)[0]
		free := produce(t, q, named(codeq.Task{Queue: "a"}, "free")...)[0]
		elsewhere := produce(t, q, named(codeq.Task{Queue: "b", LimitKey: "k"}, "elsewhere", "elsewhere", "elsewhere")...)

		var held []*codeq.Lease
		for range 4 {
			held = append(held, claimNow(t, q, "a"))
		}
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		for i, want := range []codeq.ID{ids[0], ids[1], other, free} {
			require.Equal(t, want, held[i].ID)
		}
		for _, id := range ids[2:] {
			require.Equal(t, codeq.Blocked, stateOf(t, q, id))
		}
		for i := range elsewhere {
			require.Equal(t, elsewhere[i], claimNow(t, q, "b").ID, "another queue has no limit")
		}

		complete(t, q, held[2]) // no room for k
		require.Nil(t, claimNow(t, q, "a"))
		got := waitingClaim(t, q, "a")
		complete(t, q, held[1])
		require.Equal(t, ids[2], (<-got).ID)
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
		complete(t, q, held[0])
		requireNext(t, q, "a", "4", "5")
		requireSettled(t, q)
	})
}

// TestLimitKeyAbsent: without the setting, keys limit nothing.
func TestLimitKeyAbsent(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, "1", "2", "3")...)
		first := claimNow(t, q, "a")
		require.NotNil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 2 })
		require.Nil(t, claimNow(t, q, "a"), "leases that are older than the limit count")
		complete(t, q, first)
		requireNext(t, q, "a", "3")
		requireSettled(t, q)
	})
}

// TestLimitKeyChanged: while tasks are parked, a higher limit lets as many go
// on as it has room for, none lets all go on, and a lower one has its way once
// leases have ended.
func TestLimitKeyChanged(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		limit := func(n int) { configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = n }) }
		next := func(want string) *codeq.Lease {
			t.Helper()
			l := claimNow(t, q, "a")
			require.NotNil(t, l)
			require.Equal(t, want, string(l.Payload))
			return l
		}
		limit(1)
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4", "5", "6", "7", "8")...)
		held := []*codeq.Lease{next("1")}
		require.Nil(t, claimNow(t, q, "a"))

		waiting := waitingClaim(t, q, "a")
		limit(3)
		synctest.Wait()
		require.Len(t, waiting, 1)
		held = append(held, <-waiting, next("3"))
		require.Equal(t, "2", string(held[1].Payload))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		limit(2)
		requireSettled(t, q)
		complete(t, q, held[0])
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, held[1])
		next("4")
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)

		limit(0)
		requireSettled(t, q)
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 4, counts["a"].Ready)
		requireNext(t, q, "a", "5", "6", "7", "8")
		requireSettled(t, q)
	})
}

// TestLimitKeyManyParked: more tasks than a group can park or let go on.
func TestLimitKeyManyParked(t *testing.T) {
	t.Parallel()
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		const n = 3000
		tasks := make([]codeq.Task, n, n+1)
		for i := range tasks {
			tasks[i] = codeq.Task{Queue: "a", LimitKey: "k", Payload: make([]byte, 1000)}
		}
		ids, err := q.ProduceBatch(t.Context(), append(tasks, codeq.Task{Queue: "a", Payload: []byte("behind")}))
		require.NoError(t, err)
		require.Equal(t, ids[0], claimNow(t, q, "a").ID)
		require.Equal(t, "behind", string(claimNow(t, q, "a").Payload), "a claim that does not wait")
		requireSettled(t, q)
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, n-1, counts["a"].Blocked)

		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 0 })
		requireSettled(t, q)
		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: n})
		require.NoError(t, err)
		require.Len(t, batch, n-1)
		for i, l := range batch {
			require.Equal(t, ids[i+1], l.ID)
		}
		requireSettled(t, q)
	})
}

// TestLimitKeyRestart: parked tasks go on after a restart, when the lease that
// they wait for ends, or at once if there is none any more.
func TestLimitKeyRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *onDisk(crashfs.New(), &codeq.Options{})
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, "1", "2", "3", "4")...)
		first := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		requireSettled(t, q)
		require.Nil(t, claimNow(t, q, "a"))
		complete(t, q, first) // the second is let go on
		requireSettled(t, q)
		require.NoError(t, q.Close())

		q = openForRun(t, opts)
		requireSettled(t, q)
		l := claimNow(t, q, "a")
		require.Equal(t, "2", string(l.Payload))
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Minute) // it expires
		requireSettled(t, q)
		requireNext(t, q, "a", "2", "3", "4")
		requireSettled(t, q)
	})
}

// timesOfClaims makes as many claims at a time, and returns when they were served,
// counted from the beginning. It completes what they get.
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

// every returns n times, of which the first burst are 0 and the others follow
// at intervals.
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
		configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 10, 3 })
		for range 60 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))
		requireSettled(t, q)

		time.Sleep(10 * time.Second) // no more than the burst gathers
		require.Equal(t, every(100*time.Millisecond, 3, 10), timesOfClaims(t, q, "a", 10))

		configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 2.5, 1 })
		require.Equal(t, every(400*time.Millisecond, 0, 5), timesOfClaims(t, q, "a", 5))
		time.Sleep(10 * time.Second)
		require.Equal(t, every(400*time.Millisecond, 1, 5), timesOfClaims(t, q, "a", 5), "the lower burst")
		requireSettled(t, q)
	})
}

// TestRateNoWait: a claim that does not wait gets ErrEmpty while there is no
// token, and a batch as many tasks as there are tokens.
func TestRateNoWait(t *testing.T) {
	bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.Rate = 3.5 }) // and so a burst of 4
		for range 20 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		batch, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 20})
		require.NoError(t, err)
		require.Len(t, batch, 4)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(285 * time.Millisecond)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Millisecond)
		require.NotNil(t, claimNow(t, q, "a"))
		require.Nil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestRateChanged: claims that wait go by the new rate at once.
func TestRateChanged(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		for range 20 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		rate := func(r float64) { configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = r, 1 }) }
		rate(0.001)
		require.NotNil(t, claimNow(t, q, "a"))
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
			require.NotNil(t, claimNow(t, q, "a"))
		}
		requireSettled(t, q)
	})
}

// TestRateRestart: the bucket has no more after Open than since the last claim, so that restarts do
// not add up to more than the rate.
func TestRateRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *onDisk(crashfs.New(), &codeq.Options{Shards: 2})
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst = 4, 4 })
		for range 20 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		require.NoError(t, q.Close())
		for i := range 3 {
			q = openForRun(t, opts)
			if i == 0 { // nothing has been claimed
				for range 4 {
					complete(t, q, claimNow(t, q, "a"))
				}
			}
			require.Nil(t, claimNow(t, q, "a"))
			// of the last second, not all claims are stored
			require.LessOrEqual(t, timesOfClaims(t, q, "a", 3)[2], 2*time.Second)
			requireSettled(t, q)
			require.NoError(t, q.Close())
		}
	})
}

// TestRateAndConcurrency: a place that is refused for want of a token, or a
// token for want of a place, is not spent.
func TestRateAndConcurrency(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.Rate, s.Burst, s.Concurrency = 1, 2, 1 })
		for range 10 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		l := claimNow(t, q, "a")
		for range 5 {
			require.Nil(t, claimNow(t, q, "a"), "no place")
		}
		complete(t, q, l)
		l = claimNow(t, q, "a")
		require.NotNil(t, l, "the second token")
		complete(t, q, l)
		for range 5 {
			require.Nil(t, claimNow(t, q, "a"), "no token")
		}
		time.Sleep(time.Second)
		require.NotNil(t, claimNow(t, q, "a"))
		requireSettled(t, q)
	})
}

// TestPausedTakesNoRoom: who waits for a paused queue is served when it resumes.
func TestPausedTakesNoRoom(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		configure(t, q, "a", func(s *codeq.Settings) { s.Concurrency, s.Rate, s.Burst = 1, 1, 1 })
		produce(t, q, codeq.Task{Queue: "a"})
		require.NoError(t, q.Pause(t.Context(), "a"))
		got := waitingClaim(t, q, "a")
		requireSettled(t, q)
		require.NoError(t, q.Resume(t.Context(), "a"))
		synctest.Wait()
		require.Len(t, got, 1)
		requireSettled(t, q)
	})
}

// requireNext claims and completes tasks of a queue, which are to have these
// payloads, and then no further one.
func requireNext(t *testing.T, q *codeq.Queue, queue string, names ...string) {
	t.Helper()
	for _, name := range names {
		l := claimNow(t, q, queue)
		require.NotNil(t, l, "no task instead of %q", name)
		require.Equal(t, name, string(l.Payload))
		complete(t, q, l)
	}
	require.Nil(t, claimNow(t, q, queue))
}

// waitingClaim is a Claim under way.
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

// TestLimitKeyCrashWhileParked: wherever a crash falls, those that wait for
// room get it in the end, in their order.
func TestLimitKeyCrashWhileParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		opts := *onDisk(disk, &codeq.Options{Durability: codeq.DurabilityDisk})
		q := openForRun(t, opts)
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 })
		names := []string{"0", "1", "2", "3", "4"}
		produce(t, q, named(codeq.Task{Queue: "a", LimitKey: "k"}, names...)...)
		im := keepImages(t, q, disk)
		for l := claimNow(t, q, "a"); l != nil; l = claimNow(t, q, "a") {
			require.Nil(t, claimNow(t, q, "a"), "one at a time")
			complete(t, q, l)
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.Images), 3*len(names))
		for i, image := range im.Images {
			onDisk(image, &opts)
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Minute) // leases expire
			requireSettled(t, q)
			counts, err := q.Stats(t.Context())
			require.NoError(t, err)
			left := names[len(names)-int(counts["a"].Total()):]
			requireNext(t, q, "a", left...)
			requireSettled(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}

// TestRateOfNearlyNothing: a wait that is longer than any time there is does not
// become a short one.
func TestRateOfNearlyNothing(t *testing.T) {
	for _, rate := range []float64{1e-9, 1e-12, math.SmallestNonzeroFloat64} {
		bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
			configure(t, q, "a", func(s *codeq.Settings) { s.Rate = rate })
			produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
			require.NotNil(t, claimNow(t, q, "a"), "the burst")
			got := waitingClaim(t, q, "a")
			requireSettled(t, q)
			time.Sleep(2 * longestLease)
			require.Empty(t, got)
			configure(t, q, "a", func(s *codeq.Settings) { s.Rate = 0 })
			synctest.Wait()
			require.Len(t, got, 1)
		})
	}
}

// TestConcurrencyPerKey: no key has more leases than it may while workers take
// all they can get, and each makes use of its limit.
func TestConcurrencyPerKey(t *testing.T) {
	forShards(t, func(t *testing.T, q *codeq.Queue) {
		const tasks, limit, keys = 300, 3, 5
		configure(t, q, "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = limit })
		for i := range tasks {
			produce(t, q, codeq.Task{Queue: "a", LimitKey: fmt.Sprint("key ", i%keys), Priority: i % 2})
		}
		most := hammer(t, q, "a", 24, tasks, func(l *codeq.Lease) string { return l.LimitKey })
		require.Len(t, most, keys)
		for key, n := range most {
			require.Equal(t, limit, n, key)
		}
		requireSettled(t, q)
		requireNoLimits(t, q)
	})
}
