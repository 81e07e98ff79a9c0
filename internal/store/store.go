// Package store is a Pebble store as a shard needs it: it is opened at a level of durability, stops
// at its first failure, cuts its tables at deep lanes, gives back the space of what is dead, and
// seals what it leaves.
package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/malloc"
	"codeq/internal/walfs"
)

// Format is Pebble's on-disk format, never raised silently. It is the newest whose write-ahead log
// may be written without a sync and still be read after a power loss, which DurabilityProcess
// needs; see internal/walfs.
const Format = pebble.FormatColumnarBlocks

// Store is the Pebble instance of one shard and the way into it: everything is written by Commit.
type Store struct {
	db         *pebble.DB
	fs         *deferredSyncFS
	write      *pebble.WriteOptions
	dir        string
	log        *slog.Logger
	latch      *failstop.Latch
	partition  *partition
	share      *memTableShare
	replicated bool // there is no log beside Raft's
	reclaimer  *reclaimer
}

// Durability is what has happened to a batch when Commit returns.
type Durability uint8

const (
	Process    Durability = iota // handed to the operating system
	Disk                         // forced to the disk
	None                         // held in memory
	Replicated                   // held in memory: the store has no log beside that of Raft
)

// Config of a store.
type Config struct {
	FS            vfs.FS
	Log           *slog.Logger
	Durability    Durability
	MemTableBytes int
	ReclaimFrom   int  // as the constant; negative: dead records are reclaimed whatever they take
	Still         bool // tables stay as they are: a copy that is about to be closed again
}

// Open opens the store in a directory, or makes it.
func Open(dir string, c Config, shared *Caches, create bool) (*Store, error) {
	malloc.ReturnLarge()
	deferred := &deferredSyncFS{FS: c.FS}
	fs, write := vfs.FS(deferred), pebble.Sync
	replicated := c.Durability == Replicated // the log of Raft is the log of the store
	switch c.Durability {
	case Replicated:
		write = pebble.NoSync
	case Process:
		fs = walfs.New(fs)
	case None: // a log that nobody syncs needs walfs to lose no record before one that it keeps
		fs, write = walfs.New(fs), pebble.NoSync
	}
	if !create { // Pebble would make the directory before it missed the store
		desc, err := pebble.Peek(dir, fs)
		if errors.Is(err, os.ErrNotExist) || err == nil && !desc.Exists {
			return nil, fmt.Errorf("%w: the store is missing", base.ErrCorrupt)
		}
		if err != nil {
			return nil, Error(err)
		}
		if err := integrity.Unseal(fs, dir); err != nil {
			return nil, Error(err)
		}
	}
	log := c.Log.With("dir", dir)
	latch := failstop.New(log, "store")
	latch.Limit(MemTables * c.MemTableBytes)
	st := &Store{
		fs: deferred, dir: dir, log: log, write: write, replicated: replicated, latch: latch, partition: new(partition),
		share:     &memTableShare{cache: shared.blocks, memTable: int64(c.MemTableBytes)},
		reclaimer: newReclaimer(c.ReclaimFrom),
	}
	if !c.Still {
		st.share.size = memTableShareOf(c.MemTableBytes)
	}
	latch.Measure(st.share.fit)
	latch.Listen(st.reclaimer)
	options := &pebble.Options{
		FS:                          fs,
		DisableWAL:                  replicated,
		Cache:                       shared.blocks,
		FileCache:                   shared.files,
		FormatMajorVersion:          Format,
		MemTableSize:                uint64(c.MemTableBytes),
		MemTableStopWritesThreshold: 4 * MemTables, // the latch stops them before a group
		MaxManifestFileSize:         maxManifest,
		ErrorIfNotExists:            !create,
		DisableAutomaticCompactions: c.Still,
		L0CompactionFileThreshold:   l0Bytes / min(c.MemTableBytes, l0Table),
		EventListener: &pebble.EventListener{PossibleAPIMisuse: func(i pebble.PossibleAPIMisuseInfo) {
			if !mayBeTrimmed(i) {
				latch.Fail(fmt.Errorf("%w: %s of key %x", base.ErrCorrupt, i.Kind, i.UserKey))
			}
		}},
	}
	options.Experimental.SpanPolicyFunc = st.partition.span
	// The default scheduler wakes up ten times a second to see whether more compactions may run.
	// One at a time is allowed, so the end of the one before is all that it needs to know.
	options.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if st.db, err = latch.Open(dir, options); err != nil {
		return nil, openError(dir, err)
	}
	st.share.fit(st.db.Metrics())
	if !c.Still {
		st.reclaimer.start(st)
	}
	return st, nil
}

