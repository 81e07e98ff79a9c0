package cluster_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// In these tests, two processes have copies of one node's directory: see
// internal/cluster/copies.go.

// simClone is a process with a copy of a node's directory, at its own address. It runs at the same
// time as the node.
type simClone struct {
	*simNode
	of *simNode
}

// clone copies the directory of a node to another machine.
func (n *simNode) clone(image simImage, address string) *simClone {
	k := &simClone{newSimNode(n.cluster, address, false), n}
	k.machine.Put(image.disk, image.votes)
	return k
}

// start opens the copy.
func (k *simClone) start() {
	require.NoError(k.cluster.t, k.cluster.openWith(k.simNode, func(o *codeq.Options) {
		o.Cluster.Node, o.Cluster.Peers = k.of.name, nil
		for _, m := range k.cluster.members() {
			if m != k.of {
				o.Cluster.Peers = append(o.Cluster.Peers, codeq.Peer{Node: m.name, Address: m.name})
			}
		}
	}))
}

// requireRefused waits until the process is refused because another one runs at the address living,
// and closes it.
func (k *simClone) requireRefused(t *testing.T, living string) {
	t.Helper()
	time.Sleep(20 * time.Second)
	requireRefused(t, k.q, living)
}

func requireRefused(t *testing.T, q *codeq.Queue, living string) {
	t.Helper()
	_, err := q.Produce(context.Background(), codeq.Task{Queue: "a"})
	require.ErrorIs(t, err, codeq.ErrFailed)
	require.ErrorIs(t, err, codeq.ErrOldCopy)
	require.ErrorContains(t, err, "at "+living)
	require.ErrorIs(t, q.Close(), codeq.ErrOldCopy)
}

// staleImage copies the directory of a node, and opens the node again.
func (c *simCluster) staleImage(n *simNode) simImage {
	n.stop()
	image := n.image()
	n.start()
	c.awaitSeenAfter(n, image.life)
	return image
}

// TestCloneBesideItsNode: a process has a copy of the directory of a working node. It is refused at
// each start and at any address, whether the copy is fresh or stale, and whether the node leads or
// follows. The node stays a member. When the node is gone, the copy comes back without help.
func TestCloneBesideItsNode(t *testing.T) {
	t.Parallel()
	for what, image := range map[string]func(c *simCluster, n *simNode) simImage{
		"fresh": func(_ *simCluster, n *simNode) simImage { return n.image() },
		"stale": (*simCluster).staleImage,
	} {
		for _, elsewhere := range []bool{true, false} {
			for _, leads := range []bool{true, false} {
				name := map[bool]string{true: ", of a leader", false: ", of a follower"}[leads]
				t.Run(what+map[bool]string{true: ", elsewhere", false: ", at its address"}[elsewhere]+name, func(t *testing.T) {
					t.Parallel()
					simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
						leader, n := c.lead()
						if leads {
							n = leader
						}
						n.produce(t, 10)
						i := image(c, n)
						if leads {
							require.NoError(t, simQueue(n).TransferLeadership(t.Context(), 0, n.name))
						}
						c.awaitLeaders()
						id, before := n.id(), membersOf(n, 0)
						address := n.name
						if elsewhere {
							address = "elsewhere"
						}
						k := n.clone(i, address)
						for range 3 {
							k.start()
							time.Sleep(5 * time.Second)
							n.produce(t, 10)
							k.requireRefused(t, n.name)
							n.produce(t, 10)
							require.Equal(t, before, membersOf(n, 0))
							require.Equal(t, id, n.id())
						}
						require.Equal(t, 70, n.count(t))
						st := statusOf(t, leader)
						for _, r := range st.Shards[0].Replicas {
							require.False(t, r.Suspect, r.Node)
						}
						n.stop()
						n.putBack(simImage{disk: k.machine.Disk(), votes: k.machine.Votes()})
						n.start()
						require.NotEqual(t, id, n.id())
						c.awaitVotes()
						require.Equal(t, 70, n.count(t))
					})
				})
			}
		}
	}
}

