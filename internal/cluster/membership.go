package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// Add makes a node part of the cluster: in the group of every shard it first follows, and votes
// when it has caught up.
func (n *Node) Add(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, AddNode, p); err != nil {
			return fmt.Errorf("add node %s to shard %d: %w", p.Node, i, err)
		}
	}
	for i := range n.groups {
		err := n.awaitCatchUp(ctx, i, p)
		if err == nil {
			err = n.c.Leaders.Change(ctx, i, GiveVote, p)
		}
		if err == nil {
			err = n.acquaint(ctx, i)
		}
		if err != nil {
			return fmt.Errorf("give node %s a vote in shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

// Remove takes a node out of the cluster.
func (n *Node) Remove(ctx context.Context, node string) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, RemoveNode, Peer{Node: node}); err != nil {
			return fmt.Errorf("remove node %s from shard %d: %w", node, i, err)
		}
		if err := n.c.Leaders.Forget(ctx, i, node); err != nil {
			return fmt.Errorf("forget node %s in shard %d: %w", node, i, err)
		}
	}
	return nil
}

// Leave takes this node out of the cluster if that is asked for.
func (n *Node) Leave() error {
	if !n.c.LeaveOnClose {
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.c.CallTimeout)
	defer cancel()
	return n.Remove(ctx, n.self.Node)
}

// Change is a change of a group.
type Change byte

const (
	AddNode    Change = iota // as one that does not vote
	GiveVote                 // to a node that was added
	RemoveNode               // for good
	MakeLeader
	EndOfChanges
)

// ErrLastNode: a node cannot be removed as its group has no other.
var ErrLastNode = errors.New("the last node")

// configTimeout bounds how long a change of a group waits for the one before.
const configTimeout = 10 * time.Second

// Change changes the group, and tells settle the outcome, on a goroutine for which Close waits. It
// is called on the node that leads the group, before the Leader has ended.
func (g *Group) Change(how Change, p Peer, settle func(error)) {
	g.node.background.Go(func() {
		settle(g.node.guarded("change of members", func() error { return g.change(how, p) }))
	})
}

func (g *Group) change(how Change, p Peer) error {
	id, addr := raft.ServerID(p.Node), raft.ServerAddress(p.Address)
	members, err := g.members()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(members, func(m raft.Server) bool { return m.ID == id })
	switch how {
	case AddNode:
		if at >= 0 && members[at] == (raft.Server{Suffrage: raft.Voter, ID: id, Address: addr}) {
			return nil // it has been added before
		}
		return g.reconfigure(func() raft.Future { return g.raft.AddNonvoter(id, addr, 0, configTimeout) })
	case GiveVote:
		return g.reconfigure(func() raft.Future { return g.raft.AddVoter(id, addr, 0, configTimeout) })
	case RemoveNode:
		switch {
		case at < 0:
			return nil
		case len(members) == 1:
			return ErrLastNode
		case p.Node == g.node.self.Node:
			if g.handOver() == nil {
				// so that the next leader is asked
				return fmt.Errorf("%w: shard %d", base.ErrNotLeader, g.index)
			} // or else it leads until it has removed itself
		}
		return g.reconfigure(func() raft.Future { return g.raft.RemoveServer(id, 0, configTimeout) })
	case MakeLeader:
		switch {
		case at < 0:
			return fmt.Errorf("%w: node %s", base.ErrNotFound, p.Node)
		case p.Node == g.node.self.Node:
			return nil
		}
		err := g.transfer(members[at])
		if err == nil || errors.Is(err, errOffered) || errors.Is(err, errUnfit) {
			return err
		}
		return fmt.Errorf("%w: %w", base.ErrUncertain, err)
	}
	return ErrMalformedCall
}

