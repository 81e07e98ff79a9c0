package codeq

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// Where a shard is led, as this node knows, and how those who wait hear that it
// may be led elsewhere.

// changed says that the shard may be led by another node, or be ready to be asked.
func (r *replica) changed() {
	r.route.changed()
	r.node.routes.changed()
}

// changes tells those who wait that something has changed. The zero changes is
// ready for use.
type changes struct {
	mu     sync.Mutex // guards change
	change chan struct{}
}

// next returns a channel that is closed at the next change.
func (c *changes) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change == nil {
		c.change = make(chan struct{})
	}
	return c.change
}

func (c *changes) changed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change != nil {
		close(c.change)
		c.change = nil
	}
}

// tenure is how long calls wait for a leader of the shard on another node.
type tenure struct {
	mu     sync.Mutex // guards what follows
	leader raft.ServerID
	over   chan struct{}
}

// begin notes who leads now.
func (t *tenure) begin(leader raft.ServerID, grace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader == leader {
		return
	}
	if over := t.over; over != nil {
		time.AfterFunc(grace, func() { close(over) })
	}
	t.leader, t.over = leader, make(chan struct{})
}

// of returns a channel that is closed some time after another node than the
// given one is known to lead: what has not been answered by then will not be.
func (t *tenure) of(leader raft.ServerID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader != leader { // not noted yet, or over already
		return nil
	}
	return t.over
}

// anyShard is a shard for a task that may be in any: one that this node leads, or
// else one that has a leader.
func (n *node) anyShard() int {
	replicas := n.queue.replicas
	first := rand.IntN(len(replicas))
	reachable := first
	for i := range replicas {
		at := (first + i) % len(replicas)
		if replicas[at].lead.Load() != nil {
			return at
		}
		if !replicas[reachable].hasLeader() && replicas[at].hasLeader() {
			reachable = at
		}
	}
	return reachable
}

// hasLeader reports whether a node is known to lead the shard.
func (r *replica) hasLeader() bool {
	addr, _ := r.raft.LeaderWithID()
	return addr != ""
}