// DB is the store for its readers, and for batches.
func (st *Store) DB() *pebble.DB { return st.db }

// Dir is the directory of the store.
func (st *Store) Dir() string { return st.dir }

// Log is where the store logs.
func (st *Store) Log() *slog.Logger { return st.log }

// AddDeepLane cuts tables at both ends of a lane, unless enough lanes are deep. As RemoveDeepLane,
// it is for the goroutine that commits.
func (st *Store) AddDeepLane(lane uint32) { st.partition.add(lane) }

// RemoveDeepLane ends that.
func (st *Store) RemoveDeepLane(lane uint32) { st.partition.remove(lane) }

// DeletedRanges says that a commit has deleted by range; trimmed, what is consumed of lanes.
func (st *Store) DeletedRanges(trimmed bool) { st.reclaimer.ranged(trimmed) }

// Reclaim says that the disk is tight, and how many bytes are free.
func (st *Store) Reclaim(free uint64) { st.reclaimer.hurry(free) }

// MayReclaim reports whether the tables may have dead bytes that are worth an effort.
func (st *Store) MayReclaim() bool { return st.reclaimer.hasTables() }

// Takes reports whether a commit of so many bytes may be made long before HasSpace waits.
func (st *Store) Takes(bytes int) bool { return st.latch.Takes(st.db, bytes) }

// Hurry says that the store is about to be closed: a commit that waits for room on a full disk
// fails.
func (st *Store) Hurry() { st.latch.Hurry() }

// mayBeTrimmed reports whether what Pebble takes for a misuse follows from range deletions: they
// drop the table of a task, and not yet the one with its SINGLEDEL, which then finds nothing to
// delete.
func mayBeTrimmed(i pebble.PossibleAPIMisuseInfo) bool {
	return i.Kind == pebble.IneffectualSingleDelete && len(i.UserKey) > 0 && i.UserKey[0] == keys.Task
}

// l0Bytes is how much lies in the first level, in tables of l0Table, before it is moved on. A range
// deletion drops tables of the other levels only; Pebble's default of 500 tables would leave it a
// gigabyte. Tables of a deep lane overlap nothing, so that to move one writes nothing but the
// MANIFEST, unless they are so few (100 MB) that Pebble takes them all at once, and writes them
// again.
const (
	l0Bytes = 128 << 20
	l0Table = 2 << 20 // Pebble's default
)

// Read calls what reads the store before it is known to be sound: failstop.Latch.Read.
func (st *Store) Read(do func() error) error { return Error(st.latch.Read(do)) }

