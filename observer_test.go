package codeq

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/guard"
	"codeq/internal/keys"
)

// TestObservationIsBounded: queues beyond a number are told together, and the memory of many is not
// kept; no change is lost.
func TestObservationIsBounded(t *testing.T) {
	o := new(observed)
	for round := range 2 {
		var sum uint64
		const queues = observedQueues + 100
		for i := range uint64(queues) {
			for range 2 {
				o.delta(fmt.Sprint(round, "-", i)).add(&keys.Totals{EventProduced - 1: i})
				sum += i
			}
			o.addCommit(CommitSample{})
		}
		require.Len(t, o.Queues, observedQueues+1)
		for i, d := range o.Queues {
			sum -= d.Produced
			require.Equal(t, i == observedQueues, d.Queue == "")
		}
		require.Zero(t, sum)
		require.Len(t, o.Commits, observedSamples)
		require.EqualValues(t, queues-observedSamples, o.MissedCommits)
		o.Reset()
		require.Zero(t, cap(o.Queues))
		require.Empty(t, o.index)
		require.Equal(t, Observation{Commits: o.Commits, Handlers: o.Handlers}, o.Observation)
		require.Empty(t, o.Commits)
	}
}

// TestObserverOfCluster: each change is told by one node, that which leads its shard at the time,
// and each handler by that on which it runs, with the time for which its task was ready.
func TestObserverOfCluster(t *testing.T) {
	var mu sync.Mutex
	sum := make(map[string]QueueDelta)
	var handlers []HandlerSample
	observe := func(o *Observation) {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range o.Queues {
			to := sum[d.Queue]
			to.Produced, to.Claimed, to.Completed = to.Produced+d.Produced, to.Claimed+d.Claimed, to.Completed+d.Completed
			sum[d.Queue] = to
		}
		handlers = append(handlers, o.Handlers...)
	}
	simCase(t, Options{Observer: observe}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		produce(t, simQueue(other), Task{Queue: "a"}, Task{Queue: "a"})
		time.Sleep(time.Minute)
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error { time.Sleep(time.Second); return nil })
		handle := func(n *simNode) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- simQueue(n).Run(ctx, &m, &RunOptions{Concurrency: 1}) }()
			require.NoError(t, simQueue(n).WaitIdle(t.Context(), "a"))
			cancel()
			require.NoError(t, <-ended)
		}
		handle(other)
		require.NoError(t, simQueue(other).TransferLeadership(t.Context(), 0, other.name))
		produce(t, simQueue(leader), Task{Queue: "a"})
		handle(leader)
		time.Sleep(guard.TellPause)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]QueueDelta{"a": {Totals: Totals{Produced: 3, Claimed: 3, Completed: 3}}}, sum)
		require.Len(t, handlers, 3)
		for i, waited := range []time.Duration{time.Minute, time.Minute + time.Second, 0} {
			require.InDelta(t, waited, handlers[i].Wait, float64(time.Second), i)
			require.Equal(t, time.Second, handlers[i].Took)
			require.Equal(t, VerdictCompleted, handlers[i].Verdict)
		}
	})
}
