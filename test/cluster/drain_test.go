package cluster_test

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
)

// led returns the number of shards that each node leads, by name.
func (c *simCluster) led() map[string]int {
	led := make(map[string]int)
	for shard := range c.opts.Shards {
		if n := c.leader(shard); n != nil {
			led[n.name]++
		}
	}
	return led
}

// untilLed waits until each node leads the wanted number of shards.
func (c *simCluster) untilLed(want map[string]int) {
	c.until(fmt.Sprint("what each node leads: ", want), func() bool { return maps.Equal(want, c.led()) })
}

// looks is long enough for each node to check a few times which shards it leads.
const looks = 16 * time.Second

// drainCase runs a story on three nodes and three shards. Each node leads one shard.
func drainCase(t *testing.T, story func(t *testing.T, c *simCluster)) {
	t.Parallel()
	simCase(t, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		c.untilLed(map[string]int{"n0": 1, "n1": 1, "n2": 1})
		story(t, c)
	})
}

// TestDrain: a drained node leads nothing, also after it is opened again, or when it wins an
// election. It does all its other work. After Undrain it leads its share again.
func TestDrain(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		n := c.nodes[1]
		require.NoError(t, simQueue(n).Drain(ctx))
		require.Zero(t, c.led()["n1"])
		require.NoError(t, simQueue(n).Drain(ctx), "again")
		n.produce(t, 10)
		require.Equal(t, 10, n.count(t))
		require.ErrorIs(t, simQueue(c.nodes[0]).TransferLeadership(ctx, 0, "n1"), codeq.ErrCannotLead)
		require.ErrorContains(t, simQueue(c.nodes[0]).TransferLeadership(ctx, 0, "n1"), "it is drained")
		n.crash(0)
		n.start()
		time.Sleep(looks)
		require.Equal(t, map[string]int{"n0": 1, "n2": 2}, c.led())
		for _, sh := range statusOf(t, c.nodes[0]).Shards {
			for _, r := range sh.Replicas {
				require.Equal(t, r.Node == "n1", r.Drained)
			}
		}

		n.stand(0) // as when the others are missing for a moment
		time.Sleep(looks)
		require.Zero(t, c.led()["n1"])
		ended, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, simQueue(n).Undrain(ended), context.Canceled)
		require.NoError(t, simQueue(n).Undrain(ctx))
		c.untilLed(map[string]int{"n0": 1, "n1": 1, "n2": 1})
	})
}

// TestDrainOfLast: no other node can take the shards of a node. Its Drain says why, and the node
// hands the shards over later.
func TestDrainOfLast(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		require.NoError(t, simQueue(c.nodes[1]).Drain(ctx))
		require.NoError(t, simQueue(c.nodes[2]).Drain(ctx))
		c.untilLed(map[string]int{"n0": 3})
		err := simQueue(c.nodes[0]).Drain(ctx)
		require.ErrorIs(t, err, codeq.ErrCannotLead)
		require.ErrorContains(t, err, "node n1: it is drained")
		brief, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		err = simQueue(c.nodes[0]).Drain(brief)
		require.ErrorIs(t, err, codeq.ErrCannotLead)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		c.nodes[0].produce(t, 1)
		require.NoError(t, simQueue(c.nodes[2]).Undrain(ctx))
		c.untilLed(map[string]int{"n2": 3})
		c.nodes[2].crash(100)
		c.nodes[0].produce(t, 1)
		require.Equal(t, 2, c.nodes[1].count(t), "drained nodes lead if nobody else can")
	})
}

