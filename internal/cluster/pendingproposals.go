package cluster

import (
	"cmp"
	"fmt"
	"sync"

	"codeq/internal/base"
)

// pendingProposals counts the proposals that Raft has not answered.
type pendingProposals struct {
	mu    sync.Mutex // guards the fields below
	count int
	over  chan struct{} // closed when all have been answered; nil: more may come
}

// enter admits one more proposal, and reports whether it did. The caller then calls leave.
func (p *pendingProposals) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over != nil {
		return false
	}
	p.count++
	return true
}

func (p *pendingProposals) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count--
	if p.count == 0 && p.over != nil {
		close(p.over)
	}
}

// end admits no more proposals, and returns a channel that is closed when all are answered.
func (p *pendingProposals) end() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over == nil {
		p.over = make(chan struct{})
		if p.count == 0 {
			close(p.over)
		}
	}
	return p.over
}

// beginProposal admits a proposal to Raft, which answers it; the caller then calls
// pendingProposals.leave. It never waits.
func (g *Group) beginProposal() error {
	if g.Failure() != nil || !g.pendingProposals.enter() {
		return fmt.Errorf("%w: %w", base.ErrNotLeader, cmp.Or(g.Failure(), base.ErrClosed))
	}
	return nil
}
