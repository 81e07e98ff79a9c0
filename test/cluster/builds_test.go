package cluster_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/manifest"
)

// newFormat is the format of this build, and oldFormat is that of older builds. They differ only
// with the tag nextformat.
const newFormat, oldFormat = manifest.Format, manifest.OldestOfNodes

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
	simCaseOf(t, opts, oldFormat, story)
}

// become closes a node, unless it is down, and opens it with a build that knows formats up to
// newest.
func (n *simNode) become(newest int) error {
	n.stop()
	n.newest = newest
	return n.cluster.open(n)
}

// simUpgrade kills a node, which then comes back with this build.
var simUpgrade = simFault{"upgrade", 8, func(s *schedule) bool {
	n := s.anyNode()
	if !n.turn.TryLock() {
		return false
	}
	defer n.turn.Unlock()
	if !n.upgrade() {
		return false
	}
	s.note("upgrade %s", n.name)
	return true
}}

// upgrade kills the node if its build is older than this one. The next life has this build.
// REQUIRES: turn: a life that has begun to open would not be killed.
func (n *simNode) upgrade() bool {
	n.mu.Lock()
	old := n.newest != 0
	n.newest = 0
	n.mu.Unlock()
	if old {
		n.crash(100)
	}
	return old
}

// awaitFormat waits until all shards have the format of this build. All nodes must have this build.
func (c *simCluster) awaitFormat() {
	for end := time.Now().Add(simPatience); ; time.Sleep(time.Second) {
		st, err := simQueue(c.members()[0]).ClusterStatus(context.Background())
		if err == nil && !slices.ContainsFunc(st.Shards, func(sh codeq.ShardStatus) bool { return sh.Format != newFormat }) {
			return
		}
		if time.Now().After(end) {
			c.hangs("the rise of the format")
		}
	}
}
