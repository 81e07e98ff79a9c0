package codeq

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"

	"codeq/internal/raftlog"
	"codeq/internal/snapshot"
)

// Raft panics on goroutines of its own, which ends the process, when it cannot
// store its term or read a committed entry. It therefore has replicaVotes and
// replicaLog, which make the replica fail instead and answer as if nothing were
// wrong: the goroutine that asks must go on, since what has been proposed is to be
// answered before Raft is shut down; see replica.fail.
//
// Invariant: a replica that has failed vouches for nothing, so that nobody relies
// on a term that was not stored, or an entry that was not read. It stores neither
// votes nor entries: it grants and acknowledges none, and a leader steps down. It
// applies nothing (stateMachine), and sends nothing to its followers (transport). That
// it answers a heartbeat says only that it knows of no later term, which is so.
//
// Before Raft's goroutines begin, Raft gets the errors; startRaft catches what it panics with.

// stores are where Raft keeps the log of a shard, and the votes.
func (n *node) stores(r *replica) (*replicaLog, *replicaVotes, error) {
	group, err := n.logs.Group(uint32(r.index))
	if err != nil {
		return nil, nil, err
	}
	log := &replicaLog{groupLog: n.opts.log(group), replica: r}
	return log, &replicaVotes{StableStore: n.stable.Group(uint32(r.index)), replica: r}, nil
}

// lose has the replica fail if what Raft keeps has, and not only been closed.
func (r *replica) lose(cause error) {
	if !errors.Is(cause, raftlog.ErrClosed) {
		r.fail(cause)
	}
}

// errNotStored: Raft was refused a place for an entry or vote before any of it was written.
var errNotStored = errors.New("nothing of it was stored")

// replicaLog is the log of a replica.
type replicaLog struct {
	groupLog
	replica *replica
	cut     atomic.Bool // the end has been deleted, and nothing stored in its place yet
}

// groupLog is what raftlog.Group is.
type groupLog interface {
	raft.LogStore
	raft.MonotonicLogStore
}

// GetLog is raft.LogStore's. In place of an entry that cannot be read there is one
// of term 0 that does nothing: the replica has failed by then.
func (l *replicaLog) GetLog(index uint64, log *raft.Log) error {
	err := l.groupLog.GetLog(index, log)
	if err == nil || err == raft.ErrLogNotFound || !l.replica.running {
		return err
	}
	l.replica.lose(err)
	*log = raft.Log{Index: index, Type: raft.LogNoop}
	return nil
}

// StoreLog is raft.LogStore's.
func (l *replicaLog) StoreLog(log *raft.Log) error { return l.StoreLogs([]*raft.Log{log}) }

// StoreLogs is raft.LogStore's. What takes the place of a deleted end is not
// refused, even if the disk is full: Raft would take the old end for what is there.
func (l *replicaLog) StoreLogs(logs []*raft.Log) error {
	if err := l.replica.failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	bytes := 0
	for _, log := range logs {
		bytes += len(log.Data)
	}
	full, cut := l.full(bytes), l.cut.Load()
	if full && !cut {
		return errNoRoom
	}
	err := l.groupLog.StoreLogs(logs)
	if cut && err == nil {
		l.cut.Store(false)
	} else if cut && l.replica.running {
		l.replica.lose(err)
	}
	return err
}

