package cluster_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
)

// openAs opens the directory of a machine as a node with a name, at an address. In c the node has
// the address as its name.
func (c *simCluster) openAs(m *simtest.Machine, name, address string, with func(*codeq.Cluster)) *simNode {
	n := &simNode{cluster: c, name: address, machine: m}
	require.NoError(c.t, c.openWith(n, func(o *codeq.Options) {
		o.Cluster.Node = name
		with(o.Cluster)
	}))
	return n
}

// requireRemoved makes sure that each call of a removed node says so at once.
func requireRemoved(t *testing.T, q *codeq.Queue, name string) {
	t.Helper()
	var m codeq.Mux
	codeq.Handle(&m, "a", func(context.Context, *codeq.Job[int]) error { return nil })
	ctx, begun := context.Background(), time.Now()
	for call, do := range map[string]func() error{
		"Produce":   func() error { _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); return err },
		"Get":       func() error { _, err := q.Get(ctx, codeq.ID{7: 1}); return err },
		"Stats":     func() error { _, err := q.Stats(ctx); return err },
		"Await":     func() error { _, err := q.Await(ctx, codeq.ID{7: 1}); return err },
		"WaitIdle":  func() error { return q.WaitIdle(ctx, "a") },
		"Configure": func() error { return q.Configure(ctx, "a", func(*codeq.Settings) {}) },
		"Claim NoWait": func() error {
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
			return err
		},
		"Claim":         func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err },
		"Run":           func() error { return q.Run(ctx, &m, nil) },
		"WaitReady":     func() error { return q.WaitReady(ctx) },
		"ClusterStatus": func() error { _, err := q.ClusterStatus(ctx); return err },
		"Drain":         func() error { return q.Drain(ctx) },
		"Undrain":       func() error { return q.Undrain(ctx) },
		"RemoveNode":    func() error { return q.RemoveNode(ctx, name) },
		"AddNode":       func() error { return q.AddNode(ctx, codeq.Peer{Node: name, Address: name}) },
		"ReplaceNode":   func() error { return q.ReplaceNode(ctx, "n1", codeq.Peer{Node: name, Address: name}) },
		"Transfer":      func() error { return q.TransferLeadership(ctx, 0, name) },
	} {
		ended := make(chan error, 1)
		go func() { ended <- do() }()
		select {
		case err := <-ended:
			require.ErrorIs(t, err, codeq.ErrNotLeader, call)
			require.ErrorContains(t, err, fmt.Sprintf("node %q was removed", name), call)
		case <-time.After(time.Minute):
			require.Fail(t, "it waits", call)
		}
	}
	require.Less(t, time.Since(begun), time.Second)
}

// TestNameIsUsedAgain: a removed directory learns of its removal although another node has its name
// by now and leads a shard. This also holds for a directory that was closed meanwhile, and for one
// that has lost its power. Calls that wait at the removed node end.
func TestNameIsUsedAgain(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"open", "closed", "power lost"} {
		t.Run(end, func(t *testing.T) {
			simCase(t, codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				c.nodes[0].stop()
				c.nodes[0].leaves = end == "open"
				c.nodes[0].start()
				c.spread()
				removed, by := c.nodes[0], c.nodes[1]
				c.nodes = c.nodes[1:]
				claims, ended := 0, make(chan error, 2)
				wait := func(q *codeq.Queue) {
					claims += 2
					go func() {
						_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
						ended <- err
					}()
					go func() {
						var m codeq.Mux
						codeq.Handle(&m, "a", func(context.Context, *codeq.Job[int]) error { return nil })
						ended <- q.Run(ctx, &m, nil)
					}()
				}
				address, old := removed.name, removed
				switch end {
				case "open":
					address = "elsewhere"
					wait(simQueue(removed))
				case "closed":
					removed.stop()
				case "power lost":
					removed.crash(0)
				}
				time.Sleep(time.Second)
				require.NoError(t, simQueue(by).RemoveNode(ctx, removed.name))
				again := c.openAs(simtest.NewMachine(), removed.name, address, func(o *codeq.Cluster) {
					o.Join, o.Peers = true, []codeq.Peer{{Node: "n1", Address: "n1"}, {Node: "n2", Address: "n2"}}
				})
				c.nodes = append(c.nodes, again)
				c.until("the new node leads the first shard", func() bool { return c.leader(0) == again })
				if end != "open" {
					old = c.openAs(removed.machine, removed.name, "elsewhere", func(o *codeq.Cluster) { o.LeaveOnClose = true })
					wait(simQueue(old))
					time.Sleep(time.Second)
				}
				for range claims {
					select {
					case err := <-ended:
						require.ErrorIs(t, err, codeq.ErrNotLeader)
						require.ErrorContains(t, err, fmt.Sprintf("node %q was removed", removed.name))
					case <-time.After(time.Minute):
						require.Fail(t, "it waits")
					}
				}
				requireRemoved(t, simQueue(old), removed.name)
				begun := time.Now()
				old.stop()
				require.Less(t, time.Since(begun), time.Second)

				again.produce(t, 10)
				for _, n := range c.nodes {
					require.Equal(t, 10, n.count(t))
					require.Equal(t, []string{"n0", "n1", "n2"}, n.membersOfShards(t)[2])
				}
			})
		})
	}
}

