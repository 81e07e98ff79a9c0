package cluster_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
)

// TestLostNodesAreRefused: one node has gone on alone, and then the lost nodes come back. They
// belong to another cluster. Without a majority of that cluster they do nothing, and say why. With
// one, they go on beside the other node. In neither case does a task of the lost nodes reach the
// other node.
func TestLostNodesAreRefused(t *testing.T) {
	t.Parallel()
	for _, kind := range []struct{ nodes, back int }{{3, 1}, {5, 2}, {3, 2}} {
		t.Run(fmt.Sprintf("%d of %d", kind.back, kind.nodes), func(t *testing.T) {
			simNodes(t, kind.nodes, codeq.Options{}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				n := c.leader(0)
				n.produce(t, 20)
				c.rest()
				var lost []*simNode
				for _, old := range c.members() {
					old.crash(100)
					if old != n {
						lost = append(lost, old)
					}
				}
				require.NoError(t, c.recover(n))
				n.start()
				c.awaitLeaders()
				n.produce(t, 10)
				back := lost[:kind.back]
				for _, old := range back {
					old.start()
				}
				time.Sleep(time.Minute)
				others := 20
				for _, old := range back {
					_, err := simQueue(old).Produce(ctx, codeq.Task{Queue: "a"})
					if 2*kind.back > kind.nodes {
						others++
						require.NoError(t, err)
						require.Equal(t, others, old.count(t))
						continue
					}
					why := fmt.Sprintf("node %s: peer: connect to %[1]s: peer: connection refused: this is node %[1]q (%.8s, of cluster %.8s)",
						n.name, n.id(), inspect.Of(simQueue(n)).Node().Cluster())
					require.ErrorIs(t, err, codeq.ErrNotLeader)
					require.ErrorContains(t, err, why)
					ready, cancel := context.WithTimeout(ctx, time.Minute)
					err = simQueue(old).WaitReady(ready)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.ErrorContains(t, err, why)
				}
				err := simQueue(n).AddNode(ctx, codeq.Peer{Node: back[0].name, Address: back[0].name})
				require.ErrorIs(t, err, codeq.ErrNotMember)
				require.ErrorContains(t, err, "of cluster")
				require.Equal(t, 30, n.count(t))
				n.produce(t, 10)

				for range 2 {
					c.grow(t.Logf)
				}
				c.rest()
				for _, m := range c.members() {
					require.Equal(t, 40, m.count(t))
				}
				for _, old := range back {
					old.stop()
				}
			})
		})
	}
}
