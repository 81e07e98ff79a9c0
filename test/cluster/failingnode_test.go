package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// simDiskFaults are permanent faults of the disk of a node.
var simDiskFaults = []struct {
	what  string
	fails func(op, name string) bool
	vote  bool // only an election shows the fault
}{
	{"writes of the log of Raft", func(op, name string) bool { return op == "write" && strings.Contains(name, "/raft/") }, false},
	{"syncs of the log of Raft", func(op, name string) bool { return op == "sync" && strings.Contains(name, "/raft/") }, false},
	{"new files of the log of Raft", func(op, name string) bool {
		return (op == "create" || op == "reuse") && strings.Contains(name, "/raft/")
	}, false},
	{"reads of the log of Raft", func(op, name string) bool { return op == "read" && name == "log" }, false},
	{"votes", func(_, name string) bool { return name == "votes" }, true},
	{"new tables of the store", func(op, name string) bool {
		return op == "create" && strings.Contains(name, "shard-") && strings.HasSuffix(name, ".sst")
	}, false},
	{"syncs of the store", func(op, name string) bool { return op == "sync" && strings.Contains(name, "shard-") }, false},
	{"all that writes", func(op, _ string) bool { return op != "open" && op != "read" }, false},
}

// TestFailingDiskOfANode: the disk of a leader or of a follower fails under load. The other nodes
// go on, and no call on the node itself hangs. With a sound disk the node has all acknowledged
// tasks.
func TestFailingDiskOfANode(t *testing.T) {
	t.Parallel()
	levels, leading := []codeq.Durability{codeq.DurabilityDisk, codeq.DurabilityProcess}, []bool{false, true}
	for _, fault := range simDiskFaults {
		for _, leads := range leading {
			t.Run(fmt.Sprintf("%s, leader %t", fault.what, leads), func(t *testing.T) {
				for _, level := range levels[:testkit.Sized(1, 2)] {
					simCase(t, codeq.Options{Durability: level}, func(t *testing.T, c *simCluster) {
						testFailingDisk(t, c, leads, fault.vote, fault.fails)
					})
				}
			})
		}
	}
}

func testFailingDisk(t *testing.T, c *simCluster, leads, vote bool, fails func(op, name string) bool) {
	leader, other := c.lead()
	victim, sound := other, leader
	if leads {
		victim, sound = leader, other
	}
	acknowledged := make(map[codeq.ID]bool)
	produce := func(by *simNode) error {
		ctx, cancel := context.WithTimeout(context.Background(), simPatience)
		defer cancel()
		id, err := simQueue(by).Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 32<<10)})
		if err == nil {
			acknowledged[id] = true
		}
		if errors.Is(err, context.DeadlineExceeded) {
			c.hangs("produce on " + by.name)
		}
		return err
	}
	for range 10 {
		require.NoError(t, produce(sound))
		require.NoError(t, produce(victim))
	}
	victim.breakDisk(fails)
	if vote {
		for _, n := range c.members() {
			if n != leader && n != victim {
				require.NoError(t, simQueue(sound).TransferLeadership(t.Context(), 0, n.name))
			}
		}
	}
	leaderless := 0
	for range 30 { // several memtables
		switch err := produce(sound); {
		case errors.Is(err, codeq.ErrNotLeader): // split votes made an election too long
			leaderless++
		case err != nil: // the leader has failed during the call
			require.ErrorIs(t, err, codeq.ErrUncertain)
		}
		_ = produce(victim)
		time.Sleep(100 * time.Millisecond)
	}
	require.LessOrEqual(t, leaderless, 1)
	require.NoError(t, produce(sound), "the others have found a leader")
	require.Greater(t, len(acknowledged), 40)
	err := victim.close()
	require.ErrorIs(t, err, codeq.ErrFailed)
	require.ErrorIs(t, err, queuetest.ErrBroken)
	require.NoError(t, produce(sound))
	victim.start()
	c.rest()
	require.NoError(t, c.check())
	tasks, err := c.tasks()
	require.NoError(t, err)
	for id := range acknowledged {
		require.Contains(t, tasks, id)
	}
}

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
