package raftlog

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"

	"codeq/internal/container/slowlock"
)

var (
	_ raft.LogStore          = (*Group)(nil)
	_ raft.MonotonicLogStore = (*Group)(nil)
)

// Group is the log of one Raft group. All methods may be called concurrently.
//
// Stored entries must not be changed afterwards: the newest ones are kept and returned with the
// same Data.
type Group struct {
	store  *Store
	number uint32

	writing slowlock.Lock // held while the log is changed, including the commit

	// mu guards the fields below, which change only while the goroutine holds writing. It is not
	// held during I/O.
	mu     sync.RWMutex
	first  uint64 // 0: the log is empty
	last   uint64
	recent recent
	heads  heads
}

func newGroup(s *Store, n uint32) *Group {
	return &Group{store: s, number: n, recent: recent{all: &s.recent}, heads: newHeads(), writing: slowlock.New()}
}

// load finds the bounds of the log. REQUIRES: the group is not in use yet.
func (g *Group) load() error {
	done, err := g.store.use()
	if err != nil {
		return err
	}
	defer done()
	it, err := g.store.db.NewIter(&pebble.IterOptions{
		LowerBound: appendKey(nil, g.number, 0),
		UpperBound: appendKey(nil, g.number, maxIndex),
	})
	if err != nil {
		return storageError(err)
	}
	if it.First() {
		g.first = indexOf(it.Key())
		if it.Last() {
			g.last = indexOf(it.Key())
		}
	}
	return storageError(it.Close())
}

// FirstIndex returns the index of the oldest entry, 0 if there is none.
func (g *Group) FirstIndex() (uint64, error) {
	first, _ := g.bounds()
	return first, nil
}

// LastIndex returns the index of the newest entry, 0 if there is none.
func (g *Group) LastIndex() (uint64, error) {
	_, last := g.bounds()
	return last, nil
}

func (g *Group) bounds() (first, last uint64) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.first, g.last
}

// IsMonotonic tells Raft that the log has no gaps.
func (g *Group) IsMonotonic() bool { return true }

// GetLog returns an entry: from memory if it is recent, without allocating. The error is
// raft.ErrLogNotFound if there is none, or ErrCorrupt.
func (g *Group) GetLog(index uint64, log *raft.Log) error {
	g.mu.RLock()
	if index < g.first || index > g.last || index == 0 {
		g.mu.RUnlock()
		return raft.ErrLogNotFound // Raft compares with ==
	}
	if l := g.recent.get(index); l != nil {
		*log = *l
		g.mu.RUnlock()
		return nil
	}
	g.mu.RUnlock()
	return g.read(index, log)
}

func (g *Group) read(index uint64, log *raft.Log) error {
	return g.view(index, func(value []byte) error { return decodeValue(g.number, index, value, log) })
}

// view calls f with the value of an entry, which is valid during the call.
func (g *Group) view(index uint64, f func(value []byte) error) error {
	done, err := g.store.use()
	if err != nil {
		return err
	}
	err = g.get(index, f)
	done()
	if !errors.Is(err, raft.ErrLogNotFound) {
		return err
	}
	// it was deleted a moment ago, or else is missing
	return g.write(func(first, last uint64) error {
		if index < first || index > last {
			return raft.ErrLogNotFound
		}
		if err := g.get(index, f); !errors.Is(err, raft.ErrLogNotFound) {
			return err
		}
		return fmt.Errorf("%w: group %d has %d to %d, but no index %d", ErrCorrupt, g.number, first, last, index)
	})
}

// get calls f with the value of an entry in the store. REQUIRES: the caller has called use.
func (g *Group) get(index uint64, f func(value []byte) error) error {
	var key [keyBytes]byte
	value, closer, err := g.store.db.Get(appendKey(key[:0], g.number, index))
	if errors.Is(err, pebble.ErrNotFound) {
		return raft.ErrLogNotFound
	}
	if err != nil {
		return fmt.Errorf("raftlog: read group %d, index %d: %w", g.number, index, storageError(err))
	}
	return errors.Join(f(value), closer.Close())
}

// StoreLog is StoreLogs for one entry.
func (g *Group) StoreLog(log *raft.Log) error { return g.StoreLogs([]*raft.Log{log}) }

