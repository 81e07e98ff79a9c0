package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// A node that was removed gets no message about it: leaders no longer write to it. So a node that
// knows no leader of a shard asks the others. Its name proves nothing, since another directory may
// have it by now; its directory is identified by its present ID, and by the former ones as long as
// it is not taken back by the present one. There are two answers:
//
//   - A leader does not have it among the members that it knows. That may change: a change of the
//     members may be half complete.
//   - The first shard has removed the directory. This is certain and for good, whichever node
//     answers: the shard stores the removal before it removes the directory (Leaders.Forget), and
//     never takes that directory back. So a directory is removed if a store says so, unless it is a
//     member as of that store or later: then the removal is not complete.

// removal is the knowledge of a node about its own removal.
type removal struct {
	certain atomic.Bool // the first shard has removed it
	told    atomic.Bool // Config.Removed has been called
}

// removalError says that a node was removed, for good.
type removalError struct{ error }

func (e *removalError) Unwrap() error { return e.error }

// IsRemoval reports whether an error of a call says that this node was removed from the cluster,
// and that no later one will succeed.
func IsRemoval(err error) bool {
	_, is := errors.AsType[*removalError](err) // unlike errors.As, it allocates nothing
	return is
}

// RemovedError is the answer to a call of a node that was removed from the cluster.
func RemovedError(shard int, node string) error {
	return fmt.Errorf("%w: shard %d: node %q was removed from the cluster", base.ErrNotLeader, shard, node)
}

// removedError is RemovedError for a call of this node.
func (n *Node) removedError(shard int) error {
	err := RemovedError(shard, n.self.Node)
	if n.removal.certain.Load() {
		return &removalError{err}
	}
	return err
}

// ids are the present and former IDs of this directory; it may be a member by any.
func (n *Node) ids() []string { return append(slices.Clone(n.former()), n.self.ID) }

// hasRemoved reports whether it is certain that the cluster has removed a directory, by all IDs
// that it has had. It reads the store of the first shard.
func (n *Node) hasRemoved(node string, ids []string) bool {
	g := n.groups[0]
	removed := errors.Is(g.checkForgotten(node, ids...), base.ErrNotMember)
	return removed && g.configuration.lacks(node, ids) // as of the read, or later
}

// addRemoved adds, to the states of this node's replicas, whether each shard has removed a
// directory, by all IDs that it has had.
func (n *Node) addRemoved(states []replicaState, node string, ids []string) {
	removed := n.hasRemoved(node, ids)
	for i, g := range n.groups {
		states[i].Removed = removed && g.configuration.lacks(node, ids)
	}
}

// maxIDs bounds the former IDs in a node's question for a state.
const maxIDs = 1000

// appendFormer appends the former IDs of this node's directory for a question for a state: nothing
// if there are none.
func (n *Node) appendFormer(b []byte) []byte {
	former := n.former()
	if len(former) == 0 {
		return b
	}
	return wire.AppendJSON(b, former[max(0, len(former)-maxIDs):])
}

// idsOf are the present and former IDs of the sender of a question for a state.
func idsOf(r *peer.Request) (ids []string, err error) {
	if len(r.Body) > 0 {
		err = json.Unmarshal(r.Body, &ids)
	}
	if err != nil || len(ids) > maxIDs {
		return nil, ErrMalformedCall
	}
	return append(ids, r.From.ID.String()), nil
}

// CheckMember returns an error if this node was removed, or is a member of no shard with a known
// leader.
func (n *Node) CheckMember(shards []ShardStatus) error {
	ids, gone := n.ids(), false
	for i, sh := range shards {
		if sh.Leader != "" && sh.has(ids) {
			return nil
		}
		gone = gone || n.groups[i].hasLost(&sh, ids)
	}
	if !gone {
		return nil
	}
	return n.removedError(0)
}

// hasLost reports whether this node, by the given IDs, is no longer a member of the group. A node
// that is being added does not know the members yet.
func (g *Group) hasLost(sh *ShardStatus, ids []string) bool {
	switch {
	case sh.Leader != "" && sh.has(ids):
		return false
	case sh.Leader == "" || sh.Removed:
		return sh.Removed
	}
	members, err := g.members()
	return err != nil || len(members) > 0
}

// IsRemoved reports whether this node has no leader for the group, and is no longer a member
// according to others.
func (g *Group) IsRemoved() bool { return g.removed.Load() }

// learnRemovals asks the others about the groups that have no leader, as far as this node knows. It
// reports whether there are any.
func (n *Node) learnRemovals() bool {
	if !slices.ContainsFunc(n.groups, func(g *Group) bool { return !g.HasLeader() }) {
		return false
	}
	shards, ids := n.Status(n.ctx), n.ids()
	if slices.ContainsFunc(shards, func(sh ShardStatus) bool { return sh.Removed }) {
		n.removal.certain.Store(true)
	}
	all := true
	for i, sh := range shards {
		g := n.groups[i]
		removed := !g.HasLeader() && g.hasLost(&sh, ids)
		if !g.removed.Swap(removed) && removed {
			n.log.Info("this node is not a member", "shard", g.index, "leader", sh.Leader, "removed", sh.Removed)
		}
		all = all && removed
	}
	if all && n.removal.certain.Load() && n.c.Removed != nil && !n.removal.told.Swap(true) {
		n.c.Removed(n.removedError(0))
	}
	return true
}

// checkSelf returns an error if this node was removed from the cluster.
func (n *Node) checkSelf() error {
	if n.learnRemovals() && !slices.ContainsFunc(n.groups, func(g *Group) bool { return !g.IsRemoved() }) {
		return n.removedError(0)
	}
	return nil
}
