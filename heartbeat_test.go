package codeq_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestStalledShardCostsNoLeaseElsewhere: while one shard cannot commit, the
// leases of another are renewed.
func TestStalledShardCostsNoLeaseElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 2, LeaseFor: 10 * time.Second})
		produce(t, startingAt(q, 0), codeq.Task{Queue: "a"})
		healthy := produce(t, startingAt(q, 1), codeq.Task{Queue: "a"})[0]
		done := make(chan struct{})
		var mu sync.Mutex
		causes := make(map[codeq.ID]error)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, job *codeq.Job[[]byte]) error {
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
		go func() { ran <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 2}) }()
		synctest.Wait()
		open := shut(t, q, 0)
		stalled := make(chan error)
		go func() {
			_, err := startingAt(q, 0).Produce(ctx, codeq.Task{Queue: "b"})
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