// reconfigure returns when Raft has changed the group.
func (g *Group) reconfigure(change func() raft.Future) error {
	if err := g.enter(); err != nil {
		return err
	}
	defer g.asking.leave()
	err := change().Error()
	if err == nil {
		return nil
	}
	if err = raftError(err); !errors.Is(err, base.ErrNotLeader) {
		err = fmt.Errorf("%w: %w", base.ErrUncertain, err)
	}
	return err
}

// members is the group of the shard as this node knows it.
func (g *Group) members() ([]raft.Server, error) {
	f := g.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, raftError(err)
	}
	return f.Configuration().Servers, nil
}

// How much a node may lack when it gets a vote, in entries, or leads, in messages.
const (
	closeBehind   = 256
	closeMessages = 4
)

// awaitCatchUp waits until a new node has nearly caught up with a shard.
func (n *Node) awaitCatchUp(ctx context.Context, shard int, p Peer) error {
	var unknown error // why the state of the new node was, the last time
	err := poll(ctx, func() (bool, error) {
		applied, err := n.c.Leaders.Applied(ctx, shard)
		if err != nil {
			return false, err
		}
		var states []replicaState
		states, unknown = n.stateOf(ctx, p.Address)
		return unknown == nil && shard < len(states) && states[shard].Applied+closeBehind > applied, nil
	})
	if ctx.Err() != nil {
		return errors.Join(err, unknown)
	}
	return err
}

// acquaint waits until all nodes of a shard that can be reached have in their logs
// what its leader has: Raft lets nobody vote for a node that it has not heard of.
func (n *Node) acquaint(ctx context.Context, shard int) error {
	var last uint64 // in the leader's log, when it was first heard of
	return poll(ctx, func() (bool, error) {
		sh := &n.Status(ctx)[shard]
		for _, rs := range sh.Replicas {
			if last == 0 && rs.Node == sh.Leader {
				last = rs.LastIndex
			}
		}
		return !slices.ContainsFunc(sh.Replicas, func(rs ReplicaStatus) bool {
			return rs.LastError == "" && (last == 0 || rs.LastIndex < last)
		}), nil
	})
}

// join lets the nodes of the cluster add this one.
func (n *Node) join() error {
	if n.votes() {
		return nil
	}
	ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
	defer cancel()
	var errs []error
	for _, p := range n.c.Peers {
		if p.Node == n.self.Node {
			continue
		}
		_, err := n.peer.Call(ctx, p.Address, kindJoin, wire.AppendJSON(nil, n.self))
		if err == nil {
			return poll(ctx, func() (bool, error) { return n.votes(), nil }) // until it knows
		}
		var refused *peer.RefusedError
		if errors.As(err, &refused) && refused.Reason == peer.RefusedGroups {
			err = fmt.Errorf("%w: %w", base.ErrShardCount, err)
		}
		errs = append(errs, fmt.Errorf("node %s: %w", p.Node, err))
	}
	return fmt.Errorf("codeq: join the cluster: %w", errors.Join(errs...))
}

// joinTimeout bounds how long a new node waits to be part of a cluster.
const joinTimeout = 5 * time.Minute

// votes reports whether this node is a voter of every shard's group.
func (n *Node) votes() bool {
	for _, s := range n.state() {
		if !slices.Contains(s.Members, memberState{n.self.Node, n.self.Address, true}) {
			return false
		}
	}
	return true
}

// serveJoin adds the node that asks for it.
func (n *Node) serveJoin(r *peer.Request) error {
	var p Peer
	if err := json.Unmarshal(r.Body, &p); err != nil || p.Node == "" || len(p.Node) > MaxNodeName || p.Address == "" {
		return ErrMalformedCall
	}
	ctx, cancel := context.WithCancel(n.ctx)
	r.OnCancel(cancel)
	n.background.Go(func() {
		defer cancel()
		if err := n.guarded("joining of a node", func() error { return n.Add(ctx, p) }); err != nil {
			r.Fail(n.c.EncodeError(err))
			return
		}
		r.Reply(nil)
	})
	return nil
}
