// Package raftlog keeps the Raft logs of all groups of a node in one Pebble store, and the terms
// and votes of all groups in one bbolt file.
//
// An entry is one key: the group and the index, both big-endian, so that a log is a range in the
// order of its indexes. The store's only write-ahead log makes entries durable; groups that store
// at the same time share a sync. Deletions are not synced on their own: later entries lie after
// them in the write-ahead log, so the state after a crash is that after some prefix of the changes
// of all groups together.
//
// A log has no gaps. When entries begin beyond the end of the log, Raft has installed a snapshot
// and stores the entries after it; they replace the log.
package raftlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
)

var (
	// ErrCorrupt says that stored bytes have changed.
	ErrCorrupt = errors.New("raftlog: corrupt")
	// ErrClosed says that the store was closed.
	ErrClosed = errors.New("raftlog: closed")
	// ErrFailed says that the store could not write, and cannot be used until it is opened again.
	// It is unknown whether the bytes of the failed write will be there then.
	ErrFailed = errors.New("raftlog: failed")
	// errOrder says that indexes would overwrite entries or leave a gap.
	errOrder = errors.New("raftlog: indexes out of order")
)

// Sync says which failure an entry survives once StoreLogs has returned.
type Sync uint8

const (
	SyncDisk    Sync = iota // a power loss: fsync, shared by concurrent groups
	SyncProcess             // the end of the process: written by write(2)
	SyncNone                // nothing: up to 32 KiB wait in the process
)

// defaultCacheBytes is the cache of all groups if Options sets none.
const defaultCacheBytes = 8 << 20

// Options of Open.
type Options struct {
	FS         vfs.FS // required
	Sync       Sync
	Format     uint64       // a pebble.FormatMajorVersion: the store is raised to it if it is older; 0: storeFormat
	CacheBytes int64        // newest entries of all groups in memory; 0: defaultCacheBytes
	Logger     *slog.Logger // nil: nothing is logged
}

// Store holds the logs of the groups of one node. All methods may be called concurrently.
//
// When no more tables can be written because the disk is full, HasSpace returns false, and
// StoreLogs finally blocks until there is room, or the store is closed.
type Store struct {
	db         *pebble.DB
	fs         vfs.FS
	dir        string
	durable    bool              // StoreLogs waits for Pebble's sync, real or not
	synced     failstop.LogSyncs // on: it waits for a real one
	cacheBytes int64
	recent     atomic.Int64 // bytes of the newest entries that groups hold
	log        *slog.Logger
	latch      *failstop.Latch

	mu     sync.Mutex // guards groups, and is taken before Group.mu
	groups map[uint32]*Group

	// using is read-locked by callers of db, and locked by Close. It is taken after Group.writing.
	using  sync.RWMutex
	closed bool
}

// storeFormat is the newest Pebble format with a log that may be written without a sync and still
// be read after a power loss; see failstop.SyncLogsAtClose.
const storeFormat = pebble.FormatColumnarBlocks

// A batch of half a memtable makes Pebble begin a new log, and Raft's batches should be smaller.
// Memtables beyond the second, which Pebble keeps for later, take memory only while flushes lag
// behind, and then that of the block cache. The directory grows to a few memtables, as many logs,
// and less than twice the kept part of the logs (BenchmarkTruncation).
const (
	memTableBytes = 16 << 20
	memTables     = 6
	// l0Tables is the number of tables that wait for a compaction: most of them are of truncated
	// entries by then.
	l0Tables = 8
	// for readers far behind, which read each entry once: indexes of tables
	blockCacheBytes = 4 << 20
)

// Open opens the store in a directory, or creates it.
func Open(dir string, o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{
		fs:         o.FS,
		dir:        dir,
		log:        o.Logger,
		durable:    o.Sync != SyncNone,
		cacheBytes: o.CacheBytes,
		latch:      failstop.New(o.Logger, "raft log"),
		groups:     make(map[uint32]*Group),
	}
	if s.cacheBytes == 0 {
		s.cacheBytes = defaultCacheBytes
	}
	fs := o.FS
	if o.Sync != SyncDisk { // SyncNone, too, must not lose an entry before one that it keeps
		fs = failstop.SyncLogsAtClose(fs, &s.synced)
	}
	if _, err := o.FS.Stat(dir); err == nil {
		if err := integrity.Unseal(o.FS, dir); err != nil {
			return nil, fmt.Errorf("raftlog: open %s: %w", dir, storageError(err))
		}
	}
	cache := pebble.NewCache(blockCacheBytes + 2*memTableBytes) // it pays for memtables
	defer cache.Unref()
	opts := &pebble.Options{
		FS:                          fs,
		Cache:                       cache,
		FormatMajorVersion:          cmp.Or(pebble.FormatMajorVersion(o.Format), storeFormat),
		MemTableSize:                memTableBytes,
		MemTableStopWritesThreshold: memTables,
		L0CompactionThreshold:       l0Tables,
		L0StopWritesThreshold:       3 * l0Tables,
	}
	opts.Experimental.SpanPolicyFunc = spanOfGroup
	// The second compaction is for deleting whole tables, which must not wait for another one.
	opts.CompactionConcurrencyRange = func() (int, int) { return 1, 2 }
	// The default scheduler wakes up ten times a second to check whether more compactions may run.
	opts.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if s.db, err = s.latch.Open(dir, opts); err != nil {
		return nil, fmt.Errorf("raftlog: open %s: %w", dir, storageError(failstop.OfOpening(err)))
	}
	s.latch.MergeSmall(s.db, groupBytes)
	return s, nil
}

