package codeq

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// transport is Raft's, whose pipelines do not get stuck. Raft stops to listen to
// the answers of a pipeline when it gets one that ends it, such as that of a
// follower that knows a later term. If another answer comes then, and another
// request is sent, the goroutine that sends waits for ever, and with it the
// replication to that follower, and Shutdown.
type transport struct {
	*raft.NetworkTransport
	replica  *replica
	patience time.Duration // for an answer, before the pipeline ends and Raft goes on without
}

// SetHeartbeatHandler is raft.Transport's. Raft calls it last before its goroutines begin.
func (t *transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	t.replica.running = true
	t.NetworkTransport.SetHeartbeatHandler(handle)
}

// AppendEntriesPipeline is raft.Transport's.
func (t *transport) AppendEntriesPipeline(id raft.ServerID, target raft.ServerAddress) (raft.AppendPipeline, error) {
	p, err := t.NetworkTransport.AppendEntriesPipeline(id, target)
	if err != nil {
		return nil, err
	}
	return newPipeline(p, t.replica, t.patience, t.replica.node.queue.opts.maxAppend), nil
}

// pipeline closes itself when a request waits for too long for the one before.
type pipeline struct {
	raft.AppendPipeline
	replica  *replica
	patience time.Duration
	most     int         // entries that Raft sends at a time
	watch    *time.Timer // stopped but during AppendEntries
	sent     time.Time   // when the last request was, or else the pipeline made
}

func newPipeline(p raft.AppendPipeline, r *replica, patience time.Duration, most int) *pipeline {
	watch := time.AfterFunc(time.Hour, func() {
		contain(r.node.log, "end of a pipeline", func() { _ = p.Close() }, nil) // never fails
	})
	watch.Stop()
	return &pipeline{AppendPipeline: p, replica: r, patience: patience, most: most, watch: watch, sent: time.Now()}
}

// AppendEntries is raft.AppendPipeline's. One goroutine calls it.
func (p *pipeline) AppendEntries(
	args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	if err := p.replica.failure(); err != nil {
		return nil, err
	}
	if len(args.Entries) >= p.most {
		p.giveWay()
	}
	p.sent = time.Now()
	p.watch.Reset(p.patience)
	defer p.watch.Stop()
	return p.AppendPipeline.AppendEntries(args, resp)
}

// maxAppend is how many entries Raft sends at a time at the most. Only a node
// that is behind gets as many: a shard has one group under way.
const maxAppend = 64

// A node that catches up leaves most of the time to the calls of others: after
// so many entries it waits for giveWayFor times as long as they took. A
// shard at work commits one entry in the time in which the other node then gets
// 64/(1+giveWayFor), so that it catches up nevertheless.
const (
	giveWayFor = 7
	maxGiveWay = 50 * time.Millisecond
)

func (p *pipeline) giveWay() {
	time.Sleep(min(giveWayFor*time.Since(p.sent), maxGiveWay))
}

// peerHealth is which nodes a shard's leader can reach. Raft tries to replicate to
// a node that it cannot reach ever more rarely, up to ten seconds apart; one that
// is back would wait for as long, and so would a shard that needs it for a
// majority. So what is to be replicated waits, without having failed, while
// heartbeats to that node fail, which are tried several times a second.
type peerHealth struct {
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
		t.replica.health.note(id, req.Term, err == nil)
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
	c := &t.replica.health
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
		over := r.health.outage(id, term)
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
func (c *peerHealth) outage(id raft.ServerID, term uint64) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o, ok := c.down[id]; ok && o.term == term {
		return o.over
	}
	return nil
}

// note keeps what has become of a heartbeat.
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
		if c.down == nil {
			c.down = make(map[raft.ServerID]outage)
		}
		c.down[id] = outage{term, make(chan struct{})}
	}
}

// refuses reports whether a node could not store what it was sent last.
func (c *peerHealth) refuses(id raft.ServerID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused[id]
}

func (c *peerHealth) noteRefusal(id raft.ServerID, refused bool) {
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

// raftLogger passes what Raft warns of to a logger.
func raftLogger(log *slog.Logger) hclog.Logger {
	if !log.Enabled(context.Background(), slog.LevelWarn) {
		return hclog.NewNullLogger()
	}
	std := slog.NewLogLogger(log.Handler(), slog.LevelWarn)
	return hclog.FromStandardLogger(std, &hclog.LoggerOptions{Name: "raft", Level: hclog.Warn, DisableTime: true})
}
