package codeq

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// With Options.Cluster, the batch of a group is an entry in the log of the
// shard's Raft group. The leader has decided everything that is in it, times
// and IDs included; to apply an entry is to write its bytes, on every replica
// the same ones in the same order.
//
// Invariant: the index of the last entry that a store has applied is written in
// the batch of that entry, so that none is applied twice, whatever Raft replays;
// keys that are written once and removed by SINGLEDEL rely on it.
//
// Invariant: an entry has an effect only if it was decided in the term in which
// it is in the log. A leader that is deposed and elected again has other
// entries in between, and what it had decided before them no longer holds.

// entry is what a group of operations is in the log of Raft:
//
//	term    8 bytes  in which it was decided
//	length  4 bytes  of the batch
//	batch            Pebble's representation; may be empty
//	broadcast        what callers and subscribers on all nodes learn
type entry struct {
	term      uint64
	batch     []byte
	broadcast []byte
}

const entryHeader = 8 + 4

func (e *entry) append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint64(dst, e.term)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(e.batch)))
	return append(append(dst, e.batch...), e.broadcast...)
}

// parseEntry takes an entry apart. The parts alias b.
func parseEntry(b []byte) (entry, error) {
	if len(b) < entryHeader {
		return entry{}, fmt.Errorf("%w: log entry of %d bytes", ErrCorrupt, len(b))
	}
	e := entry{term: binary.BigEndian.Uint64(b)}
	n := uint64(binary.BigEndian.Uint32(b[8:]))
	if b = b[entryHeader:]; n > uint64(len(b)) {
		return entry{}, fmt.Errorf("%w: log entry with a batch of %d bytes in %d", ErrCorrupt, n, len(b))
	}
	e.batch, e.broadcast = b[:n], b[n:]
	return e, nil
}

// errOutdated is the outcome of an entry that was decided in another term than
// the one in which it is in the log.
var errOutdated = errors.New("decided in an earlier term")

// stateMachine applies the log of a shard's Raft group to the replica's store.
// Raft calls its methods from one goroutine.
type stateMachine struct {
	replica *replica
	batch   *pebble.Batch // nil after a restore
	buf     []byte        // memory of batch
}

// Apply applies an entry. What it returns is nil, errOutdated, or why the store
// has failed; after that nothing more is applied, and the node leaves the group.
func (m *stateMachine) Apply(l *raft.Log) (outcome any) {
	contain(m.replica.node.log, "state machine", func() { outcome = m.apply(l) }, func(err error) {
		m.replica.fail(err)
		outcome = err
	})
	return outcome
}

func (m *stateMachine) apply(l *raft.Log) any {
	r := m.replica
	if err := r.failure(); err != nil {
		return err
	}
	if l.Index <= r.applied.Load() {
		return nil
	}
	e, err := parseEntry(l.Data)
	if err == nil {
		if e.term != l.Term {
			return errOutdated
		}
		r.observeTerm(l.Term)
		err = m.write(&e, l)
	}
	if err != nil {
		err = fmt.Errorf("apply entry %d: %w", l.Index, err)
		r.fail(err)
		return err
	}
	r.applied.Store(l.Index)
	r.progress.changed()
	if l.Index > r.replayed { // what came before has been told
		if err := r.publish(e.broadcast); err != nil {
			r.node.log.Error("broadcast lost", "shard", r.index, "err", err)
		}
	}
	r.grow(int64(len(l.Data)))
	return nil
}

