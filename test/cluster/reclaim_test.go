package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/test/queuetest"
)

// TestReplicasReclaim: in a cluster, leaders and followers get the space of ended tasks back.
func TestReplicasReclaim(t *testing.T) {
	t.Parallel()
	opts := queuetest.ReclaimTest()
	opts.Shards, inspect.Options(&opts).FS = 0, nil
	simCase(t, opts, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, _ := c.lead()
		q := simQueue(leader)
		const tasks = 512
		queuetest.ProduceMuch(t, q, tasks, func(i int) codeq.Task { return codeq.Task{Queue: "a"} })
		held := 0
		queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
			if held++; held == 100 {
				return nil
			}
			return q.Complete(context.Background(), l.Receipt, nil)
		})
		time.Sleep(30 * time.Second)
		c.rest()
		for _, n := range c.members() {
			require.Less(t, queuetest.StoresOf(t, simQueue(n)).TableBytes, int64(tasks*queuetest.ReclaimPayload/4), n)
		}
	})
}

// TestFullDiskOfFollowerIsReclaimed: a follower with little free disk space gets its space back
// within seconds. Its leader works during that time.
func TestFullDiskOfFollowerIsReclaimed(t *testing.T) {
	t.Parallel()
	const low, tasks = 8 << 20, 512
	opts := queuetest.ReclaimTest()
	opts.Shards, inspect.Options(&opts).FS, opts.MinFreeBytes = 0, nil, low
	simCase(t, opts, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, other := c.lead()
		q := simQueue(leader)
		ids := queuetest.ProduceMuch(t, q, tasks, func(int) codeq.Task { return codeq.Task{Queue: "a"} })
		time.Sleep(time.Minute)
		full := queuetest.StoresOf(t, simQueue(other)).TableBytes
		look := func() { other.fill(low/2 + full - queuetest.StoresOf(t, simQueue(other)).TableBytes) }
		look()
		queuetest.CancelMost(t, q, ids)
		for range 30 {
			time.Sleep(100 * time.Millisecond)
			look()
			queuetest.Produce(t, q, codeq.Task{Queue: "b"})
		}
		require.Less(t, queuetest.StoresOf(t, simQueue(other)).TableBytes, int64(tasks*queuetest.ReclaimPayload/4))
		other.fill(simtest.DiskSize)
	})
}
