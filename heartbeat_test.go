package codeq

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestStalledShardCostsNoLeaseElsewhere: while one shard cannot commit, the
// leases of another are renewed.
func TestStalledShardCostsNoLeaseElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2, LeaseFor: 10 * time.Second})
		produce(t, q.startingAt(0), Task{Queue: "a"})
		healthy := produce(t, q.startingAt(1), Task{Queue: "a"})[0]
		done := make(chan struct{})
		var mu sync.Mutex
		causes := make(map[ID]error)
		var m Mux
		Handle(&m, "a", func(ctx context.Context, job *Job[[]byte]) error {
			select {
			case <-done:
			case <-ctx.Done():
			}
			mu.Lock()
			defer mu.Unlock()
			causes[job.ID] = context.Cause(ctx)
			return nil
		})
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error)
		go func() { ran <- q.Run(ctx, &m, &RunOptions{Concurrency: 2}) }()
		synctest.Wait()
		open := shut(t, q, 0)
		stalled := make(chan error)
		go func() {
			_, err := q.startingAt(0).Produce(ctx, Task{Queue: "b"})
			stalled <- err
		}()
		time.Sleep(time.Minute)
		close(open)
		require.NoError(t, <-stalled)
		synctest.Wait()
		close(done)
		stop()
		require.NoError(t, <-ran)
		require.Contains(t, causes, healthy)
		require.NoError(t, causes[healthy])
	})
}