// write commits an entry's batch with its index. Pebble keeps the memory of a
// large batch until it is flushed.
func (m *stateMachine) write(e *entry, l *raft.Log) error {
	st := m.replica.store
	large := len(e.batch) > largeBatch
	if m.batch == nil || large {
		m.batch, m.buf = st.DB().NewBatch(), nil
	}
	b := m.batch
	b.Reset()
	ranged, trimmed := false, false
	if len(e.batch) > 0 {
		// Pebble writes into the bytes of a batch, and those of the log are
		// still on their way to other nodes.
		m.buf = append(m.buf[:0], e.batch...)
		var err error
		if ranged, trimmed, err = setRepr(b, m.buf); err != nil {
			return err
		}
	}
	var key [1]byte
	op := b.SetDeferred(len(key), keys.AppliedLen)
	op.Key[0] = keys.Applied
	keys.PutApplied(op.Value, l.Index, l.Term)
	if err := op.Finish(); err != nil {
		return store.Error(err)
	}
	if err := st.Commit(b); err != nil {
		return err
	}
	if ranged {
		st.DeletedRanges(trimmed)
	}
	if m.replica.node.room.tight.Load() {
		st.Reclaim(4 * m.replica.node.room.least)
	}
	m.buf = b.Repr()[:0]
	if large {
		m.batch = nil
	}
	return nil
}

// setRepr has a batch consist of these bytes, if they are one: Pebble panics in
// the middle of a commit if they are not. ranged says that it deletes by range, trimmed that it does so
// what is consumed of lanes.
func setRepr(b *pebble.Batch, repr []byte) (ranged, trimmed bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: batch: %v", ErrCorrupt, p)
		}
	}()
	if err := b.SetRepr(repr); err != nil {
		return false, false, fmt.Errorf("%w: batch: %w", ErrCorrupt, err)
	}
	n, r := uint32(0), b.Reader()
	for {
		kind, key, _, ok, err := r.Next()
		if err != nil {
			return false, false, fmt.Errorf("%w: batch: %w", ErrCorrupt, err)
		}
		if !ok {
			break
		}
		switch kind {
		case pebble.InternalKeyKindSet, pebble.InternalKeyKindDelete, pebble.InternalKeyKindSingleDelete:
			n++
		case pebble.InternalKeyKindRangeDelete:
			ranged = true
			trimmed = trimmed || len(key) > 0 && (key[0] == keys.Task || key[0] == keys.Scheduled)
			n++
		default:
			return false, false, fmt.Errorf("%w: batch: %s", ErrCorrupt, kind)
		}
	}
	if n != b.Count() {
		return false, false, fmt.Errorf("%w: batch: %d operations, it says %d", ErrCorrupt, n, b.Count())
	}
	return ranged, trimmed, nil
}

// largeBatch is below what Pebble keeps the memory of: half of the smallest MemTableBytes.
const largeBatch = 64 << 10

// Snapshot begins a snapshot, which is the store itself.
func (m *stateMachine) Snapshot() (raft.FSMSnapshot, error) {
	if err := m.replica.failure(); err != nil {
		return nil, err
	}
	l, ok := m.replica.live().(*liveStore)
	if !ok {
		return nil, snapshot.ErrNotLive
	}
	return l, nil
}

// Restore puts the store in place that the snapshots have received.
func (m *stateMachine) Restore(source io.ReadCloser) error {
	m.batch, m.buf = nil, nil
	err := guarded(m.replica.node.log, "restore", m.replica.restore)
	if err != nil {
		m.replica.fail(err)
	}
	return err
}

// proposer is the committer of a shard in one term of its leadership: a group
// is persistent when it is in the logs of a majority, and this node has applied it.
type proposer struct {
	replica *replica
	term    uint64
	effects *engine.Effects // of the group; nil: none
}

func (p *proposer) Commit(b *pebble.Batch) error {
	e := entry{term: p.term}
	if b != nil {
		e.batch = b.Repr()
	}
	if p.effects != nil {
		e.broadcast = encodeBroadcast(p.effects)
	}
	// Raft keeps the entry, and Pebble's batch is about to be used again.
	data := e.append(make([]byte, 0, entryHeader+len(e.batch)+len(e.broadcast)))
	if err := p.replica.enter(); err != nil {
		return err
	}
	defer p.replica.asking.leave()
	f := p.replica.raft.Apply(data, 0)
	if err := f.Error(); err != nil {
		return raftError(err)
	}
	if err, ok := f.Response().(error); ok {
		if errors.Is(err, errOutdated) {
			return fmt.Errorf("%w: %w", ErrNotLeader, err)
		}
		return err
	}
	return nil
}

