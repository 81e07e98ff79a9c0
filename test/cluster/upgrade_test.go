//go:build nextformat

package cluster_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// formatOf returns the format of a shard, as ClusterStatus says.
func formatOf(t *testing.T, q *codeq.Queue, shard int) int {
	t.Helper()
	st, err := q.ClusterStatus(context.Background())
	require.NoError(t, err)
	return st.Shards[shard].Format
}

// upgradeCase runs a story on a cluster of three nodes. Their build knows only oldFormat.
func upgradeCase(t *testing.T, shards int, story func(t *testing.T, c *simCluster)) {
	upgradeCaseWith(t, codeq.Options{Shards: shards}, story)
}

func upgradeCaseWith(t *testing.T, opts codeq.Options, story func(t *testing.T, c *simCluster)) {
	simCaseOf(t, 1, 3, opts, oldFormat, story)
}

// become closes a node, unless it is down, and opens it with a build that knows formats up to
// newest.
func (n *simNode) become(newest int) error {
	n.stop()
	n.newest = newest
	return n.cluster.open(n)
}

// caughtUp reports whether the nodes that are up have applied all entries of the leaders' logs.
func (c *simCluster) caughtUp() bool {
	for shard := range c.opts.Shards {
		leader := c.leader(shard)
		if leader == nil {
			return false
		}
		last := inspect.Of(simQueue(leader)).Group(shard).Raft().LastIndex()
		for _, n := range c.members() {
			if q := simQueue(n); q != nil && inspect.Of(q).Group(shard).Raft().AppliedIndex() < last {
				return false
			}
		}
	}
	return true
}

// requireFormat waits until the nodes that are up have caught up, and checks that all shards in
// their stores, and their manifests, have a format.
func (c *simCluster) requireFormat(format int) {
	c.t.Helper()
	c.until("what the leaders have", c.caughtUp)
	for _, n := range c.members() {
		q := simQueue(n)
		if q == nil {
			continue
		}
		for i := range inspect.Of(q).Shards() {
			var got []byte
			require.NoError(c.t, inspect.Of(q).Read(i, func(st *store.Store) (err error) {
				got, err = store.Lookup(st.DB(), []byte{keys.Meta})
				return err
			}))
			require.Equal(c.t, manifest.ReplicaIdentity(format, i, inspect.Of(q).Shards()), string(got), "%s", n.name)
			require.Equal(c.t, format, formatOf(c.t, q, i))
			require.False(c.t, format == oldFormat && hasNextFormat(c.t, q, i), "%s", n.name)
		}
		m, err := manifest.Read(n.machine.Disk(), "queue")
		require.NoError(c.t, err)
		require.Equal(c.t, format, m.Format, "%s", n.name)
	}
}

// hasNextFormat reports whether a replica has the key that the next format adds.
func hasNextFormat(t *testing.T, q *codeq.Queue, shard int) bool {
	t.Helper()
	b, err := store.Lookup(queuetest.StoreOf(q, shard).DB(), []byte{keys.NextFormat})
	require.NoError(t, err)
	return b != nil
}

// TestUpgrade: a cluster works during an upgrade node by node. It stays in the old format, and each
// node can go back to the old build, until all nodes know the new format. After that, no older
// build can join.
func TestUpgrade(t *testing.T) {
	upgradeCase(t, 3, func(t *testing.T, c *simCluster) {
		produced := 0
		work := func() {
			t.Helper()
			c.awaitLeaders()
			for _, n := range c.members() {
				if simQueue(n) != nil {
					n.produce(t, 3)
					produced += 3
					require.Equal(t, produced, n.count(t))
				}
			}
		}
		work()
		for i, n := range c.nodes {
			c.requireFormat(oldFormat)
			require.NoError(t, n.become(newFormat))
			work()
			if i < 2 {
				time.Sleep(time.Minute)
				c.requireFormat(oldFormat)
				require.NoError(t, n.become(oldFormat), "it can go back")
				work()
				require.NoError(t, n.become(newFormat))
				work()
			}
		}
		time.Sleep(5 * time.Second)
		c.requireFormat(newFormat)
		work()

		// No node of an older build joins.
		joining := c.node(true)
		joining.newest = oldFormat
		err := c.open(joining)
		require.ErrorIs(t, err, codeq.ErrFormat)
		require.ErrorContains(t, err, fmt.Sprintf(`node "n3" knows format %d, the cluster of node "n0" has format %d`, oldFormat, newFormat))
		joining.join = false
		joining.machine.Wipe()
		require.NoError(t, c.open(joining), "it waits to be added")
		err = simQueue(c.nodes[0]).AddNode(t.Context(), codeq.Peer{Node: joining.name, Address: joining.name})
		require.ErrorIs(t, err, codeq.ErrFormat)
		require.ErrorContains(t, err, fmt.Sprintf(`node "n3" knows format %d, the cluster of node "n0" has format %d`, oldFormat, newFormat))
		joining.stop()
		joining.join = true
		joining.machine.Wipe()
		require.NoError(t, joining.become(newFormat))
		c.nodes = append(c.nodes, joining)
		for range 3 {
			work()
		}
		c.requireFormat(newFormat)
		for shard := range c.opts.Shards {
			for _, n := range c.nodes {
				require.True(t, hasNextFormat(t, simQueue(n), shard), "%s", n.name)
			}
		}
	})
}

