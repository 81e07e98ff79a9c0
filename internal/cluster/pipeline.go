package cluster

import (
	"cmp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// pipeline is Raft's, but divides requests into messages of a bounded size, and does not get stuck.
// Raft stops listening to the answers when it gets one that ends the pipeline, such as that of a
// follower that knows a later term. If Raft sent another request then, or was about to, the sending
// goroutine would wait for ever, and with it the replication to that follower, and Shutdown. So the
// pipeline closes itself in that case, and also when its term is over.
type pipeline struct {
	raft.AppendPipeline
	group  *Group
	to     raft.ServerID
	newest raft.AppendFuture // of the last request; nil: its answer has been checked
	told   uint64            // the commit index in the last message
	sent   time.Time         // time of the last message, or else of the start
	term   atomic.Uint64     // of the last request; 0: there was none
	end    sync.Once
	ended  chan struct{}
}

// inFlight is the number of messages that the library's pipeline has under way. With this number,
// the smallest, it takes a message only when Raft has got the answer to the one before.
const inFlight = 2

func newPipeline(inner raft.AppendPipeline, g *Group, to raft.ServerID) *pipeline {
	p := &pipeline{AppendPipeline: inner, group: g, to: to, sent: time.Now(), ended: make(chan struct{})}
	end := func(error) { _ = p.Close() } // never fails
	g.node.run("term of a pipeline", func() { p.awaitEnd(); end(nil) }, end)
	return p
}

// Close implements raft.AppendPipeline.
func (p *pipeline) Close() error {
	p.end.Do(func() { close(p.ended) })
	return p.AppendPipeline.Close()
}

// awaitEnd waits until messages are useless.
func (p *pipeline) awaitEnd() {
	for {
		change := p.group.route.next()
		if p.isOver() {
			return
		}
		select {
		case <-change:
		case <-p.group.node.ctx.Done():
			return
		case <-p.ended:
			return
		}
	}
}

// isOver reports whether messages are useless: this node no longer leads in the term.
func (p *pipeline) isOver() bool {
	term, r := p.term.Load(), p.group.raft
	return term > 0 && (r.State() != raft.Leader || r.CurrentTerm() != term)
}

// AppendEntries implements raft.AppendPipeline. One goroutine calls it. Entries that are not sent
// within sendFor are taken out of the request: Raft then checks whether it must stop, and continues
// with them.
func (p *pipeline) AppendEntries(
	args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	p.term.Store(args.Term)
	if p.isTold(args) && p.rest(args) {
		return nil, nil // Raft does not look at the future
	}
	begun := time.Now()
	for rest := args; ; resp = new(raft.AppendEntriesResponse) {
		n := fitting(rest.Entries)
		more := len(rest.Entries) - n
		if more > 0 || n >= p.group.node.c.MaxAppend {
			p.giveWay()
		}
		p.sent = time.Now()
		f, err := p.send(rest, n, resp)
		if err != nil || more == 0 {
			return f, err
		}
		if p.sent.Sub(begun) > sendFor {
			args.Entries = args.Entries[:len(args.Entries)-more]
			return f, nil
		}
		last, next := rest.Entries[n-1], *rest
		next.PrevLogEntry, next.PrevLogTerm, next.Entries = last.Index, last.Term, rest.Entries[n:]
		rest = &next
	}
}

const sendFor = time.Second

// send sends the first n entries of a request. An entry that is larger than a message is sent when
// all before have been answered, so that no two of them are in memory.
func (p *pipeline) send(
	req *raft.AppendEntriesRequest, n int, resp *raft.AppendEntriesResponse,
) (raft.AppendFuture, error) {
	if n == 1 && dataOf(req.Entries[0]) > messageBytes && !p.look() {
		return nil, raft.ErrPipelineShutdown
	}
	if p.isOver() {
		return nil, raft.ErrPipelineShutdown
	}
	if err := cmp.Or(p.group.Failure(), p.group.withholds(req.Term)); err != nil {
		return nil, err
	}
	message, err := p.group.message(req, n)
	if err != nil {
		return nil, err
	}
	p.told = min(message.LeaderCommitIndex, message.PrevLogEntry+uint64(len(message.Entries)))
	f, err := p.AppendPipeline.AppendEntries(message, resp)
	if err != nil {
		return nil, err
	}
	if !p.look() { // without a wait: see inFlight
		return nil, raft.ErrPipelineShutdown
	}
	p.newest = f
	return f, nil
}

// look waits for the answer to the newest message, unless it has been checked, and reports whether
// Raft continues after it. If not, the pipeline is closed.
func (p *pipeline) look() bool {
	f := p.newest
	p.newest = nil
	if f == nil {
		return true
	}
	if f.Error() != nil || !f.Response().Success || f.Response().Term > f.Request().Term {
		_ = p.Close() // never fails
		return false
	}
	p.group.acknowledge(p.to, f.Request().PrevLogEntry+uint64(len(f.Request().Entries)))
	return true
}

// isTold reports whether a request repeats the last one: the node has been sent all entries, and
// the commit index that covers them all. Raft repeats such a request at every CommitTimeout.
func (p *pipeline) isTold(req *raft.AppendEntriesRequest) bool {
	return len(req.Entries) == 0 && req.LeaderCommitIndex > 0 && req.LeaderCommitIndex == req.PrevLogEntry && p.told == req.LeaderCommitIndex
}

// rest waits until there is an entry to send, and is true then. It is false when the request must
// be sent nevertheless: a node has missed heartbeats, so that the connection may have ended as
// well, or has answered one with a later term, which Raft learns from the request; the term or the
// pipeline is over, as when the node has refused the last message; or the last message was long
// ago. rest never answers in the node's place: Raft gets the answers to heartbeats, and misses the
// node when they fail.
func (p *pipeline) rest(req *raft.AppendEntriesRequest) bool {
	g := p.group
	answered, long := time.NewTimer(g.node.c.HeartbeatTimeout), time.NewTimer(longRest)
	defer answered.Stop()
	defer long.Stop()
	for {
		grown, doubted, change := g.log.grown.next(), g.health.doubted.next(), g.route.next()
		if last, err := g.log.LastIndex(); err != nil || last != req.PrevLogEntry {
			return err == nil
		}
		if p.isOver() || g.Failure() != nil || g.health.outage(p.to, req.Term) != nil {
			return false
		}
		select {
		case <-grown:
		case <-change:
		case <-doubted:
			return false
		case <-answered.C: // most likely there by now; an earlier wait would delay an entry
			if !p.look() {
				return false
			}
		case <-long.C:
			return false
		case <-p.ended:
			return false
		case <-g.node.ctx.Done():
			return false
		}
	}
}

// longRest is the longest time without a message: then Raft checks whether it must stop, and
// notices a connection that was lost in silence.
const longRest = 5 * time.Second

// A node that catches up leaves most of the time to the calls of others: after each message but the
// last, or MaxAppend entries, it waits giveWayFor times as long as they took. A busy shard commits
// one entry in the time of a message divided by 1+giveWayFor, so that the node catches up
// nevertheless.
const (
	giveWayFor = 7
	maxGiveWay = 50 * time.Millisecond
)

func (p *pipeline) giveWay() {
	time.Sleep(min(giveWayFor*time.Since(p.sent), maxGiveWay))
}
