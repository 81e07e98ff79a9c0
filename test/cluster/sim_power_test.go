package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

// These tests cut the power of nodes below DurabilityDisk: see manifest.Volatile.

// id returns the ID of the directory of a node that is up.
func (n *simNode) id() string { return inspect.Of(simQueue(n)).Node().Self().ID }

// membersOf returns the members of a shard that one node knows, each with the ID of its directory
// and its suffrage.
func membersOf(n *simNode, shard int) (members []string) {
	for _, m := range inspect.Of(simQueue(n)).Group(shard).Raft().GetConfiguration().Configuration().Servers {
		members = append(members, fmt.Sprint(m.ID, " ", m.Suffrage))
	}
	slices.Sort(members)
	return members
}

// awaitVotes waits until the members of every shard are exactly the nodes, all with a vote and
// their present IDs.
func (c *simCluster) awaitVotes() {
	var want []string
	for _, n := range c.members() {
		want = append(want, fmt.Sprint(n.name, "/", n.id(), " Voter"))
	}
	slices.Sort(want)
	c.until(fmt.Sprint("members of all shards: ", want), func() bool {
		for shard := range c.opts.Shards {
			for _, n := range c.members() {
				if !slices.Equal(membersOf(n, shard), want) {
					return false
				}
			}
		}
		return true
	})
}

// TestPowerLossOfOneNode: a node loses the end of its log in a power loss. It neither votes nor
// acknowledges anything that contradicts the lost entries. It comes back without help under a new
// ID, and then votes again.
func TestPowerLossOfOneNode(t *testing.T) {
	t.Parallel()
	for _, leads := range []bool{false, true} {
		t.Run(fmt.Sprint("leader ", leads), func(t *testing.T) {
			simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
				leader, behind := c.lead()
				victim := c.third(leader, behind)
				c.net.Isolate(behind.name, c.names())
				leader.produce(t, 50)
				left := leader
				if leads {
					victim, left = leader, victim
				}
				former := victim.id()
				victim.crash(0)
				left.crash(100)
				c.net.Heal(true)
				victim.start()
				require.NotEqual(t, former, victim.id())
				for _, n := range []*simNode{victim, behind} {
					_, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"})
					require.ErrorIs(t, err, codeq.ErrNotLeader)
					require.NotErrorIs(t, err, codeq.ErrPowerLost, "one of three")
				}
				left.start()
				c.awaitVotes()
				require.Equal(t, 50, victim.count(t))
				behind.produce(t, 10)

				c.leader(0).crash(100)
				for _, n := range c.members() {
					if simQueue(n) != nil {
						n.produce(t, 10)
						require.GreaterOrEqual(t, n.count(t), 70)
					}
				}
				c.mend(true)
				require.Equal(t, 80, victim.count(t))
				id := victim.id()
				victim.stop()
				victim.start()
				require.Equal(t, id, victim.id())
				require.Empty(t, inspect.Of(simQueue(victim)).Directory().Former)
			})
		})
	}
}

// TestReturnGoesOn: a leader readmits a node, and ends when the node has its new ID but not its
// address yet. The next leader completes that, although the node lost the list of its peers in the
// power loss.
func TestReturnGoesOn(t *testing.T) {
	t.Parallel()
	simNodes(t, 1, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		victim := c.members()[0]
		time.Sleep(time.Minute) // it has stored the boot of its machine
		image := victim.image()
		for range 3 {
			c.grow(func(string, ...any) {})
		}
		victim.produce(t, 10)
		former := victim.id()
		c.net.Isolate(victim.name, c.names())
		leader := c.newLeader(victim)
		victim.crash(0)
		victim.putBack(image) // only this was synced
		victim.start()
		require.Len(t, membersOf(victim, 0), 1, "it knows nobody")
		self, group := cluster.Peer{Node: victim.name, Address: victim.name, ID: victim.id()}, inspect.Of(simQueue(leader)).Group(0).Raft()
		require.NoError(t, group.AddNonvoter(self.ServerID(), cluster.Alias(self), 0, 0).Error())
		require.NoError(t, group.RemoveServer(cluster.Peer{Node: victim.name, ID: former}.ServerID(), 0, 0).Error())
		c.net.Heal(true)
		c.awaitVotes()
		require.Equal(t, 10, victim.count(t))
	})
}

