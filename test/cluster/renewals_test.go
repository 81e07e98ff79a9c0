package cluster_test

import (
	"codeq/test/queuetest"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
)

// TestRenewalsPassOtherCalls: a lease is extended at once, although a large call and many smaller
// ones go to the same node over a slow link.
func TestRenewalsPassOtherCalls(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		time.Sleep(2 * time.Minute)
		leader, other := c.lead()
		q := simQueue(other)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: 5 * time.Second})
		require.NoError(t, err)
		c.net.SetBandwidth(other.name, leader.name, slowLink)
		var calls errgroup.Group
		for _, payloads := range append(slices.Repeat([][]int{{200 << 10}}, 10), []int{1 << 20, 1 << 20}) {
			calls.Go(func() error {
				var batch []codeq.Task
				for _, size := range payloads {
					batch = append(batch, codeq.Task{Queue: "large", Payload: make([]byte, size)})
				}
				_, err := q.ProduceBatch(ctx, batch)
				return err
			})
		}
		produced := make(chan error, 1)
		go func() { produced <- calls.Wait() }()
		extended := 0
		for begun := time.Now(); len(produced) == 0; extended++ {
			time.Sleep(time.Second)
			at := time.Now()
			require.NoError(t, q.Extend(ctx, l.Receipt, 5*time.Second))
			require.Less(t, time.Since(at), time.Second)
			require.Less(t, time.Since(begun), time.Minute)
		}
		require.NoError(t, errors.Join(<-produced, q.Complete(ctx, l.Receipt, nil)))
		require.GreaterOrEqual(t, extended, 5)
	})
}
