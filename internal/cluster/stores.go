package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
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
	votes := newVotes(g.node.stable.Group(uint32(g.index)), g)
	term, err := votes.GetUint64([]byte(keyCurrentTerm))
	raise(&g.latestTerm, term)
	return g.log, votes, err
}

func (g *Group) openLog() error {
	n := g.node
	group, err := n.logs.Group(uint32(g.index))
	if err != nil {
		return err
	}
	g.log = &groupLog{LogStore: n.c.Log(group), group: g}
	snapshots, err := g.snapshots.List()
	if err != nil {
		return err
	}
	for _, s := range snapshots { // at most one
		g.log.snapshot = Position{s.Index, s.Term}
	}
	return nil
}

// lose lets the group fail if what Raft keeps has, and not only been closed.
func (g *Group) lose(cause error) {
	if !errors.Is(cause, raftlog.ErrClosed) {
		g.Fail(damageOf(cause))
	}
}

// errNotStored: Raft was refused a place for an entry or vote before any of it was written.
var errNotStored = errors.New("nothing of it was stored")

// groupLog is the log of a group.
type groupLog struct {
	LogStore
	group *Group
	cut   atomic.Bool // the end has been deleted, and nothing stored in its place yet
	grown changes     // entries have been stored

	snapshot Position                  // that of the snapshot when the node was opened
	raft     atomic.Pointer[raft.Raft] // nil: its goroutines begin
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
	if err == nil || errors.Is(err, raft.ErrLogNotFound) || !l.group.running {
		return err
	}
	l.group.lose(err)
	*log = raft.Log{Index: index, Type: raft.LogNoop}
	return nil
}