// confirm makes sure that no other node has become the leader: what this one
// has read is still so.
func (p *proposer) Confirm() error {
	if err := p.replica.enter(); err != nil {
		return err
	}
	defer p.replica.asking.leave()
	if err := p.replica.raft.VerifyLeader().Error(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotLeader, err) // nothing was to be stored
	}
	return nil
}

// raftError tells what was certainly not proposed from what may be in the log.
func raftError(err error) error {
	if errors.Is(err, errNotStored) { // Raft has stepped down
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	}
	switch err {
	case raft.ErrNotLeader, raft.ErrLeadershipTransferInProgress, raft.ErrEnqueueTimeout:
		return fmt.Errorf("%w: %w", ErrNotLeader, err)
	}
	return err
}

// liveStore is the store that a shard's snapshots are made of. As a snapshot of
// Raft it is what has been applied, which becomes durable when it is persisted.
type liveStore struct {
	replica *replica
	store   *store.Store
}

// live returns the store of the replica; nil while it is being replaced.
func (r *replica) live() snapshot.Live {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.source == nil {
		return nil
	}
	return r.source
}

var errReplaced = errors.New("the store has been replaced")

func (l *liveStore) use(f func(*store.Store) error) error {
	return l.replica.use(func(st *store.Store) error {
		if st != l.store {
			return errReplaced
		}
		return f(st)
	})
}

// Flush makes what has been applied durable.
func (l *liveStore) Flush() error { return l.use(flushStore) }

func flushStore(st *store.Store) error { return st.Flush(context.Background()) }

// Checkpoint copies what has been applied, by hard links.
func (l *liveStore) Checkpoint(dir string) error {
	return l.use(func(st *store.Store) error {
		if err := flushStore(st); err != nil {
			return err
		}
		return st.Checkpoint(dir)
	})
}

// Persist makes the snapshot durable.
func (l *liveStore) Persist(sink raft.SnapshotSink) error {
	return guarded(l.replica.node.log, "snapshot", func() error { return sink.(persister).Persist(l) })
}

type persister interface{ Persist(snapshot.Live) error }

// Release has nothing to do: the store stays open.
func (l *liveStore) Release() {}

// The log of a shard is truncated behind a snapshot, which makes the store
// durable up to its index. Snapshots are taken by the bytes that have been
// applied since the last one, and leave as many bytes of log as a node that was
// away for a moment may ask for; one that was away for longer gets the store.
//
// At least as many entries stay as a follower may have that it could not acknowledge, which is what Raft sends
// before it waits: a leader that asks a follower for an entry from before its log goes back by an
// entry each time, and comes to its own snapshot, which the follower, being ahead of it, does not take.
const (
	snapshotBytes = 64 << 20
	trailingBytes = 32 << 20
	minTrailing   = 4 * maxAppend // entries that stay whatever their size
	maxTrailing   = 1 << 15
)

// growth is how far the log has grown since the last snapshot.
type growth struct {
	bytes   atomic.Int64
	entries atomic.Int64
	due     chan struct{} // capacity 1: a snapshot is to be taken
}

// grow counts an entry that has been applied.
func (r *replica) grow(bytes int64) {
	r.growth.entries.Add(1)
	if r.growth.bytes.Add(bytes) < snapshotBytes {
		return
	}
	select {
	case r.growth.due <- struct{}{}:
	default:
	}
}

// compact takes a snapshot whenever one is due, until quit is closed.
func (r *replica) compact(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		case <-r.growth.due:
		}
		bytes, entries := r.growth.bytes.Load(), r.growth.entries.Load()
		if bytes < snapshotBytes { // by an entry that came while the last one was taken
			continue
		}
		set := r.raft.ReloadableConfig()
		set.TrailingLogs = uint64(min(max(trailingBytes/(bytes/entries), minTrailing), maxTrailing))
		err := r.raft.ReloadConfig(set)
		if err == nil {
			err = r.raft.Snapshot().Error()
		}
		if err != nil && err != raft.ErrRaftShutdown {
			r.node.log.Warn("no snapshot could be taken", "shard", r.index, "err", err)
		}
		r.growth.bytes.Add(-bytes)
		r.growth.entries.Add(-entries)
	}
}