// TestManyPowerLosses: a node loses power many times before a leader readmits it. It has one former
// ID, and keeps its new one.
func TestManyPowerLosses(t *testing.T) {
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityNone} {
		simCase(t, codeq.Options{Durability: level}, func(t *testing.T, c *simCluster) {
			leader, victim := c.lead()
			leader.produce(t, 50)
			former := victim.id()
			c.net.Isolate(victim.name, c.names())
			victim.crash(0)
			victim.start()
			id := victim.id()
			require.NotEqual(t, former, id)
			for i := range 10 {
				if i == 7 { // it loses power while a leader readmits it
					c.net.Heal(true)
				}
				time.Sleep(time.Duration(c.rng.Int64N(int64(time.Second))))
				if len(victim.queueDirectory().Former) == 0 {
					break
				}
				victim.crash(0)
				victim.start()
				require.Equal(t, id, victim.id())
				require.Equal(t, []string{former}, victim.queueDirectory().Former)
				leader.produce(t, 5)
			}
			c.net.Heal(true)
			c.awaitVotes()
		})
	}
}

// queueDirectory returns the manifest of the node.
func (n *simNode) queueDirectory() *manifest.Manifest {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, err := manifest.Read(n.machine.Disk(), "queue")
	if err != nil {
		panic(err)
	}
	return m
}

// TestPowerLossIsNone: three events lose nothing, and no node asks to be readmitted: a process is
// killed, a machine boots after its node was closed, and power fails with DurabilityDisk.
func TestPowerLossIsNone(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		what  string
		level codeq.Durability
		end   func(n *simNode)
	}{
		{"kill -9", codeq.DurabilityProcess, func(n *simNode) { n.crash(100) }},
		{"closed", codeq.DurabilityProcess, func(n *simNode) { n.stop(); n.machine.Reboot() }},
		{"closed, nothing synced", codeq.DurabilityNone, func(n *simNode) { n.stop(); n.machine.Reboot() }},
		{"on disk", codeq.DurabilityDisk, func(n *simNode) { n.crash(0) }},
	} {
		t.Run(tc.what, func(t *testing.T) {
			simCase(t, codeq.Options{Durability: tc.level}, func(t *testing.T, c *simCluster) {
				ids := make(map[*simNode]string)
				for _, n := range c.members() {
					n.produce(t, 10)
					ids[n] = n.id()
				}
				for _, n := range c.members() {
					tc.end(n)
				}
				for _, n := range c.members() {
					n.start()
					require.Equal(t, ids[n], n.id())
				}
				begin := time.Now()
				c.awaitLeaders()
				require.Less(t, time.Since(begin), 5*time.Second)
				require.Equal(t, 30, c.members()[0].count(t))
			})
		})
	}
}

// TestPowerLossOfTwoNodes: when two of three nodes have lost power, the cluster acknowledges
// nothing more, and all nodes tell the operator the remedy.
func TestPowerLossOfTwoNodes(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		c.awaitReady()
		sound := c.members()[0]
		sound.produce(t, 20)
		each(c.members()[1:], func(n *simNode) { n.crash(0) })
		each(c.members()[1:], (*simNode).start)
		time.Sleep(10 * time.Second)
		for _, n := range c.members() {
			_, err := simQueue(n).Produce(t.Context(), codeq.Task{Queue: "a"})
			require.ErrorIs(t, err, codeq.ErrPowerLost)
			require.ErrorIs(t, err, codeq.ErrNotLeader)
			require.ErrorContains(t, err, "RecoverCluster")
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			err = simQueue(n).WaitReady(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, codeq.ErrPowerLost)
			for _, r := range statusOf(t, n).Shards[0].Replicas {
				require.Equal(t, r.Node != sound.name, r.Suspect)
				require.Empty(t, r.LastError, "which is the furthest can be seen")
				require.Equal(t, r.Node == sound.name, r.Applied > 0)
			}
		}
		time.Sleep(time.Minute)
		for shard := range 2 {
			require.Nil(t, c.leader(shard))
		}
		each(c.members(), (*simNode).stop)
		c.goOn(t, sound, 20)
	})
}

