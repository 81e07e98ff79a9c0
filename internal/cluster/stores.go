package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
)

// Raft panics on goroutines of its own, which ends the process, when it cannot store its term or
// read a committed entry. So it gets groupVotes and groupLog, which make the replica fail instead
// and return no error: the calling goroutine must go on, since proposals must be answered before
// Raft is shut down; see Group.Fail.
//
// Invariant: a replica that has failed confirms nothing, so that no node relies on a term that was
// not stored, or an entry that was not read. It stores neither votes nor entries: it grants and
// acknowledges none, and a leader steps down. It applies nothing (fsm), and sends nothing to its
// followers (transport). Its answer to a heartbeat says only that it knows no later term, which is
// true.
//
// Before Raft's goroutines begin, Raft gets the errors; Group.start catches its panics.

// stores returns Raft's storage of a shard: its log and its votes.
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

// lose makes the group fail after an error of Raft's storage, unless that was only closed.
func (g *Group) lose(cause error) {
	if !errors.Is(cause, raftlog.ErrClosed) {
		g.Fail(damageOf(cause))
	}
}

// errNotStored: Raft's write was refused before any of it was stored.
var errNotStored = errors.New("nothing of it was stored")

// groupLog is the log of a group.
type groupLog struct {
	LogStore
	group *Group
	cut   atomic.Bool // the end has been deleted, and nothing stored in its place yet
	grown notifier    // changes when entries are stored

	snapshot Position                  // position of the snapshot when the node was opened
	raft     atomic.Pointer[raft.Raft] // nil: its goroutines begin
}

// LogStore is the interface of raftlog.Group.
type LogStore interface {
	raft.LogStore
	raft.MonotonicLogStore
	GetHead(index uint64, log *raft.Log) (data int, err error)
}

// GetLog implements raft.LogStore. In place of a large entry it returns a reference. In place of an
// entry that cannot be read it returns one of term 0 that does nothing: the replica has failed by
// then.
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

// StoreLog implements raft.LogStore.
func (l *groupLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs implements raft.LogStore. Entries in place of a deleted end are not refused, even if
// the disk is full: Raft would take the old end for the present one. Neither is a change of the
// members: reconfigure has found room for it; and if it fails, so does the group, since a leader
// acts on a change whether it is stored or not.
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
	l.grown.notify()
	founding, first := l.group.node.founding.Load(), logs[0].Index == 1
	begins := founding && first // by Node.begin, which returns the error
	stored := err == nil
	if stored && (first || founding) {
		// The founders of the cluster are durable at any level: a node that knows no members takes
		// no part in elections, and gives no reason.
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

// flush makes the log durable. After an error Raft would store the same entries again, without
// effect. So flush waits for room on a full disk, if it may, until the group or the node ends.
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

// changesMembers reports whether this node, as the leader, stores a change of the members.
func (l *groupLog) changesMembers(logs []*raft.Log) bool {
	r := l.raft.Load()
	return len(logs) == 1 && logs[0].Type == raft.LogConfiguration && r != nil && r.State() == raft.Leader
}

// DeleteRange implements raft.LogStore. The oldest entries, or all, may always be deleted.
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

// mayReplace returns an error if Raft has passed the entry at an index to the state machine: it
// would not pass the one that replaces it. Up to the snapshot, log left by an interrupted
// installation may be replaced.
func (l *groupLog) mayReplace(index uint64) error {
	r := l.raft.Load()
	if r == nil || index <= l.snapshot.Index || index > r.AppliedIndex() {
		return nil
	}
	return fmt.Errorf("%w: entry %d of the log was applied, and a leader has another one in its place; %s",
		base.ErrDiverged, index, wayOut)
}

// diverged makes the group fail, and returns an error for the refused write.
func (l *groupLog) diverged(err error) error {
	l.group.Fail(err)
	return fmt.Errorf("%w: %w", errNotStored, err)
}

// compare returns an error if the log contradicts the store when the node is opened. The log may
// end before the store, or have an entry of an earlier term there, when a crash has come between
// the installation of a snapshot and the deletion of the old log, or a power loss has taken the end
// of the log. Entries that a leader then sends in its place are compared as they come.
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

// continues returns an error if the log, which is longer than the store, has another entry in the
// place of the store's last one. If it no longer has that place, a snapshot has proved the same.
func (l *groupLog) continues() error {
	last := l.group.applied.get()
	at, err := l.position(last.Index)
	if err != nil || at == (Position{}) {
		return err
	}
	return last.admits(at)
}

// position is the position of the entry at an index; the zero Position if there is none.
func (l *groupLog) position(index uint64) (Position, error) {
	var log raft.Log
	err := l.LogStore.GetLog(index, &log)
	if errors.Is(err, raft.ErrLogNotFound) {
		return Position{}, nil
	}
	return Position{log.Index, log.Term}, err
}

// holds reports whether Raft has passed all entries up to an index to the state machine, and none
// of its snapshots is after that.
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

// groupVotes are the term and the vote of a replica. After any error of theirs the replica has
// failed: the stored values are unknown.
//
// Raft stores the term of a vote, then the vote. After a crash between the two, the vote before
// would count in the new term, and Raft repeats a granted vote without checking the log of the
// candidate. So the vote is stored first: then it is one in an old term, and no node is elected in
// that any more.
//
// Raft handles heartbeats on goroutines of their own, and may go back to the term of one when
// another message has just brought a later one. Then it would vote again: in a term that has its
// vote, or in an earlier one. So neither the term nor the vote goes back here, whatever Raft
// stores.
type groupVotes struct {
	raft.StableStore
	group   *Group
	term    uint64        // of the next vote; only the goroutine that votes uses it
	storing slowlock.Lock // held while a stored value is compared with a new one, and replaced
}

func newVotes(stable raft.StableStore, g *Group) *groupVotes {
	return &groupVotes{StableStore: stable, group: g, storing: slowlock.New()}
}

// The keys of Raft.
const (
	keyCurrentTerm = "CurrentTerm"
	keyVoteTerm    = "LastVoteTerm"
	keyVote        = "LastVoteCand"
)

// SetUint64 implements raft.StableStore.
func (v *groupVotes) SetUint64(key []byte, value uint64) error {
	if string(key) == keyVoteTerm {
		v.term = value // Set stores it
		return nil
	}
	v.storing.Lock()
	defer v.storing.Unlock()
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

// Set implements raft.StableStore.
func (v *groupVotes) Set(key, value []byte) error {
	v.storing.Lock()
	defer v.storing.Unlock()
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

// mayVote returns an error if there is a later term, or another vote in this one. REQUIRES: storing
// is held.
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
