package cluster_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// TestClusterProcessInfo: only the leader of a shard counts it, also after a change of the leader.
func TestClusterProcessInfo(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	qs := threeNodes(t, codeq.Options{Shards: 3}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	for range 10 {
		queuetest.Produce(t, qs[0], codeq.Task{Queue: "a"})
	}
	require.Eventually(t, func() bool { return qs[1].TransferLeadership(ctx, 0, "n2") == nil }, 20*time.Second, time.Millisecond)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	require.Eventually(t, func() bool {
		ready, leaders := uint64(0), make([]int, 3)
		for i, q := range qs {
			p, err := q.ProcessInfo(ctx)
			require.NoError(t, err)
			require.Equal(t, inspect.Of(qs[i]).Node().Self().Node, p.Node)
			for shard, s := range p.Shards {
				if !s.Leads {
					require.Empty(t, s.Queues)
					continue
				}
				leaders[shard]++
				for _, of := range s.Queues {
					ready += of.Counts.Ready
				}
			}
		}
		return ready == 10 && leaders[0] == 1 && leaders[1] == 1 && leaders[2] == 1 && inspect.Of(qs[2]).Leads(0)
	}, 20*time.Second, time.Millisecond)
}
