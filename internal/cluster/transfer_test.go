package cluster

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// TestGoalOfNewcomer: a node may vote that lacks little, and nothing that the log does not have. A
// node that has applied everything may vote with any log.
func TestGoalOfNewcomer(t *testing.T) {
	for _, c := range []struct {
		first, entries, applied uint64 // of the leader
		has, lacks              uint64 // the least that a newcomer must have applied, and too little
	}{
		{first: 1, entries: 3, applied: 0, has: 0},                           // nothing to be applied
		{first: 1, entries: 10, applied: 10, has: 0},                         // a new cluster
		{first: 2, entries: 4, applied: 5, has: 1, lacks: 0},                 // of a queue by itself
		{first: 11, entries: 10, applied: 20, has: 10, lacks: 9},             // a snapshot
		{first: 11, entries: 10, applied: 7, has: 7, lacks: 6},               // its end is not applied
		{first: 0, entries: 0, applied: 7, has: 7, lacks: 6},                 // without a log
		{first: 2, entries: 2000, applied: 2001, has: 2001 - 256, lacks: 99}, // four messages
	} {
		log := loneLog(t, crashfs.New())
		g := log.group
		g.log = log
		if c.entries > 0 {
			require.NoError(t, log.LogStore.StoreLogs(entriesFrom(c.first, c.entries)))
		}
		g.applied.set(Position{c.applied, 1})
		goal := g.goalToVote()
		require.NoError(t, goal.lackOf(raft.Server{}, replicaState{Applied: c.has}), "%+v", c)
		require.NoError(t, goal.lackOf(raft.Server{}, replicaState{Applied: c.applied}), "%+v", c)
		if c.lacks < c.has {
			require.ErrorContains(t, goal.lackOf(raft.Server{}, replicaState{Applied: c.lacks}), "has applied", "%+v", c)
		}
	}
}

// learner is a node as a member that does not vote.
func learner(n *Node) raft.Server {
	return raft.Server{Suffrage: raft.Nonvoter, ID: n.self.ServerID(), Address: raft.ServerAddress(n.self.Address)}
}

// TestFailedReplicaGetsNoVote: it would count in majorities, and acknowledge nothing.
func TestFailedReplicaGetsNoVote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		g := nodes[0].Group(0)
		require.NoError(t, g.checkCaughtUp(t.Context(), learner(nodes[1])))
		nodes[1].Group(0).Fail(errBroken)
		err := g.checkCaughtUp(t.Context(), learner(nodes[1]))
		require.ErrorIs(t, err, ErrBehind)
		require.ErrorContains(t, err, "node b: its replica has failed")
		for _, n := range nodes {
			_ = n.Close() // that one of them has failed is known
		}
	})
}

// TestFarNodeCatchesUp: entries that are applied while a distant node answers do not count against
// it.
func TestFarNodeCatchesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answering atomic.Bool
		var load func()
		nodes, _ := openTrioWith(t, 2, func(i int, c *Config) {
			if i == 1 {
				c.Wall = func() time.Time { // asked for each shard
					if answering.Load() {
						load()
					}
					return time.Now()
				}
			}
		})
		g := nodes[0].Group(0)
		load = func() {
			for range closeBehind + 1 {
				_ = g.Propose(g.raft.CurrentTerm(), make([]byte, EntryHeader)) // or the node is closed by now
			}
		}
		load()
		time.Sleep(time.Second) // until all have that
		before := g.Applied()
		answering.Store(true)
		require.NoError(t, g.checkCaughtUp(t.Context(), learner(nodes[1])))
		require.Greater(t, g.Applied(), before+closeBehind)
		require.NoError(t, g.isFit(t.Context(), raft.Server{ID: nodes[1].self.ServerID(), Address: raft.ServerAddress(nodes[1].self.Address)}))
		answering.Store(false)
		closeAll(t, nodes)
	})
}
