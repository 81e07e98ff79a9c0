package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// join asks the nodes of the cluster to add this one.
func (n *Node) join() error {
	if n.votes() {
		return n.checkCluster()
	}
	ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
	defer cancel()
	var by []Peer
	for again := n.NewPatience(); ; {
		var err error
		if by, err = n.chooseCluster(ctx); err == nil {
			break
		}
		if !errors.Is(err, errNotBegun) || !again.Wait(ctx, nil) {
			return fmt.Errorf("codeq: join the cluster: %w", err)
		}
	}
	ctx, cancel = n.whileFurther(n.ctx)
	defer cancel()
	var errs []error
	for _, p := range by {
		if err := n.joinBy(ctx, p, joining{Peer: n.self, Join: true}); err != nil {
			errs = append(errs, fmt.Errorf("node %q: %w", p.Node, err))
			continue
		}
		return n.poll(ctx, func() (bool, error) { return n.votesForGood(), nil }) // until this node knows its vote
	}
	return fmt.Errorf("codeq: join the cluster: %w", errors.Join(errs...))
}

// checkCluster refuses a node that belongs to another cluster than its peers.
func (n *Node) checkCluster() error {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.HeartbeatTimeout/foundingShare)
	defer cancel()
	own, others, other := 0, 0, ""
	for _, a := range n.introduceAll(ctx, n.c.Peers) {
		switch {
		case a.err != nil || a.Cluster == "":
		case a.Cluster == n.Cluster():
			own++
		default:
			others, other = others+1, a.Cluster
		}
	}
	if others > own && 2*others >= len(n.c.Peers) {
		return fmt.Errorf("codeq: join the cluster: %w: node %q is of cluster %s, its peers are of %s",
			base.ErrNotMember, n.self.Node, n.Cluster(), other)
	}
	return nil
}

// errNotBegun: a cluster has not been founded yet.
var errNotBegun = fmt.Errorf("%w: the cluster has not begun", base.ErrNotLeader)

// chooseCluster makes the node part of the cluster of its peers, and returns those that have
// answered. Half of them must be of one cluster: one address may belong to another cluster by now.
func (n *Node) chooseCluster(ctx context.Context) (by []Peer, err error) {
	var errs []error
	of := make(map[string][]introduction) // by cluster
	peers := slices.DeleteFunc(slices.Clone(n.c.Peers), func(p Peer) bool { return p.Node == n.self.Node })
	for _, a := range n.introduceAll(ctx, peers) {
		switch {
		case a.err != nil:
			errs = append(errs, refusal(a.err))
		case a.Cluster == "":
			errs = append(errs, fmt.Errorf("node %q: %w", a.Node, errNotBegun))
		default:
			of[a.Cluster] = append(of[a.Cluster], a.introduction)
		}
	}
	for cluster, answers := range of {
		if len(answers) < len(peers)-len(answers) || len(of) > 1 && 2*len(answers) == len(peers) {
			continue
		}
		for _, i := range answers {
			if err := namesake(i.Members, n.self); err != nil {
				return nil, err
			}
			at := slices.IndexFunc(peers, func(p Peer) bool { return p.Node == i.Node })
			by = append(by, Peer{Node: i.Node, ID: i.ID, Address: peers[at].Address})
		}
		return by, n.adopt(cluster)
	}
	return nil, errors.Join(append(errs, fmt.Errorf("%w: less than half of its %d peers have answered, and are of one cluster",
		base.ErrNotLeader, len(peers)))...)
}

// joinBy asks one node of the cluster to add this one. It repeats that if it was too early, or if
// this node has ended the connection itself, as it does when it rises to a format.
func (n *Node) joinBy(ctx context.Context, p Peer, j joining) error {
	to, err := p.target()
	if err != nil {
		return err
	}
	for {
		_, err = n.peer.Call(ctx, to, kindJoin, wire.AppendJSON(nil, j))
		refused, ok := errors.AsType[*peer.RefusedError](err)
		again := ok && refused.Reason == peer.RefusedEarly || errors.Is(err, net.ErrClosed)
		if !again || ctx.Err() != nil {
			break
		}
		base.Pause(ctx, nil)
	}
	if err != nil {
		return n.callError(ctx, err)
	}
	return nil
}

// joinTimeout bounds how long a new node waits to become part of a cluster, and then how long it
// catches up without progress.
const joinTimeout = 5 * time.Minute

// whileFurther returns a ctx that ends when this node has made no progress for joinTimeout, or is
// closed.
func (n *Node) whileFurther(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	n.run("watch of a new node", func() {
		look := time.NewTicker(joinTimeout / looks)
		defer look.Stop()
		for last, still := n.further(), 0; still < looks; still++ {
			select {
			case <-look.C:
			case <-ctx.Done():
				return
			}
			if now := n.further(); now != last {
				last, still = now, -1
			}
		}
		cancel(fmt.Errorf("%w: the node has got no further for %v", context.DeadlineExceeded, joinTimeout))
	}, cancel)
	return ctx, func() { cancel(nil) }
}

// looks is the number of checks of whileFurther in joinTimeout.
const looks = 300

// further changes as long as the node makes progress in shards where it has no vote yet: by
// entries, and bytes of files.
func (n *Node) further() (sum uint64) {
	for _, g := range n.groups {
		if !g.votesForGood() {
			sum += 1 + g.raft.LastIndex() + g.Applied() + g.receiver.bytes.Load()
		}
	}
	return sum
}

// votes reports whether this node is a voter of every shard's group by the latest configuration
// that it has, which may not be committed.
func (n *Node) votes() bool {
	for _, s := range n.state() {
		if !slices.Contains(s.Members, memberState{n.self, true}) {
			return false
		}
	}
	return true
}

// votesForGood reports whether it is committed that this node is a voter of every shard's group.
func (n *Node) votesForGood() bool {
	return !slices.ContainsFunc(n.groups, func(g *Group) bool { return !g.votesForGood() })
}

// votesForGood reports whether it is committed that this node is a voter, and its replica works.
func (g *Group) votesForGood() bool {
	p := g.node.self
	self := raft.Server{Suffrage: raft.Voter, ID: p.ServerID(), Address: raft.ServerAddress(p.Address)}
	_, members := g.configuration.get()
	return g.Failure() == nil && slices.Contains(members, self)
}

// serveJoin adds the node that sends the request.
func (n *Node) serveJoin(r *peer.Request) error {
	var j joining
	if err := json.Unmarshal(r.Body, &j); err != nil || j.Node != r.From.Name || j.ID != r.From.ID.String() || j.Address == "" {
		return ErrMalformedCall
	}
	ctx, cancel := context.WithCancel(n.ctx)
	r.OnCancel(cancel)
	n.answer(r, "joining of a node", func() ([]byte, error) {
		defer cancel()
		if err := n.checkReach(ctx, j.Peer); err != nil {
			return nil, err // another member may reach it
		}
		return nil, n.admit(ctx, j)
	})
	return nil
}

// checkReach returns an error if this node does not find another one at its address.
func (n *Node) checkReach(ctx context.Context, p Peer) error {
	i, err := n.introduce(ctx, p)
	if err == nil && i.ID != p.ID {
		err = fmt.Errorf("node %q at %s has another directory", p.Node, p.Address)
	}
	if err != nil {
		return fmt.Errorf("%w: it does not find the node that asks for it: %w", base.ErrNotLeader, err)
	}
	return nil
}
