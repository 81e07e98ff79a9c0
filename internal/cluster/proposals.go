package cluster

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// Raft answers a proposal when a majority has it, however long that takes: disks may be full, or
// hang. So proposals are made by goroutines of their own, and callers wait for a limit
// (Node.commitLimit).
//
// Invariant: as long as Raft has not answered a proposal that its caller has abandoned, this node
// does not decide, and makes no other proposal: it leads the shard again, in the same term or a
// later one, when the outcome of the entry is known.

// proposing is the proposals of a group. The zero value is ready for use.
type proposing struct {
	idle  atomic.Pointer[proposer] // has nothing to do; nil: there is none
	late  atomic.Int32             // proposals that their callers have abandoned
	moves atomic.Uint64            // parts of large messages that were sent to voters
}

// proposal is an entry, or else a change of the members.
type proposal struct {
	term   uint64
	entry  []byte
	change func() raft.Future
	end    func() // see over; nil: nothing to do
}

// proposer is a goroutine that carries out one proposal after the other.
type proposer struct {
	next   chan proposal
	ended  chan struct{} // closed when its goroutine has panicked, before the answer
	answer chan error    // capacity 1
	state  atomic.Int32
	timer  *time.Timer // of the caller that waits
}

// States of a proposer.
const (
	proposalMade     int32 = iota // the caller waits for the answer
	proposalAnswered              // or none was made yet
	proposalLate                  // the caller has abandoned it
)

// errNotCommitted is the outcome of a proposal that Raft has not answered within its limit.
var errNotCommitted = errors.New("no majority has stored it")

// commitLimit is how long a proposal is waited for, longer for a large entry. The leader does not
// end because of a commit that is slow, but only slower than the callers' patience.
func (n *Node) commitLimit() time.Duration {
	return max(n.c.CallTimeout, n.c.StallAfter, 2*n.c.ElectionTimeout)
}

// propose returns Raft's answer, or the reason why there is none within the limit.
func (g *Group) propose(p proposal) error {
	by, err := g.begin(p)
	if err != nil {
		p.over()
		return err
	}
	limit := g.node.commitLimit()
	moves := g.proposing.moves.Load()
	for left, stored := limit+storing(len(p.entry)), storing(len(p.entry)); left > 0; {
		part := min(left, limit/2)
		by.timer.Reset(part)
		forfeit := g.forfeits.next()
		if p.change == nil && g.hasForfeited(p.term) {
			return g.abandon(by, fmt.Errorf("term %d: %w", p.term, g.stallError()))
		}
		select {
		case err := <-by.answer:
			by.timer.Stop()
			return g.release(by, err)
		case <-forfeit:
			continue
		case <-by.timer.C:
		}
		left -= part
		if now := g.proposing.moves.Load(); now != moves { // a large message makes progress
			left, moves = max(left, limit/2), now
		}
		if stored > limit/8 { // the disks of others may be about to store it
			g.proposing.moves.Add(1)
			moves++
		}
	}
	return g.abandon(by, fmt.Errorf("%w within %v: %s", errNotCommitted, limit, g.hindrance()))
}

// abandon leaves a proposal to its proposer, for a reason, unless it has just been answered.
func (g *Group) abandon(by *proposer, why error) error {
	g.proposing.late.Add(1)
	if !by.state.CompareAndSwap(proposalMade, proposalLate) {
		g.proposing.late.Add(-1)
		g.wake() // an election meanwhile has seen the late proposal
		return g.release(by, <-by.answer)
	}
	g.node.log.Warn("entry is not committed", "shard", g.index, "err", why)
	return why
}

// begin hands a proposal to a proposer.
func (g *Group) begin(p proposal) (*proposer, error) {
	if err := g.beginProposal(); err != nil {
		return nil, err
	}
	if g.proposing.late.Load() > 0 {
		g.pendingProposals.leave()
		return nil, g.NotLed()
	}
	by := g.idleProposer()
	by.state.Store(proposalMade)
	select {
	case by.next <- p:
		return by, nil
	case <-by.ended:
		g.pendingProposals.leave()
		return nil, fmt.Errorf("%w: %w", base.ErrNotLeader, g.Failure())
	case <-g.node.ctx.Done():
		g.pendingProposals.leave()
		return nil, fmt.Errorf("%w: %w", base.ErrNotLeader, base.ErrClosed)
	}
}