// DeleteRange is raft.LogStore's. The oldest entries, or all, may always be deleted.
func (l *replicaLog) DeleteRange(from, through uint64) error {
	if err := l.replica.failure(); err != nil {
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
	err = l.groupLog.DeleteRange(from, through)
	if err == nil && through >= last {
		l.cut.Store(true)
	}
	return err
}

func (l *replicaLog) full(bytes int) bool {
	n := l.replica.node
	return l.replica.running && (n.room.full(bytes) || !n.logs.HasSpace())
}

// replicaVotes are the term and the vote of a replica. After any error of theirs it
// has failed: it is unknown what was stored.
//
// Raft stores the term of a vote, then the vote. If a crash came between the two,
// the vote before would be one in the new term, and Raft grants a vote that was
// granted without a look at the log of the candidate. So the vote is stored first:
// then it is one in an old term, in which nobody is elected any more.
type replicaVotes struct {
	raft.StableStore
	replica *replica
	term    uint64 // of the next vote; only the goroutine that votes uses it
}

// The keys of Raft.
const (
	keyCurrentTerm = "CurrentTerm"
	keyVoteTerm    = "LastVoteTerm"
	keyVote        = "LastVoteCand"
)

// SetUint64 is raft.StableStore's.
func (v *replicaVotes) SetUint64(key []byte, value uint64) error {
	if string(key) == keyVoteTerm {
		v.term = value // Set stores it
		return nil
	}
	err := v.store(func() error { return v.StableStore.SetUint64(key, value) })
	if string(key) == keyCurrentTerm && v.replica.running {
		return nil
	}
	return err
}

// Set is raft.StableStore's.
func (v *replicaVotes) Set(key, value []byte) error {
	return v.store(func() error {
		err := v.StableStore.Set(key, value)
		if err != nil || string(key) != keyVote {
			return err
		}
		return v.StableStore.SetUint64([]byte(keyVoteTerm), v.term)
	})
}

func (v *replicaVotes) store(write func() error) error {
	if err := v.replica.failure(); err != nil {
		return fmt.Errorf("%w: %w", errNotStored, err)
	}
	err := write()
	if err != nil && v.replica.running {
		v.replica.lose(err)
	}
	return err
}

// replicaSnapshots are the snapshots of a replica.
type replicaSnapshots struct {
	*snapshot.Store
	room *logRoom
}

// Create is raft.SnapshotStore's.
func (s replicaSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, members raft.Configuration, membersIndex uint64, trans raft.Transport,
) (raft.SnapshotSink, error) {
	sink, err := s.Store.Create(version, index, term, members, membersIndex, trans)
	if err != nil {
		return nil, err
	}
	return &replicaSink{sink.(*snapshot.Sink), s.room}, nil
}

// replicaSink is a snapshot that is being taken or received.
type replicaSink struct {
	*snapshot.Sink
	room *logRoom
}

// Write takes the next part of a snapshot that is received.
func (k *replicaSink) Write(p []byte) (int, error) {
	if k.room.full(len(p)) {
		return 0, errNoRoom
	}
	return k.Sink.Write(p)
}

// logRoom is whether there is room on the disk of a node for what leaders send it.
// A follower decides nothing, so diskSpace is not asked; but a log that meets the
// end of its disk fails until the node is opened again. So it is refused, before
// any of it is written, what would leave less than a quarter of Options.MinFreeBytes;
// its leader tries again. A leader has refused its callers long before.
//
// The file system is asked as often as by diskSpace. All replicas of a node share it;
// all methods may be called concurrently.
type logRoom struct {
	fs    vfs.FS
	dir   string
	least uint64 // bytes; 0: no limit
	log   *slog.Logger

	begin  time.Time    // of the clock of next
	next   atomic.Int64 // when to ask again, in ms
	stored atomic.Int64 // bytes since it was asked
	isFull atomic.Bool
	tight  atomic.Bool // space is to be reclaimed
}

// errNoRoom is made once: a leader tries again and again.
var errNoRoom = fmt.Errorf("%w: %w", errNotStored, ErrDiskFull)

func newLogRoom(opts *Options, dir string, log *slog.Logger) *logRoom {
	return &logRoom{
		fs: opts.fs, dir: dir, least: uint64(max(opts.MinFreeBytes, 0)) / 4, log: log, begin: time.Now(),
	}
}

// full reports whether so many bytes must not be stored.
func (d *logRoom) full(bytes int) bool {
	if d.least == 0 {
		return false
	}
	now, next := time.Since(d.begin).Milliseconds(), d.next.Load()
	if now < next && d.stored.Add(int64(bytes)) < lookBytes || !d.next.CompareAndSwap(next, now+lookEveryFull) {
		return d.isFull.Load() // somebody else asks, if it is time to
	}
	d.stored.Store(0)
	usage, err := d.fs.GetDiskUsage(d.dir)
	full := err == nil && usage.AvailBytes < d.least
	d.tight.Store(err == nil && isTight(usage.AvailBytes, 4*d.least))
	if !full {
		d.next.Store(now + lookEvery)
	}
	if d.isFull.Swap(full) != full {
		d.log.Warn("room on the disk for what leaders send", "free", usage.AvailBytes, "refused", full)
	}
	return full
}