// StoreLogs appends entries, all or none of them, and returns when they are as safe as Options.Sync
// says. Entries beyond the end of the log replace it. Indexes that are taken, or not consecutive,
// are refused with errOrder; after any other error the store must be opened again.
func (g *Group) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	return g.write(func(first, last uint64) error { return g.add(logs, first, last) })
}

// write calls f, which may change the log, with the bounds of the log, and excludes other changes.
func (g *Group) write(f func(first, last uint64) error) error {
	g.writing.Lock()
	defer g.writing.Unlock()
	done, err := g.store.use()
	if err != nil {
		return err
	}
	defer done()
	return f(g.bounds())
}

func (g *Group) add(logs []*raft.Log, first, last uint64) error {
	from := logs[0].Index
	if from <= last || from == 0 {
		return fmt.Errorf("%w: group %d ends at %d, entry %d cannot be stored", errOrder, g.number, last, from)
	}
	size := 3 * keyBytes
	for i, l := range logs {
		if l.Index != from+uint64(i) {
			return fmt.Errorf("%w: group %d, entry %d follows entry %d", errOrder, g.number, l.Index, from+uint64(i)-1)
		}
		size += keyBytes + valueBytes(l) + batchOverhead
	}

	b := g.store.db.NewBatchWithSize(size)
	replace := first != 0 && from > last+1
	if replace {
		if err := g.deleteRange(b, first, last); err != nil {
			return err
		}
	}
	for _, l := range logs {
		n := valueBytes(l)
		op := b.SetDeferred(keyBytes, n)
		appendKey(op.Key[:0], g.number, l.Index)
		appendValue(op.Value[:0], g.number, l)
		if err := op.Finish(); err != nil {
			return err
		}
	}
	if err := g.store.commit(b, g.store.durable || g.store.synced.IsOn()); err != nil {
		return fmt.Errorf("raftlog: store group %d, index %d: %w", g.number, from, err)
	}

	g.added(logs, replace)
	g.store.trim()
	return nil
}

// added records entries that have been stored; replace: in place of all others.
func (g *Group) added(logs []*raft.Log, replace bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	first, last := g.first, g.last
	if replace {
		g.recent.dropThrough(last)
		g.heads.dropFrom(first)
	}
	if replace || first == 0 {
		g.first = logs[0].Index
	}
	g.last = logs[len(logs)-1].Index
	for _, l := range logs {
		g.recent.add(l)
		g.heads.add(l)
	}
}

// DeleteRange deletes the entries from one index through another. They must be the oldest or the
// newest ones; otherwise a hole would remain, which is refused with errOrder. It does not wait for
// a sync: until a later StoreLogs returns, a crash may bring the entries back.
func (g *Group) DeleteRange(from, through uint64) error {
	return g.write(func(first, last uint64) error { return g.delete(from, through, first, last) })
}

func (g *Group) delete(from, through, first, last uint64) error {
	if from > through || through < first || from > last || first == 0 {
		return nil
	}
	if from > first && through < last {
		return fmt.Errorf("%w: group %d has %d to %d, to delete %d to %d would leave a hole",
			errOrder, g.number, first, last, from, through)
	}
	from, through = max(from, first), min(through, last)
	b := g.store.db.NewBatch()
	if err := g.deleteRange(b, from, through); err != nil {
		return err
	}
	if err := g.store.commit(b, false); err != nil {
		return fmt.Errorf("raftlog: delete from group %d, %d to %d: %w", g.number, from, through, err)
	}

	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case from == first && through == last:
		g.first, g.last = 0, 0
		g.recent.dropThrough(last)
		g.heads.dropFrom(from)
	case from == first:
		g.first = through + 1
		g.recent.dropThrough(through)
		g.heads.dropThrough(through)
	default:
		g.last = from - 1
		g.recent.dropFrom(from)
		g.heads.dropFrom(from)
	}
	return nil
}

// batchOverhead is the size of a batch's header for a key and its value: the kind and two lengths.
const batchOverhead = 1 + 2*5

// deleteRange adds the deletion of a part of the log to a batch. The deletion of the oldest entries
// begins at the beginning of the group: such a tombstone replaces the earlier ones, and drops all
// of their leftovers in tables.
func (g *Group) deleteRange(b *pebble.Batch, from, through uint64) error {
	if first, _ := g.bounds(); from == first {
		from = 0
	}
	return b.DeleteRange(appendKey(nil, g.number, from), appendKey(nil, g.number, through+1), nil)
}
