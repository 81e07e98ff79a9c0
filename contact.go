package codeq

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// contacts is which nodes a shard's leader can reach. Raft tries to replicate to
// a node that it cannot reach ever more rarely, up to ten seconds apart; one that
// is back would wait for as long, and so would a shard that needs it for a
// majority. So what is to be replicated waits, without having failed, while
// heartbeats to that node fail, which are tried several times a second.
type contacts struct {
	mu      sync.Mutex // guards what follows
	down    map[raft.ServerID]outage
	refused map[raft.ServerID]bool // could not store the last entries that it was sent
}

// outage is the time during which a node does not answer the heartbeats of a term.
type outage struct {
	term uint64
	over chan struct{} // closed at its end
}

// AppendEntries is raft.Transport's.
func (t *transport) AppendEntries(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	if err := t.replica.failure(); err != nil {
		return err
	}
	if isHeartbeat(req) {
		err := t.NetworkTransport.AppendEntries(id, target, req, resp)
		t.replica.contacts.note(id, req.Term, err == nil)
		return err
	}
	t.replica.awaitContact(id, req.Term)
	return t.replicate(id, target, req, resp)
}

// replicate sends entries. A node that has them follow what it has, but cannot
// store them, as its disk is full, is asked again every refusedPause, with one entry
// only. Raft would do so ever more rarely, as with one that cannot be reached, and each time go back by
// an entry, until it came to a snapshot at last. So it learns what is true as well:
// without the entries the node would have agreed.
func (t *transport) replicate(
	id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) error {
	c := &t.replica.contacts
	if len(req.Entries) > 1 && c.refuses(id) {
		req.Entries = req.Entries[:1]
	}
	err := t.NetworkTransport.AppendEntries(id, target, req, resp)
	if err != nil || len(req.Entries) == 0 {
		return err
	}
	refused := !resp.Success && !resp.NoRetryBackoff && resp.Term == req.Term
	c.noteRefusal(id, refused)
	if refused {
		select {
		case <-time.After(refusedPause):
		case <-t.replica.node.ctx.Done():
		}
		req.Entries, resp.Success = nil, true
	}
	return nil
}

const refusedPause = 250 * time.Millisecond

func isHeartbeat(req *raft.AppendEntriesRequest) bool {
	return req.PrevLogEntry == 0 && req.PrevLogTerm == 0 && len(req.Entries) == 0 && req.LeaderCommitIndex == 0
}

// awaitContact returns when a node answers the heartbeats of a term, or when that
// makes no difference any more: the term is over, or this node about to end.
func (r *replica) awaitContact(id raft.ServerID, term uint64) {
	for {
		change := r.route.next()
		over := r.contacts.outage(id, term)
		if over == nil || r.raft.State() != raft.Leader || r.raft.CurrentTerm() != term {
			return
		}
		select {
		case <-over:
		case <-change:
		case <-r.node.ctx.Done():
			return
		}
	}
}

// outage is when a node answers the heartbeats of a term again; nil: it does.
func (c *contacts) outage(id raft.ServerID, term uint64) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o, ok := c.down[id]; ok && o.term == term {
		return o.over
	}
	return nil
}

// note keeps what has become of a heartbeat.
func (c *contacts) note(id raft.ServerID, term uint64, answered bool) {
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
		if c.down == nil {
			c.down = make(map[raft.ServerID]outage)
		}
		c.down[id] = outage{term, make(chan struct{})}
	}
}

// refuses reports whether a node could not store what it was sent last.
func (c *contacts) refuses(id raft.ServerID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused[id]
}

func (c *contacts) noteRefusal(id raft.ServerID, refused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !refused {
		delete(c.refused, id)
		return
	}
	if c.refused == nil {
		c.refused = make(map[raft.ServerID]bool)
	}
	c.refused[id] = true
}
