package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/malloc"
	"codeq/internal/walfs"
)

// storeFormat is Pebble's on-disk format, never raised silently. It is the
// newest whose write-ahead log may be written without a sync and still be read
// after a power loss, which DurabilityProcess needs; see internal/walfs.
const storeFormat = pebble.FormatColumnarBlocks

// store is the Pebble instance of one shard and the way into it: everything is
// written by commit.
type store struct {
	db         *pebble.DB
	fs         *lateFS
	write      *pebble.WriteOptions
	dir        string
	log        *slog.Logger
	latch      *failstop.Latch
	partition  *partition
	share      *memTableShare
	replicated bool // there is no log beside Raft's
	reclaimer  *reclaimer
}

func openStore(dir string, opts *Options, shared *caches, create bool) (*store, error) {
	malloc.ReturnLarge()
	late := &lateFS{FS: opts.fs}
	fs, write := vfs.FS(late), pebble.Sync
	replicated := opts.Cluster != nil // the log of Raft is the log of the store
	switch {
	case replicated:
		write = pebble.NoSync
	case opts.Durability == DurabilityProcess:
		fs = walfs.New(fs)
	case opts.Durability == DurabilityNone: // a log that nobody syncs needs walfs to lose no record before one that it keeps
		fs, write = walfs.New(fs), pebble.NoSync
	}
	if !create { // Pebble would make the directory before it missed the store
		desc, err := pebble.Peek(dir, fs)
		if errors.Is(err, os.ErrNotExist) || err == nil && !desc.Exists {
			return nil, fmt.Errorf("%w: the store is missing", ErrCorrupt)
		}
		if err != nil {
			return nil, storageError(err)
		}
		if err := integrity.Unseal(fs, dir); err != nil {
			return nil, storageError(err)
		}
	}
	log := opts.log.With("dir", dir)
	latch := failstop.New(log, "store")
	latch.Limit(memTables * opts.MemTableBytes)
	st := &store{
		fs: late, dir: dir, log: log, write: write, replicated: replicated, latch: latch, partition: new(partition),
		share:     &memTableShare{cache: shared.blocks, memTable: int64(opts.MemTableBytes)},
		reclaimer: newReclaimer(opts),
	}
	if !opts.still { // a copy that is about to be closed again has none
		st.share.size = memTableShareOf(opts)
	}
	latch.Measure(st.share.fit)
	latch.Listen(st.reclaimer)
	options := &pebble.Options{
		FS:                          fs,
		DisableWAL:                  replicated,
		Cache:                       shared.blocks,
		FileCache:                   shared.files,
		FormatMajorVersion:          storeFormat,
		MemTableSize:                uint64(opts.MemTableBytes),
		MemTableStopWritesThreshold: 4 * memTables, // the latch stops them before a group
		MaxManifestFileSize:         maxManifest,
		ErrorIfNotExists:            !create,
		DisableAutomaticCompactions: opts.still,
		L0CompactionFileThreshold:   l0Bytes / min(opts.MemTableBytes, l0Table),
		EventListener: &pebble.EventListener{PossibleAPIMisuse: func(i pebble.PossibleAPIMisuseInfo) {
			if !mayBeTrimmed(i) {
				latch.Fail(fmt.Errorf("%w: %s of key %x", ErrCorrupt, i.Kind, i.UserKey))
			}
		}},
	}
	options.Experimental.SpanPolicyFunc = st.partition.span
	// The default scheduler wakes up ten times a second to see whether more
	// compactions may run. One at a time is allowed, so the end of the one
	// before is all that it needs to know.
	options.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if st.db, err = latch.Open(dir, options); err != nil {
		return nil, openError(dir, err)
	}
	st.share.fit(st.db.Metrics())
	if !opts.still {
		st.reclaimer.start(st)
	}
	return st, nil
}

// mayBeTrimmed reports whether what Pebble takes for a misuse follows from range deletions: they drop
// the table of a task, and not yet the one with its SINGLEDEL, which then finds nothing to delete.
func mayBeTrimmed(i pebble.PossibleAPIMisuseInfo) bool {
	return i.Kind == pebble.IneffectualSingleDelete && len(i.UserKey) > 0 && i.UserKey[0] == keys.Task
}

// l0Bytes is how much lies in the first level, in tables of l0Table, before it is moved on. A range deletion drops
// tables of the other levels only; Pebble's default of 500 tables would leave it a gigabyte. Tables of a deep lane
// overlap nothing, so that to move one writes nothing but the MANIFEST, unless they are so few (100 MB) that Pebble takes
// them all at once, and writes them again.
const (
	l0Bytes = 128 << 20
	l0Table = 2 << 20 // Pebble's default
)