// TestNewcomerIsNotRemoved: a node that only some shards have added yet does not count as removed.
func TestNewcomerIsNotRemoved(t *testing.T) {
	t.Parallel()
	simNodes(t, 2, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		by, joins := c.nodes[0], c.blank()
		c.nodes[1].crash(100)
		time.Sleep(time.Second)
		require.ErrorIs(t, simQueue(by).AddNode(ctx, codeq.Peer{Node: joins.name, Address: joins.name}), codeq.ErrNotLeader) // but it is part of the cluster
		require.NotEmpty(t, inspect.Of(simQueue(joins)).Node().Cluster())
		c.nodes[1].start()
		c.awaitLeaders()
		change, p := inspect.Of(simQueue(by)).Leaders().Change, cluster.Peer{Node: joins.name, Address: joins.name, ID: joins.id()}
		require.NoError(t, change(ctx, 0, cluster.AddNode, p))
		time.Sleep(time.Minute)
		q := simQueue(joins)
		require.True(t, inspect.Of(q).Group(0).HasLeader())
		require.False(t, inspect.Of(q).Group(1).IsRemoved())
		_, err := q.ClusterStatus(ctx)
		require.NoError(t, err)
		_, err = inspect.Of(q).Leaders().Applied(ctx, 1)
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		require.NotContains(t, err.Error(), "removed")

		// The first shard stops: no leader reaches the node.
		for _, n := range c.nodes {
			c.net.Pause(n.name, true)
		}
		time.Sleep(time.Minute)
		require.False(t, inspect.Of(q).Group(0).IsRemoved())
		for _, n := range c.nodes {
			c.net.Pause(n.name, false)
		}
		ready := make(chan error, 1)
		go func() { ready <- q.WaitReady(ctx) }()
		require.NoError(t, simQueue(by).AddNode(ctx, codeq.Peer{Node: joins.name, Address: joins.name}))
		require.NoError(t, <-ready)
		c.nodes = append(c.nodes, joins)
		joins.produce(t, 10)
	})
}

// TestReturningNodeIsNotRemoved: the power of a node has failed, and the others cannot take it back
// yet. It does not count as removed, although none of the others knows its new ID.
func TestReturningNodeIsNotRemoved(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		_, lost := c.lead()
		lost.crash(0)
		lost.machine.Reboot()
		away := c.openAs(lost.machine, lost.name, "elsewhere", func(o *codeq.Cluster) { o.Advertise = "nowhere" })
		time.Sleep(time.Minute)
		q := simQueue(away)
		_, err := q.ClusterStatus(ctx)
		require.NoError(t, err)
		require.NoError(t, q.Drain(ctx))
		require.NoError(t, q.Undrain(ctx))
		_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		require.NotContains(t, err.Error(), "removed")
		ready := make(chan error, 1)
		go func() { ready <- q.WaitReady(ctx) }()
		time.Sleep(time.Minute)
		require.Empty(t, ready)
		away.stop()
		require.ErrorIs(t, <-ready, codeq.ErrClosed)
		lost.start()
		c.awaitVotes()
	})
}
