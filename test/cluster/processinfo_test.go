package cluster_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestClusterProcessInfo: only the leader of a shard counts it, also after a change of the leader.
func TestClusterProcessInfo(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		for shard := range 3 {
			queuetest.Produce(t, simQueue(c.nodes[0]), codeq.Task{Queue: "a", LimitKey: queuetest.KeyOf("a", shard, 3)})
		}
		require.NoError(t, simQueue(c.nodes[1]).TransferLeadership(t.Context(), 0, "n2"))
		c.awaitReady()
		for i, leads := range [][]int{{}, {1}, {0, 2}} {
			p, err := simQueue(c.nodes[i]).ProcessInfo(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.nodes[i].name, p.Node)
			for shard, s := range p.Shards {
				require.Equal(t, slices.Contains(leads, shard), s.Leads)
				if !s.Leads {
					require.Empty(t, s.Queues)
					continue
				}
				require.Len(t, s.Queues, 1)
				require.EqualValues(t, 1, s.Queues[0].Counts.Ready)
			}
		}
	})
}
