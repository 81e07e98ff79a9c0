package cluster

import (
	"context"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/peer"
)

// This file tracks which node leads each shard, as far as this node knows, and notifies waiting
// calls when another node may lead it.

// Changed returns a channel that is closed when any shard may be led by another node, or be ready
// for calls.
func (n *Node) Changed() <-chan struct{} { return n.routes.next() }

// Changed returns a channel that is closed when the shard may be led by another node, or be ready
// for calls.
func (g *Group) Changed() <-chan struct{} { return g.route.next() }

func (g *Group) changed() {
	g.route.notify()
	g.node.routes.notify()
}

// notifier wakes waiting goroutines of a change. The zero value is ready for use.
type notifier struct {
	mu     sync.Mutex // guards change
	change chan struct{}
}

// next returns a channel that is closed at the next change.
func (n *notifier) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.change == nil {
		n.change = make(chan struct{})
	}
	return n.change
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.change != nil {
		close(n.change)
		n.change = nil
	}
}

// follow records the leader of the shard, until the node is closed.
func (g *Group) follow(elections <-chan raft.Observation) {
	for {
		select {
		case <-elections:
			if addr, leader := g.raft.LeaderWithID(); addr != "" {
				g.removed.Store(false)
				before := g.termOwner.begin(leader, g.node.c.ElectionTimeout)
				if !g.invited.Swap(false) && before != "" && leader == g.node.self.ServerID() {
					g.node.crashes.note(before)
				}
			}
			g.changed()
		case <-g.node.quit:
			return
		}
	}
}

// HasLeader reports whether a node is known to lead the shard.
func (g *Group) HasLeader() bool {
	addr, _ := g.leaderNow()
	return addr != ""
}

// callee is the leader as the target of calls.
type callee struct {
	id   raft.ServerID
	addr raft.ServerAddress
	here bool // the leader is this node
	to   peer.Target
}

// calleeOf is the callee of a leader, which is cached for all calls.
func (g *Group) calleeOf(id raft.ServerID, addr raft.ServerAddress) (*callee, error) {
	if c := g.callee.Load(); c != nil && c.id == id && c.addr == addr {
		return c, nil
	}
	to, err := peerOf(raft.Server{ID: id, Address: addr}).target()
	if err != nil {
		return nil, err
	}
	c := &callee{id, addr, id == g.node.self.ServerID(), to}
	g.callee.Store(c)
	return c, nil
}

// WhileLed returns a context that also ends when the shard may be led by another node.
func (g *Group) WhileLed(parent context.Context) (context.Context, context.CancelFunc) {
	change := g.Changed()
	ctx, cancel := context.WithCancel(parent)
	g.node.run("watch of a leader", func() {
		select {
		case <-change:
			cancel()
		case <-ctx.Done():
		}
	}, func(error) { cancel() })
	return ctx, cancel
}

// termOwner bounds how long calls wait for a leader of the shard on another node.
type termOwner struct {
	mu     sync.Mutex // guards the fields below
	leader raft.ServerID
	over   chan struct{}
}

// begin records the present leader, and returns the leader before, if that was another node.
func (t *termOwner) begin(leader raft.ServerID, grace time.Duration) (before raft.ServerID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if before = t.leader; before == leader {
		return ""
	}
	if over := t.over; over != nil {
		time.AfterFunc(grace, func() { close(over) })
	}
	t.leader, t.over = leader, make(chan struct{})
	return before
}

// of returns a channel that is closed some time after another node than the given one is known to
// lead: calls without an answer by then will get none.
func (t *termOwner) of(leader raft.ServerID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader != leader { // not recorded yet, or over already
		return nil
	}
	return t.over
}
