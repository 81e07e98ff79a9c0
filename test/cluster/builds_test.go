package cluster_test

import (
	"context"
	"slices"

	"codeq"
	"codeq/internal/manifest"
)

// newFormat is the format of this build, and oldFormat is that of older builds. They differ only
// with the tag nextformat.
const newFormat, oldFormat = manifest.Format, manifest.OldestOfNodes

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
	c.until("the rise of the format", func() bool {
		st, err := simQueue(c.members()[0]).ClusterStatus(context.Background())
		return err == nil && !slices.ContainsFunc(st.Shards, func(sh codeq.ShardStatus) bool { return sh.Format != newFormat })
	})
}