// Group returns the log of a group, which is empty if nothing was stored in it. It may be called
// once for each group.
func (s *Store) Group(n uint32) (*Group, error) {
	g := newGroup(s, n)
	s.mu.Lock()
	taken := s.groups[n] != nil
	if !taken {
		s.groups[n] = g
	}
	s.mu.Unlock()
	if taken {
		return nil, fmt.Errorf("raftlog: group %d is in use", n)
	}
	if err := s.latch.Read(g.load); err != nil {
		s.mu.Lock()
		delete(s.groups, n)
		s.mu.Unlock()
		return nil, fmt.Errorf("raftlog: open group %d: %w", n, storageError(err))
	}
	return g, nil
}

// use prevents Close from closing until the returned function is called.
func (s *Store) use() (done func(), err error) {
	s.using.RLock()
	if s.closed {
		s.using.RUnlock()
		return nil, ErrClosed
	}
	return s.using.RUnlock, nil
}

// failure returns the reason why the store can no longer be used, or nil.
func (s *Store) failure() error {
	if err := s.latch.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrFailed, storageError(err))
	}
	return nil
}

// commit persists a batch, and waits for the sync if durable is set. After any error the store has
// failed. REQUIRES: the caller has called use, and does not use the batch afterwards.
func (s *Store) commit(b *pebble.Batch, durable bool) error {
	if err := s.failure(); err != nil {
		return err
	}
	var err error
	if durable {
		if err = s.db.ApplyNoSyncWait(b, pebble.Sync); err == nil {
			err = b.SyncWait()
		}
	} else {
		err = s.db.Apply(b, pebble.NoSync)
	}
	if err != nil {
		s.latch.Fail(err)
	}
	if err := s.failure(); err != nil { // Pebble may not have seen the failure
		return err // Pebble may still use a failed batch: it is not reused
	}
	return b.Close()
}

// SyncToDisk sets whether StoreLogs returns only when entries would survive a power loss, at any
// level.
func (s *Store) SyncToDisk(on bool) { s.synced.Set(on) }

// Flush makes the stored entries durable, at any level.
func (s *Store) Flush() error {
	done, err := s.use()
	if err != nil {
		return err
	}
	defer done()
	return storageError(s.latch.Flush(context.Background(), s.db)) // a sync of its log does nothing below SyncDisk; see failstop.SyncLogsAtClose
}

// HasSpace returns false while nothing can be written because the disk is full. StoreLogs may block
// then.
func (s *Store) HasSpace() bool { return !s.latch.NoSpace() }

// Hurry makes a StoreLogs that waits for room on a full disk fail, and all later ones. It is for
// callers that Close would wait for.
func (s *Store) Hurry() { s.latch.Hurry() }

// Close waits for running calls, makes the stored entries durable at any level, and releases the
// files. Later calls of the groups return ErrClosed, unless memory has the answer.
func (s *Store) Close() error {
	s.latch.Hurry()
	s.using.Lock()
	defer s.using.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.failure() == nil {
		if err := s.db.LogData(nil, pebble.Sync); err != nil {
			s.latch.Fail(err)
		}
	}
	if err := s.latch.Close(s.db); err != nil {
		return fmt.Errorf("%w: %w", ErrFailed, storageError(err))
	}
	// as if the process had been killed: nothing is lost
	if err := integrity.Seal(s.fs, s.dir); err != nil {
		s.log.Warn("raft log closed without a seal", "err", err)
	}
	return nil
}

// spanOfGroup is a pebble.SpanPolicyFunc: a table holds entries of one group. Each group grows at
// its end, so that a table of several groups would overlap everything between them, and each
// compaction would write it again.
func spanOfGroup(start []byte) (policy pebble.SpanPolicy, end []byte, err error) {
	group := groupOf(start)
	if group == maxGroup {
		return policy, nil, nil
	}
	return policy, appendKey(nil, group+1, 0), nil
}

// Check reads all entries of a store, and returns the first one that is damaged or does not follow
// the one before.
func Check(r pebble.Reader) error {
	it, err := r.NewIter(nil)
	if err != nil {
		return storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is it.Error
	var group uint32
	var last uint64
	for valid := it.First(); valid; valid = it.Next() {
		if len(it.Key()) != keyBytes {
			return fmt.Errorf("%w: key %x", ErrCorrupt, it.Key())
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return storageError(err)
		}
		g, index := groupOf(it.Key()), indexOf(it.Key())
		if g == group && last != 0 && index != last+1 {
			return fmt.Errorf("%w: group %d, index %d follows %d", ErrCorrupt, g, index, last)
		}
		if _, err := parseValue(g, index, value); err != nil {
			return err
		}
		group, last = g, index
	}
	return storageError(it.Error())
}

// Last returns the index of the last entry of a group in a store; 0: it has none.
func Last(r pebble.Reader, group uint32) (index uint64, err error) {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: appendKey(nil, group, 0), UpperBound: appendKey(nil, group+1, 0)})
	if err != nil {
		return 0, storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is it.Error
	if it.Last() {
		if len(it.Key()) != keyBytes {
			return 0, fmt.Errorf("%w: key %x", ErrCorrupt, it.Key())
		}
		index = indexOf(it.Key())
	}
	return index, storageError(it.Error())
}

func storageError(err error) error {
	if err = failstop.OfPebble(err); errors.Is(err, integrity.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}