// TestTotalsGoOn: each leader, of any build, continues the totals of the previous leader.
func TestTotalsGoOn(t *testing.T) {
	upgradeCase(t, 1, func(t *testing.T, c *simCluster) {
		requireTotals := func(n *simNode, produced int) {
			t.Helper()
			all, err := simQueue(n).Info(t.Context())
			require.NoError(t, err)
			require.Len(t, all, 1)
			require.EqualValues(t, produced, all[0].Counts.Ready)
			require.Equal(t, codeq.Totals{Produced: uint64(produced)}, all[0].Totals)
		}
		c.nodes[0].produce(t, 3)
		requireTotals(c.nodes[1], 3)
		c.requireFormat(oldFormat)
		for _, n := range c.nodes {
			require.NoError(t, n.become(newFormat))
		}
		time.Sleep(5 * time.Second)
		c.requireFormat(newFormat)
		c.nodes[0].produce(t, 4)
		for range 3 {
			leader := c.leader(0)
			leader.crash(100)
			c.awaitLeaders()
			for _, n := range c.nodes {
				if n != leader {
					requireTotals(n, 7)
				}
			}
			leader.start()
		}
	})
}

// TestUpgradeBesideDeadNode: for a member that is down, its last build seen by the leader counts.
// If that was the new build, a shard takes the new format; if not, the shard waits as long as the
// node is a member.
func TestUpgradeBesideDeadNode(t *testing.T) {
	upgradeCase(t, 1, func(t *testing.T, c *simCluster) {
		dead := c.nodes[2]
		dead.crash(100)
		for _, n := range c.nodes[:2] {
			require.NoError(t, n.become(newFormat))
		}
		time.Sleep(time.Minute)
		c.requireFormat(oldFormat)
		require.NoError(t, simQueue(c.nodes[0]).RemoveNode(t.Context(), dead.name))
		time.Sleep(10 * time.Second)
		c.nodes = c.nodes[:2]
		c.requireFormat(newFormat)
	})
	upgradeCase(t, 2, func(t *testing.T, c *simCluster) {
		for _, n := range c.nodes[1:] {
			require.NoError(t, n.become(newFormat))
		}
		time.Sleep(10 * time.Second) // until the second node leads its shard and has seen the third
		dead := c.nodes[2]
		dead.crash(100)
		require.NoError(t, c.nodes[0].become(newFormat))
		time.Sleep(10 * time.Second)
		require.Equal(t, newFormat, formatOf(t, simQueue(c.nodes[0]), 1))
		require.NoError(t, dead.become(newFormat))
		time.Sleep(10 * time.Second)
		c.requireFormat(newFormat)
	})
}

// TestUpgradeOfPebble: the format of the directory at the start of a node sets Pebble's format for
// its stores and its log. It is never one that only new builds can read before all nodes have a new
// build.
func TestUpgradeOfPebble(t *testing.T) {
	const before, after = uint64(pebble.FormatColumnarBlocks), uint64(pebble.FormatTableFormatV6)
	formats := func(format int) uint64 {
		if format < newFormat {
			return before
		}
		return after
	}
	upgradeCaseWith(t, *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{Pebble: formats}), func(t *testing.T, c *simCluster) {
		for _, n := range c.nodes {
			n.produce(t, 3)
			simtest.RequirePebbleFormat(t, n.machine.Disk(), before)
			require.NoError(t, n.become(newFormat))
			simtest.RequirePebbleFormat(t, n.machine.Disk(), before)
		}
		time.Sleep(5 * time.Second)
		c.requireFormat(newFormat)
		for _, n := range c.nodes {
			simtest.RequirePebbleFormat(t, n.machine.Disk(), before)
			n.stop()
			n.start()
			simtest.RequirePebbleFormat(t, n.machine.Disk(), after)
			require.Equal(t, 9, n.count(t))
		}
		require.NoError(t, simQueue(c.nodes[0]).Checkpoint(t.Context(), "copy"))
		desc, err := pebble.Peek(manifest.ShardDir(c.nodes[0].machine.Disk(), "copy", 0), c.nodes[0].machine.Disk())
		require.NoError(t, err)
		require.EqualValues(t, after, desc.FormatMajorVersion)
	})
}

