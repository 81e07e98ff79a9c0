package cluster_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestWaitsOutlastLeaders: calls that wait on purpose go on while there is no leader, also if they
// begin in that time, and end with their ctx.
func TestWaitsOutlastLeaders(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		_, other := c.lead()
		q := simQueue(other)
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		outcomes := make(chan error, 6)
		wait := func(ctx context.Context) {
			for _, verb := range []func() error{
				func() error { _, err := q.Await(ctx, id); return err },
				func() error { return q.WaitIdle(ctx) },
				func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"later"}}); return err },
			} {
				go func() { outcomes <- verb() }()
			}
		}
		wait(t.Context())
		synctest.Wait()
		pause := func(paused bool) {
			for _, n := range c.members() {
				if n != other {
					c.net.Pause(n.name, paused)
				}
			}
		}
		pause(true)
		time.Sleep(2 * simCallTimeout)
		wait(t.Context())
		time.Sleep(4 * simCallTimeout)
		require.Empty(t, outcomes)

		ctx, cancel := context.WithTimeout(t.Context(), 2*simCallTimeout)
		defer cancel()
		wait(ctx)
		for range 3 {
			require.ErrorIs(t, <-outcomes, context.DeadlineExceeded)
		}
		require.Equal(t, context.DeadlineExceeded, ctx.Err())
		require.Empty(t, outcomes)

		pause(false)
		require.NoError(t, q.WaitReady(t.Context()))
		queuetest.Complete(t, q, queuetest.Claim(t, q, "a"))
		for range 4 { // Await, WaitIdle
			require.NoError(t, <-outcomes)
		}
		for range 2 {
			queuetest.Produce(t, q, codeq.Task{Queue: "later"})
			require.NoError(t, <-outcomes)
		}
	})
}
