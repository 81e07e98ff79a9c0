package cluster_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestBatchElsewhere: a batch handler works on tasks of shards that other nodes lead. Its tasks
// keep their leases over changes of leaders, and each is completed once.
func TestBatchElsewhere(t *testing.T) {
	simCase(t, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		const n = 300
		leader, caller := c.lead()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var mu sync.Mutex
		seen := make(map[codeq.ID]int)
		sizes := 0
		var mux codeq.Mux
		codeq.HandleBatch(&mux, "a", codeq.BatchOptions{Max: 20, Linger: time.Second}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			mu.Lock()
			for _, j := range jobs {
				seen[j.ID]++
			}
			sizes++
			mu.Unlock()
			time.Sleep(20 * time.Second) // two lengths of a lease
			return nil
		})
		ran := make(chan error, 1)
		go func() {
			ran <- simQueue(caller).Run(ctx, &mux, &codeq.RunOptions{
				Concurrency: 4, LeaseFor: 10 * time.Second, OnError: func(_ *codeq.Lease, err error) { t.Error(err) },
			})
		}()
		queuetest.Produce(t, simQueue(leader), tasksOfA(n)...)
		time.Sleep(5 * time.Second)
		c.transfer(leader, 0, c.third(leader, caller))
		require.NoError(t, simQueue(leader).WaitIdle(ctx, "a"))
		cancel()
		require.NoError(t, <-ran)
		require.Len(t, seen, n)
		for id, times := range seen {
			require.Equal(t, 1, times, id)
		}
		require.LessOrEqual(t, sizes, n/20+10)
	})
}