// openError is Error for a store that cannot be opened.
func openError(dir string, err error) error {
	err = Error(err)
	// That the store was made with another comparer or merger than what this package uses: a
	// flipped bit in its OPTIONS. Or that its log was in another directory: likewise. Or that a
	// file is missing or has another size than it should.
	var elsewhere pebble.ErrMissingWALRecoveryDir
	says := func(what string) bool { return strings.Contains(err.Error(), what) }
	if !errors.Is(err, base.ErrCorrupt) &&
		(errors.Is(err, os.ErrNotExist) || errors.As(err, &elsewhere) || says("does not exist") || says("size mismatch") || says("name from file")) {
		err = fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return fmt.Errorf("store %s: %w", dir, err)
}

// Failure is why the store is unfit for more, or nil.
func (st *Store) Failure() error { return Error(st.latch.Err()) }

// MemTables is how many a store may have filled before commits wait. Flushing lags behind for a
// moment when a compaction takes the other core; writes go on meanwhile.
const MemTables = 4

// maxManifest bounds what a checkpoint copies of a store's own manifest, which grows with every
// flush and compaction. Pebble's default is 128 MiB.
const maxManifest = 1 << 20

// Commit persists a batch at the configured durability. Any error leaves it unknown whether the
// batch will be found after the store is opened again, and the store unfit for more.
//
// What a replica is told to apply waits for flushes and compactions that lag behind. Who decides
// asks ready before.
func (st *Store) Commit(b *pebble.Batch) error {
	if st.replicated {
		if err := st.latch.Throttle(st.db); err != nil {
			return Error(err)
		}
	}
	bytes, entries := b.Len(), b.Count() // Pebble takes the memory of a large one
	st.latch.Wrote(bytes)
	applied := false
	defer func() {
		if !applied { // a panic, with Pebble's locks locked
			st.latch.Abandon(errPebblePanic)
		}
	}()
	err := st.db.Apply(b, st.write)
	if applied = true; err != nil {
		return Error(err)
	}
	st.reclaimer.wrote(bytes, entries)
	return st.Failure() // Pebble takes what could not be written for a success
}

var errPebblePanic = errors.New("panic of Pebble in a commit")

// HasSpace waits while flushes and compactions lag far behind. It is false while they fail because
// the disk is full, whatever the file system says of its free space: it may lack inodes, or a quota
// be used up.
func (st *Store) HasSpace() bool {
	if st.replicated { // who commits is another goroutine, and waits
		return !st.latch.NoSpace()
	}
	return st.latch.Ready(st.db) != failstop.ErrNoSpace
}

// Confirm has nothing to do: nobody else writes the store.
func (st *Store) Confirm() error { return nil }

// Flush writes what was committed to a table, and waits for that until ctx ends. It returns the
// first error: Pebble would try again without end.
func (st *Store) Flush(ctx context.Context) error { return flush(ctx, st.db, st.latch) }

func flush(ctx context.Context, db *pebble.DB, latch *failstop.Latch) error {
	if err := latch.Err(); err != nil {
		return Error(err)
	}
	select {
	case <-latch.Trouble(): // of another time
	default:
	}
	flushed, err := db.AsyncFlush()
	if err != nil {
		return Error(err)
	}
	select {
	case <-flushed:
		return Error(latch.Err())
	case err := <-latch.Trouble():
		return Error(err)
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
}

// Checkpoint copies the store as it is to a directory that does not exist, by hard links.
func (st *Store) Checkpoint(dir string) error {
	if err := st.db.Checkpoint(dir); err != nil {
		return Error(err)
	}
	return st.Failure() // of a store that has failed, some was written nowhere
}

// CheckpointUnsynced is Checkpoint below root, where nothing is synced. What was committed is in it
// at every durability. REQUIRES: nothing is being committed.
func (st *Store) CheckpointUnsynced(root, dir string) error {
	switch {
	case st.replicated: // memtables have no log
		if err := st.Flush(context.Background()); err != nil {
			return err
		}
	case st.write == pebble.NoSync: // a part of it may be in the process only
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			return Error(err)
		}
	}
	st.fs.deferred.Store(&root)
	defer st.fs.deferred.Store(nil)
	return st.Checkpoint(dir)
}

// Close makes what was committed durable at the level of the operating system at least, and
// releases the files. The error is why the store has failed, if it has, or could not be closed.
func (st *Store) Close() error {
	st.reclaimer.stop()
	if st.latch.Err() == nil && !st.replicated {
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			st.latch.Fail(err)
		}
	}
	err := st.latch.Close(st.db)
	st.share.end()
	if err != nil {
		return Error(err)
	}
	if err := integrity.Seal(st.fs, st.dir); err != nil { // it is as if the process had been killed: nothing is lost
		st.log.Warn("store closed without a seal", "err", err)
	}
	return nil
}

// Error returns an error of Pebble, which matches base.ErrCorrupt if it tells of damage.
func Error(err error) error {
	if err = integrity.OfPebble(err); errors.Is(err, integrity.ErrDamaged) {
		return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return err
}