// read calls what reads the store before it is known to be sound: failstop.Latch.Read.
func (st *store) read(do func() error) error { return storageError(st.latch.Read(do)) }

// openError is storageError for a store that cannot be opened.
func openError(dir string, err error) error {
	err = storageError(err)
	// That the store was made with another comparer or merger than what this
	// package uses: a flipped bit in its OPTIONS.
	// Or that its log was in another directory: likewise. Or that a file is missing or
	// has another size than it should.
	var elsewhere pebble.ErrMissingWALRecoveryDir
	says := func(what string) bool { return strings.Contains(err.Error(), what) }
	if !errors.Is(err, ErrCorrupt) &&
		(errors.Is(err, os.ErrNotExist) || errors.As(err, &elsewhere) || says("does not exist") || says("size mismatch") || says("name from file")) {
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return fmt.Errorf("store %s: %w", dir, err)
}

// failure is why the store is unfit for more, or nil.
func (st *store) failure() error { return storageError(st.latch.Err()) }

// Flushing lags behind for a moment when a compaction takes the other core;
// writes go on meanwhile.
const memTables = 4

// maxManifest bounds what a checkpoint copies of a store's own manifest, which
// grows with every flush and compaction. Pebble's default is 128 MiB.
const maxManifest = 1 << 20

// commit persists a batch at the configured durability. Any error leaves it
// unknown whether the batch will be found after the store is opened again, and
// the store unfit for more.
//
// What a replica is told to apply waits for flushes and compactions that lag behind.
// Who decides asks ready before.
func (st *store) commit(b *pebble.Batch) error {
	if st.replicated {
		if err := st.latch.Throttle(st.db); err != nil {
			return storageError(err)
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
		return storageError(err)
	}
	st.reclaimer.wrote(bytes, entries)
	return st.failure() // Pebble takes what could not be written for a success
}

var errPebblePanic = errors.New("panic of Pebble in a commit")

// hasSpace waits while flushes and compactions lag far behind. It is false while they
// fail because the disk is full, whatever the file system says of its free space: it may lack
// inodes, or a quota be used up.
func (st *store) hasSpace() bool {
	if st.replicated { // who commits is another goroutine, and waits
		return !st.latch.NoSpace()
	}
	return st.latch.Ready(st.db) != failstop.ErrNoSpace
}

// confirm has nothing to do: nobody else writes the store.
func (st *store) confirm() error { return nil }

// flush writes what was committed to a table, and waits for that until ctx ends.
// It returns the first error: Pebble would try again without end.
func (st *store) flush(ctx context.Context) error {
	if err := st.failure(); err != nil {
		return err
	}
	select {
	case <-st.latch.Trouble(): // of another time
	default:
	}
	flushed, err := st.db.AsyncFlush()
	if err != nil {
		return storageError(err)
	}
	select {
	case <-flushed:
		return st.failure()
	case err := <-st.latch.Trouble():
		return storageError(err)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// checkpoint has a directory that does not exist hold the store as it is.
func (st *store) checkpoint(dir string) error {
	if err := st.db.Checkpoint(dir); err != nil {
		return storageError(err)
	}
	return st.failure() // of a store that has failed, some was written nowhere
}

// checkpointLate is checkpoint below root, where nothing is synced. What was
// committed is in it at every durability. REQUIRES: nothing is being committed.
func (st *store) checkpointLate(root, dir string) error {
	switch {
	case st.replicated: // memtables have no log
		if err := st.flush(context.Background()); err != nil {
			return err
		}
	case st.write == pebble.NoSync: // a part of it may be in the process only
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			return storageError(err)
		}
	}
	st.fs.late.Store(&root)
	defer st.fs.late.Store(nil)
	return st.checkpoint(dir)
}

// close makes what was committed durable at the level of the operating system
// at least, and releases the files. The error is why the store has failed, if it
// has, or could not be closed.
func (st *store) close() error {
	st.reclaimer.stop()
	if st.latch.Err() == nil && !st.replicated {
		if err := st.db.LogData(nil, pebble.Sync); err != nil {
			st.latch.Fail(err)
		}
	}
	err := st.latch.Close(st.db)
	st.share.end()
	if err != nil {
		return storageError(err)
	}
	if err := integrity.Seal(st.fs, st.dir); err != nil { // it is as if the process had been killed: nothing is lost
		st.log.Warn("store closed without a seal", "err", err)
	}
	return nil
}

// diskFull has an error that tells of a full disk match ErrDiskFull.
func diskFull(err error) error {
	if err == nil || !failstop.IsNoSpace(err) || errors.Is(err, ErrDiskFull) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrDiskFull, err)
}

// storageError has an error of Pebble that tells of damage match ErrCorrupt.
func storageError(err error) error {
	if err = integrity.OfPebble(err); errors.Is(err, integrity.ErrDamaged) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}
