package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/test/queuetest"
)

// TestRemovalBesideDeadNode: a node that the others need for a majority is not removed, at any node
// and by any method. A dead node is removed.
func TestRemovalBesideDeadNode(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, live := c.lead()
		dead := c.third(leader, live)
		leader.produce(t, 10)
		dead.crash(100)
		for _, by := range []*simNode{leader, live} {
			for _, removed := range []*simNode{leader, live} {
				err := simQueue(by).RemoveNode(ctx, removed.name)
				require.ErrorIs(t, err, codeq.ErrNoMajority)
				require.ErrorContains(t, err, "node "+dead.name)
				require.ErrorContains(t, err, "1 of the 2 that would be left")
			}
		}
		require.ErrorIs(t, simQueue(live).RemoveNode(ctx, ""), codeq.ErrInvalid)
		live.produce(t, 10) // no member has changed
		require.Equal(t, 20, leader.count(t))

		// With another node in its place, the others no longer need it.
		joined := c.node(true)
		c.net.Listen(joined.name).Close()
		joining := make(chan error, 1)
		go func() {
			joining <- simQueue(leader).ReplaceNode(ctx, live.name, codeq.Peer{Node: joined.name, Address: joined.name})
		}()
		time.Sleep(time.Second) // until it waits for the node
		joined.start()
		require.NoError(t, <-joining)
		joined.produce(t, 10)
		require.Equal(t, 30, leader.count(t))
		require.NoError(t, simQueue(leader).RemoveNode(ctx, dead.name))

		require.Len(t, statusOf(t, joined).Shards[0].Replicas, 2)
		live.stop()
		c.mu.Lock()
		c.nodes = []*simNode{leader, joined}
		c.mu.Unlock()
	})
}

// TestRemovalLooksAtAllShards: a node that one shard needs for its majority stays a member of all
// shards: all shards are asked before any change.
func TestRemovalLooksAtAllShards(t *testing.T) {
	t.Parallel()
	simNodes(t, 0, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.found(3)
		by, needed, broken := c.nodes[0], c.nodes[1], c.nodes[2]
		needed.leaves = true
		each(c.nodes, (*simNode).start)
		c.spread()
		c.nodes[0].produce(t, 10)
		for shard := range 3 {
			require.NoError(t, simQueue(by).TransferLeadership(ctx, shard, needed.name))
		}
		inspect.Of(simQueue(broken)).Group(2).Fail(queuetest.ErrBroken)
		time.Sleep(time.Second)
		members := func() (all [][]string) {
			for shard := range 3 {
				all = append(all, membersOf(by, shard))
			}
			return all
		}
		before := members()
		refused := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, codeq.ErrNoMajority)
			require.NotErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorContains(t, err, "shard 2")
			require.ErrorContains(t, err, "node n2: its replica has failed")
			time.Sleep(time.Second)
			require.Equal(t, before, members())
		}
		refused(simQueue(by).RemoveNode(ctx, needed.name))
		// A new node at the address of the other one comes only after the removal of that one.
		refused(simQueue(by).ReplaceNode(ctx, needed.name, codeq.Peer{Node: "n9", Address: needed.name}))
		refused(needed.close())
		needed.leaves = false
		needed.start()
		require.ErrorIs(t, broken.close(), codeq.ErrFailed)
		broken.start()
	})
}

// TestReplaceAtItsAddress: a node replaces another one at the same address. The old node is removed
// first.
func TestReplaceAtItsAddress(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, old := c.lead()
		leader.produce(t, 10)
		c.drop(old)
		n := newSimNode(c, old.name, false)
		require.NoError(t, c.openWith(n, func(o *codeq.Options) { o.Cluster.Node = "n9" }))
		require.NoError(t, simQueue(leader).ReplaceNode(context.Background(), old.name, codeq.Peer{Node: "n9", Address: old.name}))
		addresses := make(map[string]string)
		for _, r := range statusOf(t, n).Shards[0].Replicas {
			require.True(t, r.Voter, r.Node)
			require.Empty(t, r.LastError, r.Node)
			addresses[r.Node] = r.Address
		}
		want := map[string]string{"n9": old.name}
		for _, m := range c.members() {
			want[m.name] = m.name
		}
		require.Equal(t, want, addresses)
		c.nodes = append(c.nodes, n)
		n.produce(t, 10)
		require.Equal(t, 20, leader.count(t))
	})
}

// TestReplacementsAtOnce: two replacements at the same time, on different nodes, run one after the
// other. The number of nodes stays the same, also if both replace the same node.
func TestReplacementsAtOnce(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{true, false} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			by := c.members()
			olds := []*simNode{by[0], by[0]}
			if !same {
				olds[1] = by[1]
			}
			by[2].produce(t, 10)
			outcomes := make([]chan error, 2)
			for i, old := range olds {
				n := c.blank()
				c.nodes = append(c.nodes, n)
				outcomes[i] = make(chan error, 1)
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					outcomes[i] <- simQueue(by[1+i]).ReplaceNode(ctx, old.name, codeq.Peer{Node: n.name, Address: n.name})
				}()
			}
			errs := []error{<-outcomes[0], <-outcomes[1]}
			if same {
				require.True(t, errors.Is(errs[0], codeq.ErrNotMember) != errors.Is(errs[1], codeq.ErrNotMember), "%v", errs)
			}
			left := membersOf(by[2], 0)
			// A removed node may leave its own change of members unfinished: a new node then has no
			// vote.
			voters := slices.DeleteFunc(slices.Clone(left), func(m string) bool { return strings.HasSuffix(m, raft.Nonvoter.String()) })
			require.Len(t, voters, 3, "%v", errs)
			for _, n := range c.members() {
				if !slices.ContainsFunc(left, func(m string) bool { return strings.HasPrefix(m, n.name+"/") }) {
					c.drop(n)
				}
			}
			require.Equal(t, 10, by[2].count(t))
		})
	}
}

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
