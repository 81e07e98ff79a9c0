package cluster_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// failedReplicaCase runs a story on three nodes that lead a shard each. At its end it closes the
// node with the failed replica.
func failedReplicaCase(t *testing.T, story func(t *testing.T, c *simCluster) (failed *simNode)) {
	simCase(t, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		c.spread()
		require.ErrorIs(t, story(t, c).close(), codeq.ErrFailed)
	})
}

// produceTo makes the leader of a shard produce a task there.
func produceTo(t *testing.T, c *simCluster, shard int, task codeq.Task) codeq.ID {
	q := simQueue(c.leader(shard))
	for range 100 {
		if id := queuetest.Produce(t, q, task)[0]; shardOf(q, id) == shard {
			return id
		}
	}
	t.Fatalf("no task comes into shard %d", shard)
	return codeq.ID{}
}

// TestFailedReplicaIsNotToLead: the replica of a shard fails on the shard's home. The shard stays
// with another node, and works there without a pause, however long that lasts.
func TestFailedReplicaIsNotToLead(t *testing.T) {
	t.Parallel()
	failedReplicaCase(t, func(t *testing.T, c *simCluster) *simNode {
		home := c.nodes[0]
		inspect.Of(simQueue(home)).Group(0).Fail(errors.New("a test's"))
		c.newLeader(home)
		time.Sleep(10 * time.Second)
		led := c.leader(0)
		for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
			begun := time.Now()
			queuetest.Produce(t, simQueue(led), codeq.Task{Queue: "a", LimitKey: queuetest.KeyOf("a", 0, 3)})
			require.Less(t, time.Since(begun), 100*time.Millisecond)
			requireNode(t, led, c.leader(0))
		}
		require.ErrorContains(t, simQueue(led).TransferLeadership(t.Context(), 0, home.name), "cannot lead now")
		return home
	})
}

// TestBatchToFailedReplica: a shard has messages for another shard, and the replica of the other
// shard on the same node has failed. The shard does not retry in a busy loop, and its next leader
// sends the messages.
func TestBatchToFailedReplica(t *testing.T) {
	t.Parallel()
	failedReplicaCase(t, func(t *testing.T, c *simCluster) *simNode {
		sender, other := c.nodes[1], simQueue(c.nodes[2])
		parent := produceTo(t, c, 1, codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})
		child := produceTo(t, c, 0, codeq.Task{Queue: "a", After: []codeq.ID{parent}})
		require.Equal(t, codeq.Blocked, queuetest.InfoOf(t, other, child).State)
		term := termOf(sender, 1)
		inspect.Of(simQueue(sender)).Group(0).Fail(errors.New("a test's"))
		time.Sleep(time.Second)
		before := inspect.Of(simQueue(sender)).Commits()
		require.NoError(t, other.Cancel(t.Context(), parent))
		time.Sleep(time.Minute)
		require.True(t, inspect.Of(simQueue(sender)).Leads(1))
		require.Equal(t, term, termOf(sender, 1))
		require.Less(t, inspect.Of(simQueue(sender)).Commits()-before, uint64(100))
		require.Equal(t, codeq.Blocked, queuetest.InfoOf(t, other, child).State)
		require.ErrorIs(t, sender.close(), codeq.ErrFailed)
		time.Sleep(10 * time.Second)
		_, err := other.Get(t.Context(), child)
		require.ErrorIs(t, err, codeq.ErrNotFound, "it is canceled with its parent")
		sender.start()
		inspect.Of(simQueue(sender)).Group(0).Fail(errors.New("a test's"))
		return sender
	})
}
