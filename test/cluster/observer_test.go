package cluster_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/guard"
	"codeq/test/queuetest"
)

// TestObserverOfCluster: only the node that leads the shard reports a change. Only the node that
// runs a handler reports the handler, with the time that its task was ready.
func TestObserverOfCluster(t *testing.T) {
	var mu sync.Mutex
	sum := make(map[string]codeq.QueueDelta)
	var handlers []codeq.HandlerSample
	observe := func(o *codeq.Observation) {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range o.Queues {
			to := sum[d.Queue]
			to.Produced, to.Claimed, to.Completed = to.Produced+d.Produced, to.Claimed+d.Claimed, to.Completed+d.Completed
			sum[d.Queue] = to
		}
		handlers = append(handlers, o.Handlers...)
	}
	simCase(t, codeq.Options{Observer: observe}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		time.Sleep(time.Minute)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { time.Sleep(time.Second); return nil })
		handle := func(n *simNode) {
			stop := queuetest.Run(simQueue(n), &m, codeq.RunOptions{Concurrency: 1})
			require.NoError(t, simQueue(n).WaitIdle(t.Context(), "a"))
			require.NoError(t, stop())
		}
		handle(other)
		require.NoError(t, simQueue(other).TransferLeadership(t.Context(), 0, other.name))
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
		handle(leader)
		time.Sleep(guard.TellPause)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]codeq.QueueDelta{"a": {Totals: codeq.Totals{Produced: 3, Claimed: 3, Completed: 3}}}, sum)
		require.Len(t, handlers, 3)
		for i, waited := range []time.Duration{time.Minute, time.Minute + time.Second, 0} {
			require.InDelta(t, waited, handlers[i].Wait, float64(time.Second), i)
			require.Equal(t, time.Second, handlers[i].Took)
			require.Equal(t, codeq.VerdictCompleted, handlers[i].Verdict)
		}
	})
}
