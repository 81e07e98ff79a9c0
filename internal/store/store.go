// Package store is a Pebble store for a shard: it is opened at a level of durability, stops at its
// first failure, cuts its tables at deep lanes, reclaims the space of dead records, and seals its
// files when it is closed. Typed reads ([Snapshot], [Scan], [PlaceOf]) return the stored tasks,
// lanes and leases; they take any reader of Pebble's, such as that of a copy. The rules read by
// [Reads], write by [Writes], and hold parts of some ranges in memory ([WriteBackCache], [Waiting],
// [Outbox]).
package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/platform"
)

// Format is the newest of Pebble's on-disk formats that is used. Its write-ahead log can be written
// without a sync and still be read after a power loss, which DurabilityProcess needs; no newer one
// can: see failstop.SyncLogsAtClose.
const Format = pebble.FormatColumnarBlocks

// Store is the Pebble instance of one shard: everything is written by Commit.
type Store struct {
	db         *pebble.DB
	fs         *deferredSyncFS
	write      *pebble.WriteOptions
	dir        string
	log        *slog.Logger
	latch      *failstop.Latch
	partition  *partition
	share      *memTableShare
	replicated bool // there is no log beside that of Raft
	readOnly   bool // see OpenReadOnly
	reclaimer  *reclaimer
	syncer     syncer
}

// Durability says where a batch is when Commit returns.
type Durability uint8

const (
	Process    Durability = iota // handed to the operating system
	Disk                         // synced to the disk
	None                         // held in memory
	Replicated                   // held in memory: the store has no log beside that of Raft
)

// Config of a store.
type Config struct {
	FS            vfs.FS
	Log           *slog.Logger
	Durability    Durability
	Format        uint64 // a pebble.FormatMajorVersion: an older store is raised to it; 0: Format
	MemTableBytes int
	ReclaimFrom   int  // as the constant ReclaimFrom; negative: dead records are always reclaimed
	Still         bool // tables are not changed: a copy that will soon be closed again
}

