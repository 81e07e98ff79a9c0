package codeq

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// failedReplicaCase runs a story on three nodes that lead a shard each. Its end closes the node
// whose replica has failed.
func failedReplicaCase(t *testing.T, story func(t *testing.T, c *simCluster) (failed *simNode)) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, Options{Shards: 3})
		c.spread()
		failed := story(t, c)
		require.ErrorIs(t, failed.close(), ErrFailed)
		failed.start()
		c.rest()
		require.NoError(t, c.check())
		c.close()
	})
}

// produceTo lets the leader of a shard produce a task there.
func produceTo(t *testing.T, c *simCluster, shard int, task Task) ID {
	q := simQueue(c.leader(shard))
	for range 100 {
		if id := produce(t, q, task)[0]; q.shardOf(id) == shard {
			return id
		}
	}
	t.Fatalf("no task comes into shard %d", shard)
	return ID{}
}

// TestFailedReplicaIsNotToLead: a shard whose home is a node whose replica of it has failed stays
// with another node, and is served there without a pause, however long that lasts.
func TestFailedReplicaIsNotToLead(t *testing.T) {
	t.Parallel()
	failedReplicaCase(t, func(t *testing.T, c *simCluster) *simNode {
		home := c.nodes[0]
		simQueue(home).replicas[0].group.Fail(errors.New("a test's"))
		c.newLeader(home)
		time.Sleep(10 * time.Second)
		led := c.leader(0)
		for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
			begun := time.Now()
			produce(t, simQueue(led), Task{Queue: "a", LimitKey: keyOf("a", 0, 3)})
			require.Less(t, time.Since(begun), 100*time.Millisecond)
			requireNode(t, led, c.leader(0))
		}
		require.ErrorContains(t, simQueue(led).TransferLeadership(t.Context(), 0, home.name), "cannot lead now")
		return home
	})
}

// TestBatchToFailedReplica: a shard has messages for one whose replica on the same node has failed.
// It does not try to send them without a pause, and the shard's next leader sends them.
func TestBatchToFailedReplica(t *testing.T) {
	t.Parallel()
	failedReplicaCase(t, func(t *testing.T, c *simCluster) *simNode {
		sender, other := c.nodes[1], simQueue(c.nodes[2])
		parent := produceTo(t, c, 1, Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})
		child := produceTo(t, c, 0, Task{Queue: "a", After: []ID{parent}})
		require.Equal(t, Blocked, infoOf(t, other, child).State)
		s := simQueue(sender).shard(1)
		simQueue(sender).replicas[0].group.Fail(errors.New("a test's"))
		time.Sleep(time.Second)
		before := s.commits.Load()
		require.NoError(t, other.Cancel(t.Context(), parent))
		time.Sleep(time.Minute)
		require.Same(t, s, simQueue(sender).shard(1))
		require.Less(t, s.commits.Load()-before, uint64(100))
		require.Equal(t, Blocked, infoOf(t, other, child).State)
		require.ErrorIs(t, sender.close(), ErrFailed)
		time.Sleep(10 * time.Second)
		_, err := other.Get(t.Context(), child)
		require.ErrorIs(t, err, ErrNotFound, "it is canceled with its parent")
		sender.start()
		simQueue(sender).replicas[0].group.Fail(errors.New("a test's"))
		return sender
	})
}