// TestPowerLossAmidReturn: nodes crash at any moment while a leader readmits one of them. That node
// comes back, and nothing is lost.
func TestPowerLossAmidReturn(t *testing.T) {
	t.Parallel()
	for i := range uint64(testkit.Sized(4, 200)) {
		opts := *inspect.With(&codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess}, inspect.Private{MaxAppend: 4})
		simCaseOf(t, i, 3, opts, 0, func(t *testing.T, c *simCluster) {
			victim, tasks := c.members()[c.rng.IntN(3)], 0
			for round := range 3 {
				victim.produce(t, 10)
				tasks += 10
				victim.crash(0)
				victim.start()
				for range 1 + c.rng.IntN(3) {
					n := c.members()[c.rng.IntN(3)]
					percent := 100
					if n == victim {
						percent = 100 * c.rng.IntN(2)
					}
					n.crashAfter(1+c.rng.Int64N(40), percent)
					time.Sleep(time.Duration(c.rng.Int64N(int64(2 * time.Second))))
					for _, n := range c.members() {
						n.raise()
					}
				}
				c.mend(true)
				c.awaitVotes()
				c.awaitLeaders()
				require.Equal(t, tasks, victim.count(t), "seed %d, round %d", i, round)
			}
		})
	}
}

// TestPowerLossOfFounder: the founding node loses power before the others know the first members of
// each shard. The cluster begins nevertheless.
func TestPowerLossOfFounder(t *testing.T) {
	t.Parallel()
	for i := range uint64(testkit.Sized(6, 200)) {
		simCaseOf(t, i, 0, codeq.Options{Shards: 3, Durability: codeq.DurabilityProcess}, 0, func(t *testing.T, c *simCluster) {
			c.found(3)
			for _, n := range slices.Backward(c.nodes) {
				n.start()
			}
			founder := c.nodes[0]
			time.Sleep(time.Duration(c.rng.Int64N(int64(300 * time.Millisecond))))
			founder.crashAfter(1+c.rng.Int64N(20), 0)
			time.Sleep(time.Duration(c.rng.Int64N(int64(time.Second))))
			founder.crash(0)
			c.mend(true)
			c.awaitLeaders()
			c.awaitVotes()
			founder.produce(t, 1)
		})
	}
}

// TestPowerLossAmongStrangers: a node comes back although it knows none of the members: all others
// were replaced while it was down.
func TestPowerLossAmongStrangers(t *testing.T) {
	simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		_, n := c.lead()
		n.produce(t, 10)
		n.crash(0)
		for _, old := range c.members() {
			if old != n {
				c.replace(old, func(string, ...any) {}, nil)
			}
		}
		n.start()
		c.awaitVotes()
		require.Equal(t, 10, n.count(t))
	})
}

// TestPowerLossOfRemovedNode: a node was removed while it was down. It is not readmitted, even if
// its readmission was half done before.
func TestPowerLossOfRemovedNode(t *testing.T) {
	t.Parallel()
	for _, halfway := range []bool{false, true} {
		t.Run(fmt.Sprint("halfway ", halfway), func(t *testing.T) {
			simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
				leader, removed := c.lead()
				leader.produce(t, 10)
				removed.crash(0)
				if halfway {
					id := manifest.NewID()
					r := inspect.Of(simQueue(leader)).Group(0).Raft()
					require.NoError(t, r.AddNonvoter(raft.ServerID(removed.name+"/"+id), raft.ServerAddress(id), 0, 0).Error())
					require.Len(t, membersOf(leader, 0), 4)
				}
				require.NoError(t, simQueue(leader).RemoveNode(t.Context(), removed.name))
				removed.start()
				time.Sleep(time.Minute)
				require.Len(t, membersOf(leader, 0), 2)
				_, err := simQueue(removed).Produce(t.Context(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrNotLeader)
				require.ErrorContains(t, err, "removed")
				c.drop(removed)
			})
		})
	}
}