// Open opens the store in a directory, or creates it.
func Open(dir string, c Config, shared *Caches, create bool) (*Store, error) {
	platform.ReturnLargeBlocks()
	deferred := &deferredSyncFS{FS: c.FS}
	fs, write := vfs.FS(deferred), pebble.Sync
	replicated := c.Durability == Replicated // the log of Raft is the log of the store
	logs := new(failstop.LogSyncs)
	switch c.Durability {
	case Disk:
	case Replicated:
		write = pebble.NoSync
	case Process:
		fs = failstop.SyncLogsAtClose(fs, logs)
	case None: // only with SyncLogsAtClose does an unsynced log lose no record before one that it keeps
		fs, write = failstop.SyncLogsAtClose(fs, logs), pebble.NoSync
	}
	// Pebble would create the directory before it noticed that the store is missing
	if !create {
		if err := exists(fs, dir); err != nil {
			return nil, err
		}
		if err := integrity.Unseal(fs, dir); err != nil {
			return nil, Error(err)
		}
	}
	log := c.Log.With("dir", dir)
	latch := failstop.New(log, "store")
	latch.Limit(MemTables*c.MemTableBytes, c.MemTableBytes, shared.memTables)
	st := &Store{
		fs: deferred, dir: dir, log: log, write: write, replicated: replicated, latch: latch, partition: new(partition),
		share:     &memTableShare{cache: shared.blocks, memTable: int64(c.MemTableBytes)},
		reclaimer: newReclaimer(c.ReclaimFrom),
	}
	switch c.Durability {
	case Disk, Replicated: // each commit is synced, or the log of Raft has it
	case Process:
		st.startSyncer(logs.Sync)
	case None:
		st.startSyncer(func() error {
			if err := st.db.LogData(nil, pebble.Sync); err != nil { // to the operating system
				return err
			}
			return logs.Sync()
		})
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
		FormatMajorVersion:          cmp.Or(pebble.FormatMajorVersion(c.Format), Format),
		MemTableSize:                uint64(c.MemTableBytes),
		MemTableStopWritesThreshold: 4 * MemTables, // the latch stops earlier, before a group
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
	// The default scheduler wakes up ten times a second to check whether more compactions may run.
	// One at a time is allowed, so it need only know when one ends.
	options.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if st.db, err = latch.Open(dir, options); err != nil {
		return nil, openError(dir, err)
	}
	st.share.fit(st.db.Metrics())
	if !c.Still {
		st.latch.MergeSmall(st.db, 1) // see partition
		st.reclaimer.start(st)
	}
	return st, nil
}

// exists returns an error unless there is a store in a directory.
func exists(fs vfs.FS, dir string) error {
	desc, err := pebble.Peek(dir, fs)
	if errors.Is(err, os.ErrNotExist) || err == nil && !desc.Exists {
		return fmt.Errorf("%w: the store is missing: put it back from a copy", base.ErrCorrupt)
	}
	return Error(err)
}

// DB returns the Pebble store, for readers and for batches.
func (st *Store) DB() *pebble.DB { return st.db }

// AddDeepLane cuts tables at both ends of a lane, unless enough lanes are deep. Only the goroutine
// that commits may call it, and RemoveDeepLane.
func (st *Store) AddDeepLane(lane uint32) { st.partition.add(lane) }

// RemoveDeepLane undoes AddDeepLane.
func (st *Store) RemoveDeepLane(lane uint32) { st.partition.remove(lane) }

// DeletedRanges is called after a commit with range deletions; trimmed: they delete consumed parts
// of lanes.
func (st *Store) DeletedRanges(trimmed bool) { st.reclaimer.ranged(trimmed) }

// Reclaim is called when the disk is tight, with the number of free bytes.
func (st *Store) Reclaim(free uint64) { st.reclaimer.hurry(free) }

// MayReclaim reports whether the tables may have enough dead bytes to be reclaimed.
func (st *Store) MayReclaim() bool { return st.reclaimer.hasTables() }

// Takes reports whether a commit of so many bytes can be made long before HasSpace waits.
func (st *Store) Takes(bytes int) bool { return st.latch.Takes(st.db, bytes) }

// Hurry is called before the store is closed: a commit that waits for room on a full disk then
// fails.
func (st *Store) Hurry() { st.latch.Hurry() }

// mayBeTrimmed reports whether what Pebble reports as misuse follows from range deletions: they may
// drop the table with a task before the table with its SINGLEDEL, which then finds nothing to
// delete.
func mayBeTrimmed(i pebble.PossibleAPIMisuseInfo) bool {
	return i.Kind == pebble.IneffectualSingleDelete && len(i.UserKey) > 0 && i.UserKey[0] == keys.Task
}

// l0Bytes is how much lies in the first level, in tables of l0Table, before it is compacted. A
// range deletion drops tables of the other levels only; Pebble's default of 500 tables would leave
// it a gigabyte. Tables of a deep lane overlap nothing, so that moving one writes only to the
// MANIFEST, unless they are so few (100 MB) that Pebble compacts them all at once, and writes them
// again.
const (
	l0Bytes = 128 << 20
	l0Table = 2 << 20 // Pebble's default
)

// Read calls a function that reads the store before it is known to be sound: see
// failstop.Latch.Read.
func (st *Store) Read(do func() error) error { return Error(st.latch.Read(do)) }

// openError is Error for a store that cannot be opened.
func openError(dir string, err error) error {
	return fmt.Errorf("store %s: %w", dir, Error(failstop.OfOpening(err)))
}

// Failure returns why the store has failed, or nil.
func (st *Store) Failure() error { return Error(st.latch.Err()) }

// MemTables is how many memtables a store may have filled before commits wait: one is being filled,
// one flushed, and two wait. If more wait of all stores together, it is one less. Flushing lags
// behind for a moment when a compaction takes the other core; writes go on meanwhile.
const MemTables = 4

// MemTableBytes is the default size of memtables. A node of a cluster has replicas of all shards:
// so that its memory does not grow with their number, memtables shrink with it. A batch of half a
// memtable becomes a table of its own, and so they do not shrink below 4 MiB.
func MemTableBytes(shards int, replicas bool) int {
	const most = 16 << 20
	if !replicas {
		return most
	}
	return min(max(most*3/2/shards, most/4), most)
}

// maxManifest limits the size of Pebble's own manifest, which checkpoints copy. It grows with every
// flush and compaction. Pebble's default is 128 MiB.
const maxManifest = 1 << 20

// Commit persists a batch at the configured durability. After an error it is unknown whether the
// batch will be found after the store is opened again, and the store must not be used any more.
//
// On a replica, Commit waits for flushes and compactions that lag behind. A leader calls HasSpace
// before it decides.
func (st *Store) Commit(b *pebble.Batch) error {
	if st.replicated {
		if err := st.latch.Throttle(st.db); err != nil {
			return Error(err)
		}
	}
	bytes, entries := b.Len(), b.Count() // Pebble keeps the memory of a large batch
	st.latch.Wrote(bytes)
	applied := false
	defer func() {
		if !applied { // a panic that leaves Pebble's locks locked
			st.latch.Abandon(errPebblePanic)
		}
	}()
	err := st.db.Apply(b, st.write)
	if applied = true; err != nil {
		return Error(err)
	}
	st.reclaimer.wrote(bytes, entries)
	return st.Failure() // Pebble reports a failed write as a success
}

var errPebblePanic = errors.New("panic of Pebble in a commit")

// HasSpace waits while flushes and compactions lag far behind. It returns false while they fail
// because the disk is full, even if the file system reports free space: inodes may be used up, or a
// quota.
func (st *Store) HasSpace() bool {
	if st.replicated { // another goroutine commits, and waits
		return !st.latch.NoSpace()
	}
	return !errors.Is(st.latch.Ready(st.db), failstop.ErrNoSpace)
}

// Confirm does nothing: the store has no other writer.
func (st *Store) Confirm() error { return nil }

// Flush writes all commits to tables, and waits for that until ctx ends. It returns the first
// error: Pebble would retry for ever.
func (st *Store) Flush(ctx context.Context) error {
	err := st.latch.Flush(ctx, st.db)
	if err != nil && errors.Is(err, ctx.Err()) {
		return base.EndOf(ctx)
	}
	return Error(err)
}

// Checkpoint copies the current store by hard links to a directory that does not exist.
func (st *Store) Checkpoint(dir string) error {
	if err := st.db.Checkpoint(dir); err != nil {
		return Error(err)
	}
	return st.Failure() // after a failure, some of it was written nowhere
}

// CheckpointUnsynced is Checkpoint below root, where nothing is synced. The copy contains all
// commits, at every durability. REQUIRES: nothing is being committed.
func (st *Store) CheckpointUnsynced(root, dir string) error {
	switch {
	case st.replicated: // memtables have no log
		if err := st.Flush(context.Background()); err != nil {
			return err
		}
	case st.write == pebble.NoSync: // part of the log may be in the process only
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			return Error(err)
		}
	}
	st.fs.deferred.Store(&root)
	defer st.fs.deferred.Store(nil)
	return st.Checkpoint(dir)
}

