package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// Add makes a node part of the cluster: in the group of every shard it first follows, and votes
// when it has caught up.
func (n *Node) Add(ctx context.Context, p Peer) error {
	if err := n.checkSelf(); err != nil {
		return err
	}
	j, err := n.invite(ctx, p)
	if err != nil {
		return err
	}
	return n.admit(ctx, j)
}

// invite makes a node part of this cluster before it is added, and returns it with its IDs. It
// waits until the node answers.
func (n *Node) invite(ctx context.Context, p Peer) (joining, error) {
	j := joining{Peer: p, Join: true}
	var away error // why the node has not answered the last time
	waits := n.newWait()
	err := n.poll(ctx, func() (bool, error) {
		i, err := n.introduce(ctx, p)
		var refused *peer.RefusedError
		if errors.As(err, &refused) {
			return false, refusal(err)
		}
		if away = err; err != nil {
			waits.note("node that is to be added does not answer", away)
			return false, nil
		}
		if i.Cluster != "" && i.Cluster != n.Cluster() {
			return false, fmt.Errorf("%w: node %q is of cluster %s, not %s", base.ErrNotMember, p.Node, i.Cluster, n.Cluster())
		}
		j.ID, j.Former = i.ID, i.Former
		known := n.known()
		if err := cmp.Or(namesake(known, j.Peer), addressee(known, j.Peer)); err != nil || i.Cluster != "" {
			return true, err
		}
		_, err = n.peer.Introduce(ctx, peer.Target{Name: p.Node, Address: p.Address}, kindAdopt, []byte(n.Cluster()))
		if err != nil {
			return false, n.callError(ctx, err)
		}
		return true, nil
	})
	if err != nil && away != nil {
		err = fmt.Errorf("add node %s: %w: %w", p.Node, err, away)
	}
	return j, err
}

// refusal turns the refusal of a connection into the error for the application.
func refusal(err error) error {
	var refused *peer.RefusedError
	switch {
	case !errors.As(err, &refused):
		return err
	case refused.Reason == peer.RefusedGroups:
		return fmt.Errorf("%w: %w", base.ErrShardCount, err)
	case refused.Reason == peer.RefusedCluster, refused.Reason == peer.RefusedNode:
		return fmt.Errorf("%w: %w", base.ErrNotMember, err)
	case refused.Reason == peer.RefusedVersion, refused.Reason == peer.RefusedFormat:
		return fmt.Errorf("%w: %w", base.ErrFormat, err)
	}
	return err
}

// addressee returns an error if another member has the address of a node.
func addressee(members []Peer, p Peer) error {
	at := slices.IndexFunc(members, func(m Peer) bool { return m.Address == p.Address && m.ID != p.ID })
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%w: address %s is that of node %q, which is to be removed first, or to be added with another address",
		base.ErrNotMember, p.Address, members[at].Node)
}

func (n *Node) add(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, AddNode, p); err != nil {
			return fmt.Errorf("add node %s to shard %d: %w", p.Node, i, err)
		}
	}
	return n.giveVotes(ctx, p)
}

// ErrBehind: a node has not caught up with a shard, and gets no vote yet.
var ErrBehind = errors.New("codeq: node has not caught up")

