package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// Remove takes a node out of the cluster. Before the first change it checks that all shards can do
// without the node.
//
// Removals are made one after the other, on whichever nodes they are called: each is decided by the
// first shard, which refuses the next one until all shards have made the last. If two nodes were
// removed from different shards first, each shard could lose its majority to the other removal.
//
// A message that adds the node may still be under way. So the first shard remembers the directories
// that it has removed, and never takes them back; and the other shards add only members of the
// first one.
func (n *Node) Remove(ctx context.Context, node string) error {
	finished, err := n.finishRemovals(ctx)
	if err != nil || slices.Contains(finished, node) {
		return err
	}
	if err := n.check(ctx, CheckRemoval, node); err != nil {
		return err
	}
	if err := n.remove(ctx, 0, Peer{Node: node}); err != nil {
		return err
	}
	return n.forget(ctx, node)
}

// remove removes a node from the shards, beginning with shard first. If p has an ID, only that
// directory is removed.
func (n *Node) remove(ctx context.Context, first int, p Peer) error {
	for i := first; i < len(n.groups); i++ {
		if err := n.c.Leaders.Change(ctx, i, RemoveNode, p); err != nil {
			if i > 0 {
				err = halfway(err)
			}
			return fmt.Errorf("remove node %s from shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

// halfway is the outcome of a change that has begun, and then failed: it must not say that nothing
// was done.
func halfway(err error) error {
	if errors.Is(err, base.ErrClosed) || errors.Is(err, base.ErrNoMajority) {
		return fmt.Errorf("%w: %s", base.ErrUncertain, err.Error())
	}
	return fmt.Errorf("%w: %w", base.ErrUncertain, err)
}

// errForget: a node was removed, but a shard still keeps its record of the node's produces.
var errForget = errors.New("the shard keeps what it knows of its produces")

// forget deletes the data that the shards keep for a node that was removed.
func (n *Node) forget(ctx context.Context, node string) error {
	for i, g := range n.groups {
		err := n.c.Leaders.Forget(ctx, i, node)
		if err != nil && node == n.self.Node && g.IsRemoved() {
			return nil // this node can tell no leader any more; the shards keep some bytes for its name
		}
		if err != nil {
			return fmt.Errorf("node %s was removed; shard %d: %w: %w", node, i, errForget, halfway(err))
		}
	}
	return nil
}

// finishRemovals removes the nodes that the first shard has removed, and others not yet, and
// returns their names. It identifies them by their directories: meanwhile the removal may be
// finished, and another directory added under the name.
func (n *Node) finishRemovals(ctx context.Context) (finished []string, err error) {
	for _, p := range removing(n.Status(ctx)) {
		err := n.c.Leaders.Change(ctx, 0, CheckMember, p)
		if err == nil {
			continue // this node had an old state
		}
		if !errors.Is(err, base.ErrNotMember) {
			return finished, fmt.Errorf("remove node %s: %w", p.Node, err)
		}
		if err = n.remove(ctx, 1, p); err == nil {
			err = n.forget(ctx, p.Node)
		}
		if err != nil {
			return finished, err
		}
		finished = append(finished, p.Node)
	}
	return finished, nil
}

// removing is the nodes, by their directories, that shards still have although the first one has
// none of their name, as far as the leaders are known.
func removing(shards []ShardStatus) (nodes []Peer) {
	if shards[0].Leader == "" {
		return nil
	}
	for _, sh := range shards[1:] {
		for _, r := range sh.Replicas {
			p := Peer{Node: r.Node, Address: r.Address, ID: r.ID}
			if sh.Leader != "" && !shards[0].hasName(r.Node) && !slices.Contains(nodes, p) {
				nodes = append(nodes, p)
			}
		}
	}
	return nodes
}

// check asks the leaders of all shards whether a node, which at least one of them has, can be
// removed.
func (n *Node) check(ctx context.Context, how Change, node string) error {
	var unknown error
	known := false
	for i := range n.groups {
		switch err := n.c.Leaders.Change(ctx, i, how, Peer{Node: node}); {
		case err == nil:
			known = true
		case errors.Is(err, base.ErrNotMember):
			unknown = err
		default:
			return fmt.Errorf("remove node %s: %w", node, err)
		}
	}
	if known {
		return nil
	}
	return unknown
}

// ErrLastNode: a node cannot be removed because it is the last of its group.
var ErrLastNode = errors.New("the last node")

// removeNode removes a node for good.
func (g *Group) removeNode(ctx context.Context, d *decision) error {
	if d.at < 0 {
		return nil
	}
	rest, err := g.withoutNode(ctx, d, 0)
	if err != nil {
		return err
	}
	// The next leader is asked. If that one is being removed as well, it makes the removal that
	// waits before it hands the shard over; else the two would hand it to each other for ever.
	id := d.ServerID()
	if id == g.node.self.ServerID() && (g.beganLately() || g.handOver() == nil) {
		return fmt.Errorf("%w: shard %d: node %s is to be removed", base.ErrNotLeader, g.index, d.Node)
	} // or else this node leads until it has removed itself
	if g.index == 0 {
		if err := g.node.c.Leaders.Forget(ctx, g.index, string(id)); err != nil {
			return err
		}
	}
	err = g.reconfigure(func() raft.Future { return g.raft.RemoveServer(id, d.index, configTimeout) })
	if err == nil && len(rest) < len(d.members)-1 {
		return errReconfigured // the node is being taken back, and is a member by another ID as well
	}
	return err
}

// checkRemoval returns an error if a node cannot be removed once so many newcomers vote.
func (g *Group) checkRemoval(ctx context.Context, d *decision, newcomers int) error {
	if d.at < 0 {
		return fmt.Errorf("%w: node %q", base.ErrNotMember, d.Node)
	}
	_, err := g.withoutNode(ctx, d, newcomers)
	return err
}

// withoutNode returns the other members, or an error if the group could not do without a node. The
// first shard removes no node while the removal of another one is half complete.
func (g *Group) withoutNode(ctx context.Context, d *decision, newcomers int) (rest []raft.Server, err error) {
	if g.index == 0 {
		if others := removing(g.node.Status(ctx)); len(others) > 0 {
			return nil, fmt.Errorf("%w: shard %d: node %q is being removed from other shards", base.ErrNotLeader, g.index, others[0].Node)
		}
	}
	rest = slices.DeleteFunc(slices.Clone(d.members), func(m raft.Server) bool { return peerOf(m).Node == d.Node })
	return rest, g.checkRest(ctx, rest, newcomers)
}

// checkRest checks that a majority of the remaining members and the newcomers would answer:
// otherwise the group would have no leader any more.
func (g *Group) checkRest(ctx context.Context, rest []raft.Server, newcomers int) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	voters := votersOf(rest)
	if len(voters)+newcomers == 0 {
		return ErrLastNode
	}
	silent := g.node.together("question for a state", len(voters), func(i int) error {
		_, err := g.stateAt(ctx, voters[i])
		return err
	})
	answers, need := newcomers, (len(voters)+newcomers)/2+1
	var why []string // texts: a node that does not answer is no error of the group
	for i, err := range silent {
		if err == nil {
			answers++
		} else {
			why = append(why, fmt.Sprintf("node %s: %s", peerOf(voters[i]).Node, strings.TrimPrefix(err.Error(), "codeq: ")))
		}
	}
	if answers >= need {
		return nil
	}
	return fmt.Errorf("%w: shard %d: %d of the %d that would be left have answered, start more of them: %s", base.ErrNoMajority, g.index,
		answers, len(voters)+newcomers, strings.Join(why, "; "))
}