// StoreLog is raft.LogStore's.
func (l *groupLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs is raft.LogStore's. What takes the place of a deleted end is not refused, even if the
// disk is full: Raft would take the old end for what is there. Neither is a change of the members,
// for which reconfigure has found room; and if it fails, so does the group, since a leader goes by
// a change whether it is stored or not.
func (l *groupLog) StoreLogs(logs []*raft.Log) error {
	if err := l.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	bytes, last := 0, l.group.applied.get()
	for _, log := range logs {
		if isReference(log) {
			return fmt.Errorf("%w: entry %d has no data", errNotStored, log.Index)
		}
		bytes += len(log.Data)
		if err := last.admits(Position{log.Index, log.Term}); err != nil {
			return l.diverged(err)
		}
	}
	full, cut, members := l.full(bytes), l.cut.Load(), l.changesMembers(logs)
	if full && !cut && !members {
		return errNoRoom
	}
	err := l.LogStore.StoreLogs(logs)
	l.grown.changed()
	founding, first := l.group.node.founding.Load(), logs[0].Index == 1
	begins := founding && first // by Node.begin, which fails if this does
	stored := err == nil
	if stored && (first || founding) {
		// The founders of the cluster are durable at any level: a node that knows nobody takes no
		// part in elections, and nobody would be told why.
		err = l.flush(l.group.running && !begins)
	}
	switch {
	case err == nil:
		l.cut.Store(false)
	case l.group.running && (stored && !begins || cut || members || errors.Is(err, raftlog.ErrFailed)): // or else Raft would try for ever
		l.group.lose(err)
	}
	return err
}

// flush makes the log durable. After an error Raft would store again, in vain, what is there
// already. So flush waits for room on a full disk, if it may, until the group or the node ends.
func (l *groupLog) flush(waits bool) error {
	for {
		err := l.group.node.logs.Flush()
		if !failstop.IsNoSpace(err) || !waits {
			return err
		}
		select {
		case <-time.After(refusedPause):
		case <-l.group.node.quit:
			return raftlog.ErrClosed
		}
		if err := l.group.Failure(); err != nil {
			return err
		}
	}
}

// changesMembers reports whether this node, as the leader, is to store a change of the members.
func (l *groupLog) changesMembers(logs []*raft.Log) bool {
	r := l.raft.Load()
	return len(logs) == 1 && logs[0].Type == raft.LogConfiguration && r != nil && r.State() == raft.Leader
}

// DeleteRange is raft.LogStore's. The oldest entries, or all, may always be deleted.
func (l *groupLog) DeleteRange(from, through uint64) error {
	if err := l.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	first, last, err := l.bounds()
	if err != nil {
		return err
	}
	if through >= last && from > first {
		if err := l.mayReplace(from); err != nil {
			return l.diverged(err)
		}
		if l.full(0) {
			return errNoRoom
		}
	}
	err = l.LogStore.DeleteRange(from, through)
	if err == nil && through >= last {
		l.cut.Store(true)
	}
	return err
}

func (l *groupLog) bounds() (first, last uint64, err error) {
	first, err = l.FirstIndex()
	if err == nil {
		last, err = l.LastIndex()
	}
	return first, last, err
}

// mayReplace returns an error if Raft has given the entry at an index to the state machine: it
// would not give it the one that comes in its place. Up to the snapshot, what an interrupted
// installation has left of the log may be replaced.
func (l *groupLog) mayReplace(index uint64) error {
	r := l.raft.Load()
	if r == nil || index <= l.snapshot.Index || index > r.AppliedIndex() {
		return nil
	}
	return fmt.Errorf("%w: entry %d of the log was applied, and a leader has another one in its place; %s",
		base.ErrDiverged, index, wayOut)
}

// diverged lets the group fail, and returns an error for what was to be stored.
func (l *groupLog) diverged(err error) error {
	l.group.Fail(err)
	return fmt.Errorf("%w: %w", errNotStored, err)
}

// compare returns an error if the log in which the node is opened contradicts the store. It may end
// before the store does, or have an entry of an earlier term there, when a crash has come between
// the installation of a snapshot and the end of the log from before, or a power loss has taken its
// end. What a leader then sends in place of that is compared as it comes.
func (l *groupLog) compare() error {
	last := l.group.applied.get()
	if _, end, err := l.bounds(); err != nil {
		return err
	} else if end == 0 && l.snapshot == (Position{}) && last != (Position{}) {
		return fmt.Errorf("%w: the store has entry %d of term %d, the log is lost; %s", base.ErrDiverged, last.Index, last.Term, wayOut)
	}
	at, err := l.position(last.Index)
	if err != nil || at.Term < last.Term {
		return err
	}
	return last.admits(at)
}

// continues returns an error if the log, which has more than the store, has something else in the
// place of the store's last entry. If it does not have it any more, a snapshot has proved as much.
func (l *groupLog) continues() error {
	last := l.group.applied.get()
	at, err := l.position(last.Index)
	if err != nil || at == (Position{}) {
		return err
	}
	return last.admits(at)
}

// position is that of the entry at an index; the zero Position if there is none.
func (l *groupLog) position(index uint64) (Position, error) {
	var log raft.Log
	err := l.LogStore.GetLog(index, &log)
	if errors.Is(err, raft.ErrLogNotFound) {
		return Position{}, nil
	}
	return Position{log.Index, log.Term}, err
}

// holds reports whether Raft has given all entries up to an index to the state machine, and none of
// its snapshots is beyond that.
func (l *groupLog) holds(index uint64) bool {
	r := l.raft.Load()
	if r == nil || l.group.Failure() != nil || index > r.AppliedIndex() {
		return false
	}
	snapshots, err := l.group.snapshots.List()
	return err == nil && (len(snapshots) == 0 || snapshots[0].Index <= index)
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
//
// Raft handles heartbeats on goroutines of their own, and may go back to the term of one when
// another message has just told it a later one. Then it would vote again: in a term in which it has
// voted, or in one before. So neither the term nor the vote goes back here, whatever Raft asks for.
type groupVotes struct {
	raft.StableStore
	group *Group
	term  uint64 // of the next vote; only the goroutine that votes uses it
	// storing has an element while what is stored is compared with what comes, and replaced. It is
	// a channel, as what waits for it may wait for as long as the disk does.
	storing chan struct{} // capacity 1
}

func newVotes(stable raft.StableStore, g *Group) *groupVotes {
	return &groupVotes{StableStore: stable, group: g, storing: make(chan struct{}, 1)}
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
	v.storing <- struct{}{}
	defer func() { <-v.storing }()
	if string(key) == keyCurrentTerm {
		if value < v.group.latestTerm.Load() {
			return nil
		}
		raise(&v.group.latestTerm, value)
	}
	err := v.store(func() error { return v.StableStore.SetUint64(key, value) })
	if string(key) == keyCurrentTerm && v.group.running {
		return nil
	}
	return err
}

// Set is raft.StableStore's.
func (v *groupVotes) Set(key, value []byte) error {
	v.storing <- struct{}{}
	defer func() { <-v.storing }()
	if string(key) == keyVote {
		if err := v.mayVote(value); err != nil {
			return fmt.Errorf("%w: %w", errNotStored, err)
		}
	}
	return v.store(func() error {
		err := v.StableStore.Set(key, value)
		if err != nil || string(key) != keyVote {
			return err
		}
		return v.StableStore.SetUint64([]byte(keyVoteTerm), v.term)
	})
}

// mayVote returns an error if there is a later term, or another vote in this one. REQUIRES:
// storing has an element.
func (v *groupVotes) mayVote(candidate []byte) error {
	if latest := v.group.latestTerm.Load(); v.term < latest {
		return fmt.Errorf("vote in term %d, after term %d", v.term, latest)
	}
	term, err := v.GetUint64([]byte(keyVoteTerm))
	if err != nil || term != v.term {
		return err
	}
	vote, err := v.Get([]byte(keyVote))
	if err == nil && !bytes.Equal(vote, candidate) {
		err = fmt.Errorf("vote in term %d for %q, after one for %q", v.term, candidate, vote)
	}
	return err
}

// raise stores a value unless there is a larger one.
func raise(to *atomic.Uint64, value uint64) {
	for old := to.Load(); old < value && !to.CompareAndSwap(old, value); old = to.Load() {
	}
}

func (v *groupVotes) store(write func() error) error {
	if err := v.group.Failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	err := v.group.node.logDisk().Do("write", manifest.VotesFile, write) // bbolt uses no vfs.FS
	if err != nil && v.group.running {
		v.group.lose(err)
	}
	return err
}