// giveVotes gives a member a vote in each shard, as soon as it has caught up.
func (n *Node) giveVotes(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.giveVote(ctx, i, p); err != nil {
			return fmt.Errorf("give node %s a vote in shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

func (n *Node) giveVote(ctx context.Context, shard int, p Peer) error {
	var behind error // the last error before the end of ctx
	waits := n.newWait()
	err := n.poll(ctx, func() (bool, error) {
		err := n.countBehind(ctx, shard, p)
		if err == nil {
			err = n.c.Leaders.Change(ctx, shard, GiveVote, p)
		}
		if !errors.Is(err, ErrBehind) {
			return true, err
		}
		if gone := n.c.Leaders.Change(ctx, shard, CheckMember, p); errors.Is(gone, base.ErrNotMember) {
			return true, gone // the node was removed, and makes no more progress
		}
		if ctx.Err() != nil && behind != nil {
			return false, nil // err may only report the end of ctx
		}
		behind = err
		waits.note("node does not vote yet", behind, "member", p.Node, "shard", shard)
		return false, nil
	})
	if err != nil && behind != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", err, behind)
	}
	return err
}

// closeBehind is how many entries a node may lack when a leader is asked to give it a vote.
const closeBehind = MaxAppend * closeMessages

// countBehind returns an error if a node lacks many entries, or all. The leader checks its log more
// exactly, but may be asked by a node that was removed meanwhile: that one gets no answer here, and
// so gives no vote.
func (n *Node) countBehind(ctx context.Context, shard int, p Peer) error {
	applied, err := n.c.Leaders.Applied(ctx, shard)
	if err != nil {
		return err
	}
	states, err := n.stateOf(ctx, p)
	if err == nil && shard >= len(states) {
		err = ErrMalformedCall
	}
	if err != nil {
		return fmt.Errorf("%w: node %s: %s", ErrBehind, p.Node, err.Error())
	}
	if states[shard].Failed { // until the node is opened again
		return fmt.Errorf("%w: node %s: its replica", base.ErrFailed, p.Node)
	}
	if has := states[shard].Applied; has+closeBehind <= applied || has == 0 && applied > 0 {
		return fmt.Errorf("%w: node %s has applied %d of %d entries", ErrBehind, p.Node, has, applied)
	}
	return nil
}

// wait is a wait for a node, perhaps a long one, that the log mentions now and then.
type wait struct {
	log  *slog.Logger
	next time.Time // time of the next message
}

// waitNote is the time between two messages about a wait.
const waitNote = 10 * time.Second

func (n *Node) newWait() *wait { return &wait{n.log, time.Now().Add(waitNote)} }

// note logs the reason why the wait goes on, if waitNote has passed.
func (w *wait) note(what string, why error, args ...any) {
	if now := time.Now(); !now.Before(w.next) {
		w.next = now.Add(waitNote)
		w.log.Warn(what, append(args, "err", why)...)
	}
}

// addLearner makes a node a member without a vote, or changes the address of a member.
func (g *Group) addLearner(ctx context.Context, d *decision) error {
	known := make([]Peer, len(d.members))
	for i, m := range d.members {
		known[i] = peerOf(m)
	}
	if err := cmp.Or(namesake(known, d.Peer), addressee(known, d.Peer)); err != nil {
		return err
	}
	id, addr := d.ServerID(), raft.ServerAddress(d.Address)
	if !hasID(d.members, id) {
		if err := g.checkRemoved(ctx, d.Peer); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(d.members, func(m raft.Server) bool { return m.ID == id && m.Address == addr }) {
		return nil // it has been added before
	}
	return g.reconfigure(func() raft.Future { return g.raft.AddNonvoter(id, addr, d.index, configTimeout) })
}

// checkRemoved returns an error if a node is not a member, and the first shard has removed it by
// any of the IDs that its directory has had.
func (g *Group) checkRemoved(ctx context.Context, p Peer, former ...string) error {
	if g.index > 0 {
		return g.node.c.Leaders.Change(ctx, 0, CheckMember, p)
	}
	return g.checkForgotten(p.Node, append(slices.Clone(former), p.ID)...)
}

// checkForgotten returns an error if a node was removed by one of some IDs.
// REQUIRES: the group is that of the first shard.
func (g *Group) checkForgotten(node string, ids ...string) error {
	for _, id := range ids {
		removed, err := g.machine.IsForgotten(string(Peer{Node: node, ID: id}.ServerID()))
		if err != nil {
			return fmt.Errorf("%w: shard %d: %w", base.ErrNotLeader, g.index, err)
		}
		if removed {
			return fmt.Errorf("%w: node %q was removed from the cluster with its directory; it may be added again with an empty one",
				base.ErrNotMember, node)
		}
	}
	return nil
}

// giveVote gives a vote to a node that was added and has caught up.
func (g *Group) giveVote(ctx context.Context, d *decision) error {
	id := d.ServerID()
	if d.at < 0 || d.members[d.at].ID != id {
		return fmt.Errorf("%w: node %s, which was added", base.ErrNotFound, d.Node)
	}
	if err := g.checkCaughtUp(ctx, d.members[d.at]); err != nil {
		return err
	}
	return g.reconfigure(func() raft.Future {
		return g.raft.AddVoter(id, raft.ServerAddress(d.Address), d.index, configTimeout)
	})
}