// TestFoundersOfTwoBuilds: a new cluster has the newest format known to all founders.
func TestFoundersOfTwoBuilds(t *testing.T) {
	for _, old := range []int{-1, 0, 2} {
		t.Run(fmt.Sprint("old ", old), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newSimCluster(t, 1, 0, codeq.Options{Shards: 2})
				c.found(3)
				for i, n := range c.nodes {
					if i == old {
						n.newest = oldFormat
					}
					n.start()
				}
				c.awaitLeaders()
				c.rest()
				want := newFormat
				if old >= 0 {
					want = oldFormat
				}
				c.requireFormat(want)
				c.close()
			})
		})
	}
}

// TestOldNodeIsRefused: a node of an older build was down while the cluster took the new format.
// The others refuse it, and it learns the reason.
func TestOldNodeIsRefused(t *testing.T) {
	upgradeCase(t, 1, func(t *testing.T, c *simCluster) {
		require.NoError(t, c.nodes[0].become(newFormat))
		old := c.nodes[2]
		require.NoError(t, old.become(newFormat))
		time.Sleep(10 * time.Second)
		old.crash(100)
		require.NoError(t, c.nodes[1].become(newFormat))
		time.Sleep(10 * time.Second)
		require.NoError(t, old.become(oldFormat))
		c.requireRefused(old)
		require.Equal(t, newFormat, formatOf(t, simQueue(c.nodes[0]), 0))
		c.nodes[0].produce(t, 1)
		require.NoError(t, old.become(newFormat))
		require.Equal(t, 1, old.count(t))
		c.requireFormat(newFormat)
	})
}

// requireRefused checks that calls of a node fail because its build is too old.
func (c *simCluster) requireRefused(n *simNode) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := simQueue(n).WaitReady(ctx)
	require.ErrorIs(c.t, err, codeq.ErrNotLeader)
	require.ErrorIs(c.t, err, codeq.ErrFormat)
	require.ErrorContains(c.t, err, fmt.Sprintf("node %q knows format %d, the cluster of node", n.name, oldFormat))
}

// TestUpgradeOnFullDisk: a node without disk space for its manifest keeps its replicas. Its shards
// take the new format when there is room, whether the node leads them or not.
func TestUpgradeOnFullDisk(t *testing.T) {
	t.Parallel()
	for _, full := range []int{0, 2} {
		upgradeCase(t, 3, func(t *testing.T, c *simCluster) {
			for _, n := range c.nodes {
				n.produce(t, 3)
			}
			n := c.nodes[full] // it leads a third of the shards
			disk := n.openFullFor(t, manifest.TempName)
			for _, other := range c.members() {
				if other != n {
					require.NoError(t, other.become(newFormat))
				}
			}
			time.Sleep(time.Minute)
			for i := range inspect.Of(simQueue(n)).Shards() {
				require.NoError(t, inspect.Of(simQueue(n)).Group(i).Failure(), "shard %d", i)
			}
			m, err := manifest.Read(n.machine.Disk(), "queue")
			require.NoError(t, err)
			require.Equal(t, oldFormat, m.Format)
			require.Positive(t, disk.refused.Load())
			c.nodes[1].produce(t, 3)

			disk.full.Store(false)
			time.Sleep(time.Minute)
			c.requireFormat(newFormat)
			n.produce(t, 3)
			require.Equal(t, 15, n.count(t))
		})
	}
}

// fullDisk is a disk without room for files with a given part in their names.
type fullDisk struct {
	part    string
	full    atomic.Bool
	refused atomic.Int64 // writes
}

func (d *fullDisk) before(op, name string) error {
	if op == "write" && d.full.Load() && strings.Contains(name, d.part) {
		d.refused.Add(1)
		return syscall.ENOSPC
	}
	return nil
}

// openFullFor closes a node, and opens it with this build on a disk that has no room for some
// files.
func (n *simNode) openFullFor(t *testing.T, part string) *fullDisk {
	n.stop()
	n.newest = newFormat
	disk := &fullDisk{part: part}
	require.NoError(t, n.cluster.openWith(n, func(o *codeq.Options) {
		inspect.Options(o).FS = &testkit.HookFS{FS: inspect.Options(o).FS, Before: disk.before}
	}))
	disk.full.Store(true)
	return disk
}

// TestCopyFromBeforeAnUpgrade: a copy from the previous build is detected once the cluster has the
// new format, even if it was opened undetected before.
func TestCopyFromBeforeAnUpgrade(t *testing.T) {
	upgradeCase(t, 1, func(t *testing.T, c *simCluster) {
		_, n := c.lead()
		n.stop()
		image := n.image()
		for _, m := range c.members() {
			require.NoError(t, m.become(0))
		}
		c.awaitFormat()
		n.produce(t, 10)
		n.stop()
		n.start()
		c.awaitSeenAfter(n, image.life)
		n.stop()
		n.putBack(image)
		c.net.Isolate(n.name, c.names())
		for range 2 {
			n.start() // it reaches no other node
			n.stop()
		}
		c.net.Heal(true)
		n.start()
		n.requireOldCopy(t)
		n.start()
		require.NotEqual(t, image.id, n.id())
		c.awaitVotes()
		require.Equal(t, 10, n.count(t))
	})
}
