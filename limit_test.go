package codeq

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/dispatch"
	"codeq/internal/inspect"
)

// requireSettled waits until nothing moves any more, and checks every shard's disk
// and memory.
func requireSettled(t *testing.T, q *Queue) {
	t.Helper()
	synctest.Wait()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
}

// configure is Configure that has to succeed.
func configure(t *testing.T, q *Queue, queue string, change func(*Settings)) {
	t.Helper()
	require.NoError(t, q.Configure(context.Background(), queue, change))
}

// complete is Complete that has to succeed.
func complete(t *testing.T, q *Queue, l *Lease) {
	t.Helper()
	require.NotNil(t, l, "nothing to complete")
	require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
}

// requireNoLimits makes sure that no shard holds anything for any LimitKey.
func requireNoLimits(t *testing.T, q *Queue) {
	t.Helper()
	for _, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error {
			require.Zero(t, s.Probe().Usage().Limits)
			return nil
		}))
	}
}

// TestClaimThatParksManyDelaysNoOther: what is put off to the next group gets on, however long
// a claim that comes before it looks for a task.
func TestClaimThatParksManyDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *inspect.With(&Options{Shards: 1}, inspect.Private{FS: crashfs.New(), GroupBytes: 4 << 10})
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		const n = 3000
		tasks := slices.Repeat([]Task{{Queue: "a", LimitKey: "k", Payload: make([]byte, 100)}}, n)
		_, err = q.ProduceBatch(t.Context(), append(tasks, Task{Queue: "b"}))
		require.NoError(t, err)
		require.NoError(t, q.Close())
		q, err = Open("queue", &opts) // the windows are empty
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		s := q.led()[0]
		require.NotNil(t, claimNow(t, q, "a"))
		groups, found := 0, 0
		require.NoError(t, s.probe(func(s *shard) error {
			s.commit = committing{s.commit, func() {
				if groups++; found == 0 && s.Queues["b"].Counts.Leased > 0 {
					found = groups
				}
			}}
			return nil
		}))
		goOn := standStill(s)
		var claims sync.WaitGroup
		for _, queue := range []string{"a", "b"} {
			claims.Go(func() { claimNow(t, q, queue) })
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
	committer
	before func()
}

func (c committing) Commit(b *pebble.Batch) error {
	c.before()
	return c.committer.Commit(b)
}

// countedGate counts how often claims come to a gate.
type countedGate struct {
	dispatch.Gateway
	looks *atomic.Int64
}

func (g countedGate) Look(d *dispatch.Dispatcher, now time.Time) (bool, time.Duration) {
	g.looks.Add(1)
	return g.Gateway.Look(d, now)
}

// TestRatesOfManyQueues: when the rate of one queue lets a claim pass, nobody looks at those of the
// others.
func TestRatesOfManyQueues(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const queues = 100
		var looks atomic.Int64
		name := func(i int) string { return fmt.Sprint("q", i) }
		for i := range queues {
			configure(t, q, name(i), func(s *Settings) { s.Rate, s.Burst = 1/float64(i+1), 1 })
			require.NoError(t, q.led()[0].probe(func(s *shard) error {
				s.setGate(name(i), countedGate{s.claims.Of(s.Queues[name(i)]).Gateway(), &looks})
				return nil
			}))
			produce(t, q, Task{Queue: name(i)}, Task{Queue: name(i)})
			require.NotNil(t, claimNow(t, q, name(i)))
		}
		served := make(chan *Lease, queues)
		for i := range queues {
			go func() {
				l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{name(i)}})
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

// TestClosedGateRefillsNothing: claims that wait at a limit of concurrency leave
// the shard asleep, also when the windows of the lanes evict each other.
func TestClosedGateRefillsNothing(t *testing.T) {
	bubble(t, Options{Shards: 1, WindowTasks: 2, WindowBytes: 1}, func(t *testing.T, q *Queue) {
		for _, tenant := range []string{"x", "y"} {
			for range 6 {
				produce(t, q, Task{Queue: "a", Tenant: tenant})
			}
		}
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 2 })
		claimNow(t, q, "a")
		l := claimNow(t, q, "a")
		got := make(chan *Lease, 1)
		go func() {
			l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
			if err == nil {
				got <- l
			}
		}()
		require.True(t, fallsAsleep(q.shard(0)), "the shard never sleeps")
		require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
		next := <-got
		require.True(t, fallsAsleep(q.shard(0)))
		require.NoError(t, q.Complete(context.Background(), next.Receipt, nil))
		requireSettled(t, q)
	})
}

// fallsAsleep reports whether a shard comes to rest, and stays there while others
// have their turn: synctest.Wait would not return if it did not.
func fallsAsleep(s *shard) bool {
	groups := func() int64 { return upkeepStats(s.upkeep.UpkeepTable)[UpkeepGroup].Count }
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

// TestLimitIsForgotten: nothing is held for a key without leases when the last
// task that waited for room is canceled.
func TestLimitIsForgotten(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		configure(t, q, "a", func(s *Settings) { s.ConcurrencyPerKey = 1 })
		ids := produce(t, q, Task{Queue: "a", LimitKey: "k"}, Task{Queue: "a", LimitKey: "k"}, Task{Queue: "a", LimitKey: "k"})
		l := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"), "the others wait for room")
		complete(t, q, l)
		requireSettled(t, q) // the second is ready, the third waits
		require.NoError(t, q.Cancel(t.Context(), ids[2]))
		requireSettled(t, q)
		requireNoLimits(t, q)
	})
}