// TestTransferLasts: after a transfer by hand a shard stays with its node, over changes of the
// leader, until the transfer is undone.
func TestTransferLasts(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		require.NoError(t, simQueue(c.nodes[1]).TransferLeadership(ctx, 0, "n2"))
		stays := func() {
			t.Helper()
			c.untilLed(map[string]int{"n1": 1, "n2": 2})
			time.Sleep(looks)
			require.Equal(t, map[string]int{"n1": 1, "n2": 2}, c.led())
			requireNode(t, c.nodes[2], c.leader(0))
			st := statusOf(t, c.nodes[0])
			require.Equal(t, []string{"n2", "", ""}, []string{st.Shards[0].Placed, st.Shards[1].Placed, st.Shards[2].Placed})
		}
		stays()
		c.nodes[2].crash(100)
		c.newLeader(c.nodes[2])
		c.nodes[2].start()
		stays()
		each(c.nodes, func(n *simNode) { n.crash(0) })
		each(c.nodes, (*simNode).start)
		stays()
		require.NoError(t, simQueue(c.nodes[1]).TransferLeadership(ctx, 0, ""))
		c.untilLed(map[string]int{"n0": 1, "n1": 1, "n2": 1})
	})
}

// TestTransferSaysWhy: the error of a failed transfer has the cause, also when the transfer is
// repeated.
func TestTransferSaysWhy(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.nodes[2].crash(100)
		time.Sleep(10 * time.Second)
		err := simQueue(c.nodes[1]).TransferLeadership(ctx, 0, "n2")
		require.ErrorIs(t, err, codeq.ErrCannotLead)
		require.ErrorContains(t, err, "connection refused")
		require.ErrorIs(t, simQueue(c.nodes[1]).TransferLeadership(ctx, 0, "nobody"), codeq.ErrNotFound)
		c.nodes[2].start()
		c.untilLed(map[string]int{"n0": 1, "n1": 1, "n2": 1})
		time.Sleep(5 * time.Second) // Raft's messages find the node again

		// The node is cut off when the shard has stopped for the transfer.
		leader := c.leader(0)
		done := make(chan error, 1)
		go func() { done <- simQueue(c.nodes[1]).TransferLeadership(ctx, 0, "n2") }()
		for inspect.Of(simQueue(leader)).Leads(0) {
			time.Sleep(100 * time.Microsecond)
		}
		c.net.Pause("n2", true)
		err = <-done
		require.Error(t, err)
		require.ErrorContains(t, err, "node n2")
		require.ErrorContains(t, err, "deadline exceeded")
		requireNode(t, leader, c.leader(0))
		c.net.Pause("n2", false)
		c.until("the node leads as soon as it can", func() bool { return c.leader(0) == c.nodes[2] })
	})
}

// TestFailingNodeIsDistrusted: a node that has failed twice leads again only after a minute,
// although it is the home of the shard. A node that hands over when it closes leads again at once.
func TestFailingNodeIsDistrusted(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		n := c.nodes[0]
		back := func() time.Duration {
			n.start()
			begin := time.Now()
			c.until("the node leads again", func() bool { return c.leader(0) == n })
			return time.Since(begin)
		}
		c.until("the node leads", func() bool { return c.leader(0) == n })
		n.stop()
		require.Less(t, back(), 20*time.Second)
		var longest time.Duration
		for range 3 { // two nodes have taken over, and each has its own count
			n.crash(100)
			c.newLeader(n)
			took := back()
			longest = max(longest, took)
			if longest > time.Minute {
				break
			}
			require.Less(t, took, 20*time.Second)
			time.Sleep(10 * time.Second)
		}
		require.Greater(t, longest, 50*time.Second)
		require.Less(t, longest, 80*time.Second)
	})
}

// TestDrainAfterClose: Close overtakes a call of Drain. The call does not write the manifest, which
// may belong to the node's next life by then.
func TestDrainAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := firstNode(t, 1, codeq.Options{Shards: 1})
		c.begin(n)
		q := simQueue(n)
		n.stop()
		before, err := manifest.Read(n.machine.Disk(), "queue")
		require.NoError(t, err)
		require.ErrorIs(t, inspect.Of(q).Node().Drain(t.Context()), codeq.ErrClosed)
		after, err := manifest.Read(n.machine.Disk(), "queue")
		require.NoError(t, err)
		require.Equal(t, before, after)
		c.nodes = nil
		c.close()
	})
}