// TestCloneOfSilentNode: a process has a copy of the directory of a node that answers no call.
// After some ElectionTimeouts the process takes the place of the node, like a restart of it. The
// node is refused when it answers again, and when it is opened again.
func TestCloneOfSilentNode(t *testing.T) {
	testbase.SkipUnderRace(t) // Raft reads a changing member address without its lock
	t.Parallel()
	for what, silence := range map[string]func(c *simCluster, n *simNode){
		"paused":      func(c *simCluster, n *simNode) { c.net.Pause(n.name, true) },
		"partitioned": func(c *simCluster, n *simNode) { c.net.Isolate(n.name, append(c.names(), "elsewhere")) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				n, other := c.lead()
				n.produce(t, 10)
				k := n.clone(n.image(), "elsewhere")
				silence(c, n)
				c.newLeader(n)
				k.start()
				require.NoError(t, simQueue(other).AddNode(t.Context(), codeq.Peer{Node: n.name, Address: "elsewhere"}))
				queuetest.Produce(t, k.q, codeq.Task{Queue: "a"})
				c.net.Pause(n.name, false)
				c.net.Heal(true)
				n.requireOldCopy(t)
				n.start()
				time.Sleep(20 * time.Second)
				requireRefused(t, simQueue(n), "elsewhere")
				n.mu.Lock()
				n.q = nil
				n.mu.Unlock()
				require.Equal(t, 11, other.count(t))
				require.NoError(t, k.q.Close())
				n.putBack(simImage{disk: k.machine.Disk(), votes: k.machine.Votes()})
				n.start()
				require.NoError(t, simQueue(other).AddNode(t.Context(), codeq.Peer{Node: n.name, Address: n.name}))
			})
		})
	}
}

// TestCloneThatEndsInTime: a process has a copy of the directory of a node that answers no call. If
// the process is killed before its admission, the node keeps its place.
func TestCloneThatEndsInTime(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		_, n := c.lead()
		n.produce(t, 10)
		k := n.clone(n.image(), "elsewhere")
		c.net.Pause(n.name, true)
		k.start()
		begun := inspect.Of(k.q).Directory().Incarnation
		time.Sleep(500 * time.Millisecond)
		c.net.Kill(k.name)
		require.NoError(t, k.q.Close())
		time.Sleep(20 * time.Second)
		for _, m := range c.members() {
			require.Less(t, m.queueDirectory().Seen[n.id()], begun, m.name)
		}
		c.net.Pause(n.name, false)
		c.awaitVotes()
		n.produce(t, 10)
		require.Equal(t, 20, n.count(t))
	})
}

// TestCloneIsToldOf: a member was cut off while a copy took the place of its node. It learns this
// from the others before it can accept the old node again.
func TestCloneIsToldOf(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, n := c.lead()
		away := c.members()[slices.IndexFunc(c.members(), func(m *simNode) bool { return m != leader && m != n })]
		n.produce(t, 10)
		k := n.clone(n.image(), "elsewhere")
		away.crash(100)
		c.net.Isolate(n.name, append(c.names(), "elsewhere"))
		k.start()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, k.q.WaitReady(ctx))
		queuetest.Produce(t, k.q, codeq.Task{Queue: "a"})
		c.net.Heal(true)
		c.net.Isolate(n.name, []string{leader.name, "elsewhere"})
		away.start()
		time.Sleep(20 * time.Second) // it asks at intervals
		n.requireOldCopy(t)
		require.Equal(t, 11, away.count(t))
		require.NoError(t, k.q.Close())
		n.putBack(simImage{disk: k.machine.Disk(), votes: k.machine.Votes()})
		c.net.Heal(true)
		n.start()
	})
}

// TestRestartIsDelayedLittle: a restarted node is admitted after silentElections times
// ElectionTimeout if no earlier process answers.
func TestRestartIsDelayedLittle(t *testing.T) {
	for _, percent := range []int{100, 0} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			_, n := c.lead()
			time.Sleep(time.Minute)
			n.crash(percent)
			n.start()
			begin := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			require.NoError(t, simQueue(n).WaitReady(ctx))
			require.Less(t, time.Since(begin), 3*time.Second)
		})
	}
}