// DiskUsage describes the disk of the store, which fails if its directory is not there any more.
func (st *Store) DiskUsage() (vfs.DiskUsage, error) {
	u, err := st.fs.GetDiskUsage(st.dir)
	return u, st.latch.Seen(err)
}

// Close hands all commits to the operating system at least, and releases the files. The error says
// why the store has failed, or could not be closed.
func (st *Store) Close() error {
	if st.syncer.sync != nil {
		st.syncer.close()
	}
	st.reclaimer.stop()
	if st.latch.Err() == nil && !st.replicated && !st.readOnly {
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			st.latch.Fail(err)
		}
	}
	err := st.latch.Close(st.db)
	st.share.end()
	if err != nil || st.readOnly {
		return Error(err)
	}
	// as if the process had been killed: nothing is lost
	if err := integrity.Seal(st.fs, st.dir); errors.Is(err, integrity.ErrLost) {
		return err
	} else if err != nil {
		st.log.Warn("store closed without a seal", "err", err)
	}
	return nil
}

// Error converts an error of Pebble: it matches base.ErrCorrupt if it reports damage.
func Error(err error) error {
	switch err = failstop.OfPebble(err); {
	case errors.Is(err, integrity.ErrDamaged):
		return base.Corrupt(err)
	case errors.Is(err, platform.ErrHeld):
		return fmt.Errorf("%w: %w", base.ErrLocked, err)
	}
	return err
}
