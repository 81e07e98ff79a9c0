package codeq

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRemovalBesideDeadNode: a node that the others cannot do without is not removed, whoever asks
// for it and however; one that is dead is.
func TestRemovalBesideDeadNode(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, live := c.lead()
		var dead *simNode
		for _, n := range c.members() {
			if n != leader && n != live {
				dead = n
			}
		}
		leader.produce(t, 10)
		dead.crash(100)
		for _, by := range []*simNode{leader, live} {
			for _, removed := range []*simNode{leader, live} {
				err := simQueue(by).RemoveNode(ctx, removed.name)
				require.ErrorIs(t, err, ErrNoMajority)
				require.ErrorContains(t, err, "node "+dead.name)
				require.ErrorContains(t, err, "1 of the 2 that would be left")
			}
		}
		require.ErrorIs(t, simQueue(live).RemoveNode(ctx, ""), ErrInvalid)
		live.produce(t, 10) // nothing has changed
		require.Equal(t, 20, leader.count(t))

		// With another node in its place they can do without it.
		joined := c.node(true)
		host := c.net.Listen(joined.name)
		host.Close()
		joining := make(chan error, 1)
		go func() { joining <- simQueue(leader).ReplaceNode(ctx, live.name, Peer{joined.name, joined.name}) }()
		time.Sleep(time.Second) // it waits for the node
		joined.start()
		require.NoError(t, <-joining)
		joined.produce(t, 10)
		require.Equal(t, 30, leader.count(t))
		require.NoError(t, simQueue(leader).RemoveNode(ctx, dead.name))

		st, err := simQueue(joined).ClusterStatus(ctx)
		require.NoError(t, err)
		require.Len(t, st.Shards[0].Replicas, 2)
		live.stop()
		c.mu.Lock()
		c.nodes = []*simNode{leader, joined}
		c.mu.Unlock()
	})
}

// TestLeaveBesideDeadNode: a node that is closed with LeaveOnClose stays a member if the others
// cannot do without it, and Close says so.
func TestLeaveBesideDeadNode(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		leader, leaves := c.lead()
		leader.produce(t, 10)
		leaves.stop()
		leaves.leaves = true
		leaves.start()
		for _, n := range c.members() {
			if n != leader && n != leaves {
				n.crash(100)
			}
		}
		require.ErrorIs(t, leaves.close(), ErrNoMajority)
		leaves.leaves = false
		leaves.start()
		require.Equal(t, 10, leaves.count(t))
	})
}