// over is called when a proposal has been answered, or was not made.
func (p *proposal) over() {
	if p.end != nil {
		p.end()
	}
}

// storing is how long a disk may take to store so many bytes.
func storing(bytes int) time.Duration { return time.Duration(bytes) * time.Second / slowDisk }

// idleProposer returns a proposer that has nothing to do.
func (g *Group) idleProposer() *proposer {
	if by := g.proposing.idle.Swap(nil); by != nil {
		return by
	}
	by := &proposer{
		next: make(chan proposal), ended: make(chan struct{}), answer: make(chan error, 1), timer: time.NewTimer(time.Hour),
	}
	by.state.Store(proposalAnswered)
	g.node.run("proposals", func() { g.carryOut(by) }, func(err error) {
		g.Fail(err)
		close(by.ended)
		g.settle(by, err)
	})
	return by
}

// release keeps a proposer for the next proposal, or ends it.
func (g *Group) release(by *proposer, err error) error {
	select {
	case <-by.ended:
	default:
		if !g.proposing.idle.CompareAndSwap(nil, by) {
			close(by.next)
		}
	}
	return err
}

// carryOut is the goroutine of a proposer. It ends after an answer that no caller waited for, or
// when it is not needed, or with the node.
func (g *Group) carryOut(by *proposer) {
	for {
		select {
		case p, ok := <-by.next:
			if !ok || !g.settle(by, g.put(p)) {
				return
			}
		case <-g.node.ctx.Done():
			return
		}
	}
}

// settle passes on an answer, and reports whether a caller waited for it.
func (g *Group) settle(by *proposer, err error) bool {
	if by.state.CompareAndSwap(proposalMade, proposalAnswered) {
		by.answer <- err
		return true
	}
	if by.state.CompareAndSwap(proposalLate, proposalAnswered) {
		g.node.log.Info("entry is not waited for any more", "shard", g.index, "err", err)
		g.proposing.late.Add(-1)
		g.wake()
	}
	return false
}

// put hands a proposal to Raft, and waits for the answer.
func (g *Group) put(p proposal) error {
	defer g.pendingProposals.leave()
	defer p.over()
	if p.change != nil {
		return p.change().Error()
	}
	if err := g.isIn(p.term); err != nil {
		return err
	}
	f := g.raft.Apply(p.entry, 0)
	if g.raft.CurrentTerm() != p.term {
		// If this node leads again, an entry of the leader in between may be before this one, and
		// waits for the end of the leader on this node: to wait for this one would be a deadlock.
		return fmt.Errorf("term %d is over", p.term)
	}
	if err := f.Error(); err != nil {
		return raftError(err)
	}
	if err, ok := f.Response().(error); ok {
		if errors.Is(err, errOutdated) {
			return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
		}
		return err
	}
	return nil
}

// hindrance gives the reasons why no majority has stored an entry, as far as this node knows.
func (g *Group) hindrance() string {
	why := []string{fmt.Sprintf("node %q leads", g.node.self.Node)}
	if g.stalledFor() > 0 {
		why = append(why, g.stallError().Error())
	}
	members, _ := g.members() // none if the group has ended
	for _, m := range votersOf(members) {
		node, term := peerOf(m).Node, g.raft.CurrentTerm()
		switch {
		case m.ID == g.node.self.ServerID():
		case g.health.outage(m.ID, term) != nil:
			why = append(why, fmt.Sprintf("node %q does not answer", node))
		case g.health.refuses(m.ID):
			why = append(why, fmt.Sprintf("node %q has no room on its disk", node))
		}
	}
	return strings.Join(why, ", ")
}

// NotLed is the reason why the shard is not led here.
func (g *Group) NotLed() error {
	if g.proposing.late.Load() > 0 {
		return fmt.Errorf("%w: shard %d: an entry is not committed: %s", base.ErrNotLeader, g.index, g.hindrance())
	}
	return fmt.Errorf("%w: shard %d is not ready", base.ErrNotLeader, g.index)
}
