package cluster

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/raftlog"
)

// Raft panics on goroutines of its own, which ends the process, when it cannot
// store its term or read a committed entry. It therefore gets groupVotes and
// groupLog, which make the replica fail instead and answer as if nothing were
// wrong: the goroutine that asks must go on, since what has been proposed is to be
// answered before Raft is shut down; see Group.Fail.
//
// Invariant: a replica that has failed vouches for nothing, so that nobody relies
// on a term that was not stored, or an entry that was not read. It stores neither
// votes nor entries: it grants and acknowledges none, and a leader steps down. It
// applies nothing (fsm), and sends nothing to its followers (transport). That
// it answers a heartbeat says only that it knows of no later term, which is so.
//
// Before Raft's goroutines begin, Raft gets the errors; Group.start catches what it panics with.

// stores are where Raft keeps the log of a shard, and the votes.
func (g *Group) stores() (*groupLog, *groupVotes, error) {
	n := g.node
	group, err := n.logs.Group(uint32(g.index))
	if err != nil {
		return nil, nil, err
	}
	g.log = &groupLog{LogStore: n.c.Log(group), group: g}
	return g.log, &groupVotes{StableStore: n.stable.Group(uint32(g.index)), group: g}, nil
}

// lose lets the group fail if what Raft keeps has, and not only been closed.
func (g *Group) lose(cause error) {
	if !errors.Is(cause, raftlog.ErrClosed) {
		g.Fail(cause)
	}
}

// errNotStored: Raft was refused a place for an entry or vote before any of it was written.
var errNotStored = errors.New("nothing of it was stored")

// groupLog is the log of a group.
type groupLog struct {
	LogStore
	group *Group
	cut   atomic.Bool // the end has been deleted, and nothing stored in its place yet
}

// LogStore is what raftlog.Group is.
type LogStore interface {
	raft.LogStore
	raft.MonotonicLogStore
	GetHead(index uint64, log *raft.Log) (data int, err error)
}

// GetLog is raft.LogStore's. In place of a large entry there is a reference. In place of one that
// cannot be read there is one of term 0 that does nothing: the replica has failed by then.
func (l *groupLog) GetLog(index uint64, log *raft.Log) error {
	data, err := l.GetHead(index, log)
	if err == nil && data > 0 {
		refer(log, data)
	}
	if err == nil || err == raft.ErrLogNotFound || !l.group.running {
		return err
	}
	l.group.lose(err)
	*log = raft.Log{Index: index, Type: raft.LogNoop}
	return nil
}

// StoreLog is raft.LogStore's.
func (l *groupLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs is raft.LogStore's. What takes the place of a deleted end is not
// refused, even if the disk is full: Raft would take the old end for what is there.
func (l *groupLog) StoreLogs(logs []*raft.Log) error {
	if err := l.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	bytes := 0
	for _, log := range logs {
		if isReference(log) {
			return fmt.Errorf("%w: entry %d has no data", errNotStored, log.Index)
		}
		bytes += len(log.Data)
	}
	full, cut := l.full(bytes), l.cut.Load()
	if full && !cut {
		return errNoRoom
	}
	err := l.LogStore.StoreLogs(logs)
	if cut && err == nil {
		l.cut.Store(false)
	} else if cut && l.group.running {
		l.group.lose(err)
	}
	return err
}

// DeleteRange is raft.LogStore's. The oldest entries, or all, may always be deleted.
func (l *groupLog) DeleteRange(from, through uint64) error {
	if err := l.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	first, err := l.FirstIndex()
	if err != nil {
		return err
	}
	last, err := l.LastIndex()
	if err != nil {
		return err
	}
	if through >= last && from > first && l.full(0) {
		return errNoRoom
	}
	err = l.LogStore.DeleteRange(from, through)
	if err == nil && through >= last {
		l.cut.Store(true)
	}
	return err
}

func (l *groupLog) full(bytes int) bool {
	n := l.group.node
	return l.group.running && (n.room.full(bytes) || !n.logs.HasSpace())
}

// groupVotes are the term and the vote of a replica. After any error of theirs it
// has failed: it is unknown what was stored.
//
// Raft stores the term of a vote, then the vote. If a crash came between the two,
// the vote before would be one in the new term, and Raft grants a vote that was
// granted without a look at the log of the candidate. So the vote is stored first:
// then it is one in an old term, in which nobody is elected any more.
type groupVotes struct {
	raft.StableStore
	group *Group
	term  uint64 // of the next vote; only the goroutine that votes uses it
}

// The keys of Raft.
const (
	keyCurrentTerm = "CurrentTerm"
	keyVoteTerm    = "LastVoteTerm"
	keyVote        = "LastVoteCand"
)

// SetUint64 is raft.StableStore's.
func (v *groupVotes) SetUint64(key []byte, value uint64) error {
	if string(key) == keyVoteTerm {
		v.term = value // Set stores it
		return nil
	}
	err := v.store(func() error { return v.StableStore.SetUint64(key, value) })
	if string(key) == keyCurrentTerm && v.group.running {
		return nil
	}
	return err
}

// Set is raft.StableStore's.
func (v *groupVotes) Set(key, value []byte) error {
	return v.store(func() error {
		err := v.StableStore.Set(key, value)
		if err != nil || string(key) != keyVote {
			return err
		}
		return v.StableStore.SetUint64([]byte(keyVoteTerm), v.term)
	})
}

func (v *groupVotes) store(write func() error) error {
	if err := v.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	err := write()
	if err != nil && v.group.running {
		v.group.lose(err)
	}
	return err
}
