package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"

	"codeq/internal/base"
)

// Propose returns when an entry that was decided in a term is in the logs of a majority, and this
// node has applied it. The first EntryHeader bytes of the entry are the group's, and all of them
// from now on. What was not proposed, or has had no effect, matches ErrNotLeader; of any other
// error it is unknown.
//
// While a disk hangs, the goroutines of Raft and of the state machine stand in the store, and do
// not answer. So another goroutine waits for them, and Propose returns when the term is forfeited.
func (g *Group) Propose(term uint64, entry []byte) error {
	binary.BigEndian.PutUint64(entry, term)
	if err := g.beginProposal(); err != nil {
		return err
	}
	if err := g.isIn(term); err != nil {
		g.asking.leave()
		return err
	}
	outcome := make(chan error, 1)
	g.node.background.Go(func() {
		defer g.asking.leave()
		outcome <- g.node.guarded("proposal", func() error { return g.propose(term, entry) })
	})
	for {
		forfeit := g.forfeits.next()
		if g.hasForfeited(term) {
			return fmt.Errorf("term %d: %w", term, g.stallError())
		}
		select {
		case err := <-outcome:
			return err
		case <-forfeit:
		}
	}
}

// propose is Propose for as long as Raft takes.
func (g *Group) propose(term uint64, entry []byte) error {
	f := g.raft.Apply(entry, 0)
	if g.raft.CurrentTerm() != term {
		// If this node leads again, an entry of the leader in between may be before this one, and
		// waits for the end of who decides here: to wait for this one would be a deadlock.
		return fmt.Errorf("term %d is over", term)
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

// isIn returns an error if a term is over, or this node leads in it no more.
func (g *Group) isIn(term uint64) error {
	if g.hasForfeited(term) {
		return fmt.Errorf("%w: term %d: %w", base.ErrNotLeader, term, g.stallError())
	}
	if g.raft.CurrentTerm() != term {
		return fmt.Errorf("%w: term %d is over", base.ErrNotLeader, term)
	}
	return nil
}