// TestPowerLossAmidRemoval: a node that loses power during its removal is not readmitted: the other
// shards follow the decision of the first one.
func TestPowerLossAmidRemoval(t *testing.T) {
	simCase(t, codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		leader, removed := c.lead()
		leader.produce(t, 10)
		removed.crash(0)
		change := inspect.Of(simQueue(leader)).Leaders().Change
		require.NoError(t, change(t.Context(), 0, cluster.RemoveNode, cluster.Peer{Node: removed.name}))
		removed.start()
		time.Sleep(time.Minute)
		for shard := range 2 { // its request to be readmitted has finished its removal
			require.Len(t, membersOf(leader, shard), 2)
		}
		require.ErrorIs(t, simQueue(leader).RemoveNode(t.Context(), removed.name), codeq.ErrNotMember)
		c.drop(removed)
	})
}

// TestUnsyncedNodeIsKilled: with DurabilityNone, a kill may cost a node acknowledged tasks,
// although its machine stays up.
func TestUnsyncedNodeIsKilled(t *testing.T) {
	simCase(t, codeq.Options{Durability: codeq.DurabilityNone}, func(t *testing.T, c *simCluster) {
		_, killed := c.lead()
		killed.produce(t, 10)
		former := killed.id()
		killed.crash(100)
		killed.start()
		require.NotEqual(t, former, killed.id())
		c.awaitVotes()
		require.Equal(t, 10, killed.count(t))
		m, err := manifest.Read(killed.machine.Disk(), "queue")
		require.NoError(t, err)
		require.Equal(t, killed.id(), m.ID)
	})
}

// simPower is drawn in schedules in which a power loss costs a node acknowledged changes. While a
// leader readmits a node, only that node may lose power.
var simPower = simFault{"power", 6, func(s *schedule) bool {
	percent := []int{0, 0, 50}[s.rng.IntN(3)]
	n := s.someNode()
	if s.moving.CompareAndSwap(false, true) {
		s.dark = n
		s.done.Go(func() {
			defer s.moving.Store(false)
			s.awaitReturn(n)
		})
	} else if n = s.dark; n == nil || n.isBack() {
		return false
	}
	s.note("power of %s fails, %d%% of what is not synced stays", n.name, percent)
	return n.crash(percent)
}}

// isBack reports whether the node is up, and was readmitted after its power loss.
func (n *simNode) isBack() bool {
	n.mu.Lock()
	up, disk := n.q != nil && n.machine.Boot() == n.booted, n.machine.Disk()
	n.mu.Unlock()
	m, err := manifest.Read(disk, "queue")
	return up && err == nil && len(m.Former) == 0
}

// awaitReturn waits until a node is back from a power loss that is about to come.
func (s *schedule) awaitReturn(n *simNode) {
	time.Sleep(time.Second)
	var over time.Time
	for ; !n.isBack(); time.Sleep(500 * time.Millisecond) {
		if over.IsZero() && s.over.Load() {
			over = time.Now()
		} else if !over.IsZero() && time.Since(over) > 2*simPatience {
			s.hangs("the return of " + n.name)
		}
	}
	s.note("%s is back", n.name)
}

// loseMajority cuts the power of a majority of the nodes; no node acknowledges anything after that.
// It closes all nodes, and returns the furthest one.
func (s *schedule) loseMajority() *simNode {
	nodes := s.members()
	half := len(nodes) / 2
	lost := half + 1 + s.rng.IntN(len(nodes)-half)
	s.note("power of %d nodes fails", lost)
	s.happened("power of a majority")
	for i, at := range s.rng.Perm(len(nodes)) {
		percent := 100
		if i < lost {
			percent = 50 * s.rng.IntN(2)
		}
		nodes[at].crash(percent)
	}
	each(nodes, (*simNode).start)
	time.Sleep(20 * time.Second)
	for _, n := range nodes {
		if _, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"}); !errors.Is(err, codeq.ErrNotLeader) { // or ErrPowerLost
			s.t.Errorf("produce on %s after %d of %d nodes have lost power: %v", n.name, lost, len(nodes), err)
		}
	}
	n := s.furthest(nodes...)
	each(nodes, (*simNode).stop)
	return n
}
