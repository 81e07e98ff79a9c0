package cluster

import (
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
)

// A node that is elected leader of a shard's Raft group becomes the leader of the shard:
//
//	begin    StateMachine.Lead commits an entry of its term; when that is applied,
//	         so is everything that any leader before it has acknowledged
//	load     Lead prepares the Leader, from the store
//	serve    the Leader decides
//
// and stops at once when it is no longer the leader: the first entry of a later term is applied, or
// the store replaced, only after the Leader has ended. So a Leader never sees a store that others
// write; it reads its own writes.

// leaderTerm is the Leader of the shard on this node, if any.
type leaderTerm struct {
	leaving slowlock.Lock // held while a leader ends, which takes as long as a commit
	mu      sync.Mutex    // guards the fields below
	leader  Leader        // nil: this node does not decide
	begun   time.Time     // when leader began
	seen    uint64        // the latest term with an applied entry
	offer   offer         // the last one
	handing bool          // the shard is being handed over: no leader begins here
	// reforming is the number of changes of the members that are being decided. A decision made
	// while the shard is handed over may be in the log of the old leader alone.
	reforming int
}

// watch follows the elections of the group until quit is closed.
func (g *Group) watch(quit <-chan struct{}) {
	retry := time.NewTimer(0)
	retry.Stop()
	defer retry.Stop()
	var elected <-chan bool = g.raft.LeaderCh()
	var last Leader           // the last one that began here
	var ended <-chan struct{} // of last; nil: its end has been seen
	for {
		forfeit := g.forfeits.next()
		if g.leads() && g.hasForfeited(g.raft.CurrentTerm()) {
			g.leave(base.ErrNotLeader)
		}
		select {
		case <-quit:
			g.leave(base.ErrClosed)
			return
		case <-elected:
		case <-forfeit:
			continue
		case <-ended:
			ended = nil
			if g.leader() != last {
				continue
			}
			if g.leave(base.ErrNotLeader); last.Crashed() && g.handOver() != nil {
				retry.Reset(g.node.c.HeartbeatTimeout) // no other node leads: this one tries again, not at once
				continue
			}
		case <-g.kept:
			if g.leads() {
				continue
			}
		case <-retry.C:
		}
		g.leave(base.ErrNotLeader)
		if g.raft.State() != raft.Leader || g.Failure() != nil || g.hasForfeited(g.raft.CurrentTerm()) || g.proposing.late.Load() > 0 {
			continue
		}
		l, err := g.becomeLeader()
		if err == nil {
			last, ended = l, l.Done()
		} else if g.raft.State() == raft.Leader {
			g.node.log.Warn("shard cannot be led yet", "shard", g.index, "err", err)
			retry.Reset(g.node.c.HeartbeatTimeout / 4)
		}
	}
}

// becomeLeader makes this node decide for the shard.
func (g *Group) becomeLeader() (Leader, error) {
	term := g.raft.CurrentTerm()
	l, err := g.machine.Lead(term)
	if err != nil {
		return nil, err
	}
	if !g.serve(l, term) {
		return nil, fmt.Errorf("%w: term %d is over, or another node is to lead", base.ErrNotLeader, term)
	}
	g.node.log.Info("leading", "shard", g.index, "term", term)
	g.changed()
	return l, nil
}

// serve begins a leader unless its term is over. An entry of a later term waits for mu, and then
// for the end of the leader.
func (g *Group) serve(l Leader, term uint64) bool {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	if g.leading.seen > term || g.leading.handing {
		return false
	}
	g.leading.leader, g.leading.begun = l, time.Now()
	l.Serve()
	return true
}

func (g *Group) leader() Leader {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	return g.leading.leader
}

// leads reports whether this node decides for the shard.
func (g *Group) leads() bool { return g.leader() != nil }

// beganLately reports whether the leader on this node has just begun: the call that made another
// node hand the shard over may be on its way.
func (g *Group) beganLately() bool {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	return g.leading.leader != nil && time.Since(g.leading.begun) < g.node.c.HeartbeatTimeout
}

// leave ends the leader on this node, and returns when it has ended, also if another caller ends
// it. It is false if there is none.
func (g *Group) leave(reason error) bool {
	g.leading.leaving.Lock()
	defer g.leading.leaving.Unlock()
	g.leading.mu.Lock()
	l := g.leading.leader
	g.leading.leader = nil
	g.leading.mu.Unlock()
	if l == nil {
		return false
	}
	l.StepDown(reason)
	g.changed()
	g.node.log.Info("leads no more", "shard", g.index, "reason", reason)
	return true
}

// observeTerm ends the leader of an earlier term on this node before an entry of the given term is
// applied. Raft calls it.
func (g *Group) observeTerm(term uint64) {
	g.leading.mu.Lock()
	later := term > g.leading.seen
	g.leading.seen = max(term, g.leading.seen)
	g.leading.mu.Unlock()
	if later {
		g.leave(base.ErrNotLeader)
	}
}
