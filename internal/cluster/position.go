package cluster

import (
	"fmt"
	"sync"

	"codeq/internal/base"
)

// Position is a place in a log: the index and the term of an entry. In Raft, logs that have an
// entry of the same position are the same up to there, and terms never decrease.
type Position struct{ Index, Term uint64 }

// admits returns an error if a log with an entry at p cannot have one at e.
//
// The log of a node may end before its store, since a checkpoint that a leader sends is ahead of
// its snapshot. Then a leader sends entries that the store has. They need not be the same: below
// DurabilityDisk a power loss takes the end of a log, perhaps on a majority of the nodes, which
// then continue from the rest, under new terms.
func (p Position) admits(e Position) error {
	if e.Index == p.Index && e.Term == p.Term || e.Index < p.Index && e.Term <= p.Term || e.Index > p.Index && e.Term >= p.Term {
		return nil
	}
	return fmt.Errorf("%w: the store has entry %d of term %d, the log has entry %d of term %d; %s",
		base.ErrDiverged, p.Index, p.Term, e.Index, e.Term, wayOut)
}

const wayOut = "ReplaceNode puts a new node in the place of this one; " +
	"if it has what the others have lost, RecoverCluster lets it go on alone"

// lastApplied is the position of the last entry in a store. Raft's goroutines read it.
type lastApplied struct {
	mu sync.Mutex // guards at
	at Position
}

func (l *lastApplied) get() Position {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

func (l *lastApplied) set(at Position) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at = at
}
