package cluster

import (
	"maps"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// peerHealth records which nodes a shard's leader can reach. Raft tries to replicate to an
// unreachable node with ever longer pauses, up to ten seconds; a node that is back would wait for
// as long, and so would a shard that needs it for a majority. So while heartbeats to that node
// fail, which are tried several times a second, replication to it waits without an error.
type peerHealth struct {
	mu       sync.Mutex // guards the fields below
	down     map[raft.ServerID]outage
	refused  map[raft.ServerID]time.Time // when the node could not store the last entries
	refusing atomic.Int32                // number of nodes in refused
	disks    map[raft.ServerID]diskAnswer
	doubted  notifier // changes when a node fails to answer a heartbeat, or answers with a later term
}

// outage is the time during which a node does not answer the heartbeats of a term.
type outage struct {
	term uint64
	over chan struct{} // closed at its end
}

// diskAnswer is the state of a node's disk when the node answered a heartbeat.
type diskAnswer struct {
	term uint64
	at   time.Time     // when the answer came
	age  time.Duration // how long its oldest operation had been under way
}

// noteDisk stores a node's report on its disk.
func (c *peerHealth) noteDisk(id raft.ServerID, term uint64, age time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	put(&c.disks, id, diskAnswer{term, time.Now(), age})
}

// diskAge is the last report of a node on its disk in a term; without one within the given time it
// is longer than any.
func (c *peerHealth) diskAge(id raft.ServerID, term uint64, within time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.disks[id]
	if !ok || a.term != term || time.Since(a.at) > within {
		return math.MaxInt64
	}
	return a.age
}

// awaitContact returns when a node answers the heartbeats of a term, or when the wait is useless:
// the term is over, or this node about to end.
func (g *Group) awaitContact(id raft.ServerID, term uint64) {
	for {
		change := g.route.next()
		over := g.health.outage(id, term)
		if over == nil || g.raft.State() != raft.Leader || g.raft.CurrentTerm() != term {
			return
		}
		select {
		case <-over:
		case <-change:
		case <-g.node.ctx.Done():
			return
		}
	}
}

// outage returns a channel that is closed when a node answers the heartbeats of a term again; nil:
// it does answer.
func (c *peerHealth) outage(id raft.ServerID, term uint64) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o, ok := c.down[id]; ok && o.term == term {
		return o.over
	}
	return nil
}

// note records the outcome of a heartbeat.
func (c *peerHealth) note(id raft.ServerID, term uint64, answered bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, down := c.down[id]
	if !answered && down && o.term >= term {
		return
	}
	if down {
		close(o.over)
		delete(c.down, id)
	}
	if !answered {
		put(&c.down, id, outage{term, make(chan struct{})})
		c.doubted.notify()
	}
}

// answerAge is how long a node's report on the room on its disk, or its refusal of an entry, is
// valid. Members repeat both several times a second while they hold.
const answerAge = 30 * time.Second

// refuses reports whether a node could not store the last entries.
func (c *peerHealth) refuses(id raft.ServerID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, ok := c.refused[id]
	return ok && time.Since(at) < answerAge
}

// anyRefuses reports whether any node could not store the last entries.
func (c *peerHealth) anyRefuses() bool { return c.refusing.Load() > 0 }

func (c *peerHealth) noteRefusal(id raft.ServerID, refused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if refused {
		put(&c.refused, id, time.Now())
	} else {
		delete(c.refused, id)
	}
	maps.DeleteFunc(c.refused, func(_ raft.ServerID, at time.Time) bool { return time.Since(at) >= answerAge })
	c.refusing.Store(int32(len(c.refused)))
}
