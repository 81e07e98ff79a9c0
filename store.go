package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

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
	write      *pebble.WriteOptions
	fatal      *fatalLogger
	partition  *partition
	replicated bool // there is no log beside Raft's
	stuck      bool // commit has panicked
}

// caches are shared by the stores of all shards.
type caches struct {
	blocks *pebble.Cache
	files  *pebble.FileCache
}

const openFiles = 1000

func newCaches(bytes int64, shards int) *caches {
	blocks := pebble.NewCache(bytes)
	return &caches{blocks: blocks, files: pebble.NewFileCache(shards, openFiles)}
}

func (c *caches) close() {
	c.files.Unref()
	c.blocks.Unref()
}

func openStore(dir string, opts *Options, shared *caches, create bool) (*store, error) {
	fs, write := opts.fs, pebble.Sync
	replicated := opts.Cluster != nil // the log of Raft is the log of the store
	switch {
	case replicated:
		write = pebble.NoSync
	case opts.Durability == DurabilityProcess:
		fs = walfs.New(fs)
	case opts.Durability == DurabilityNone: // a log that nobody syncs needs walfs to lose no record before one that it keeps
		fs, write = walfs.New(fs), pebble.NoSync
	}
	fatal := &fatalLogger{log: opts.Logger.With("dir", dir), trouble: make(chan error, 1)}
	if !create { // Pebble would make the directory before it missed the store
		desc, err := pebble.Peek(dir, fs)
		if errors.Is(err, os.ErrNotExist) || err == nil && !desc.Exists {
			return nil, fmt.Errorf("%w: the store is missing", ErrCorrupt)
		}
		if err != nil {
			return nil, storageError(err)
		}
	}
	st := &store{write: write, replicated: replicated, fatal: fatal, partition: new(partition)}
	options := &pebble.Options{
		FS:                          fs,
		DisableWAL:                  replicated,
		Cache:                       shared.blocks,
		FileCache:                   shared.files,
		FormatMajorVersion:          storeFormat,
		MemTableSize:                uint64(opts.MemTableBytes),
		MemTableStopWritesThreshold: memTables,
		L0StopWritesThreshold:       l0StopWrites,
		ErrorIfNotExists:            !create,
		LoggerAndTracer:             fatal,
		EventListener: &pebble.EventListener{
			PossibleAPIMisuse: fatal.misuse,
			BackgroundError:   fatal.background,
		},
	}
	options.Experimental.SpanPolicyFunc = st.partition.span
	// The default scheduler wakes up ten times a second to see whether more
	// compactions may run. One at a time is allowed, so the end of the one
	// before is all that it needs to know.
	options.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if st.db, err = pebble.Open(dir, options); err != nil {
		return nil, storageError(err)
	}
	return st, nil
}

// Flushing lags behind for a moment when a compaction takes the other core;
// writes go on meanwhile.
const (
	memTables    = 4
	l0StopWrites = 24
)

// commit persists a batch at the configured durability. Any error leaves it
// unknown whether the batch will be found after the store is opened again, and
// the store unfit for more.
func (st *store) commit(b *pebble.Batch) (err error) {
	defer func() {
		// Pebble panics when the log of an unsynced commit cannot be written,
		// and leaves its locks locked.
		if p := recover(); p != nil {
			st.stuck = true
			err = fmt.Errorf("store panicked: %v", p)
		}
	}()
	if err := st.db.Apply(b, st.write); err != nil {
		return storageError(err)
	}
	return st.fatal.err()
}

// confirm has nothing to do: nobody else writes the store.
func (st *store) confirm() error { return nil }

// flush writes what was committed to a table. It returns the first error:
// Pebble would try again without end.
func (st *store) flush() error {
	if err := st.fatal.err(); err != nil {
		return err
	}
	flushed, err := st.db.AsyncFlush()
	if err != nil {
		return storageError(err)
	}
	select {
	case <-flushed:
		return st.fatal.err()
	case err := <-st.fatal.trouble:
		return storageError(err)
	}
}

// close makes what was committed durable at the level of the operating system
// at least, and releases the files. A store that is stuck stays open: to close
// it would wait for ever. The end of the process releases it.
func (st *store) close() (err error) {
	if st.stuck {
		return errors.New("codeq: the store cannot be closed before the process ends, after a panic in a commit")
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("store panicked: %v", p)
		}
	}()
	if st.fatal.err() == nil && !st.replicated {
		err = st.db.LogData(nil, pebble.Sync)
	}
	return errors.Join(err, st.db.Close())
}

func storageError(err error) error {
	if pebble.IsCorruptionError(err) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

// fatalLogger keeps Pebble from ending the process: where Pebble's own logger
// exits, this one remembers the reason and returns. Pebble then reports the
// failed commit as a success, so commit asks here after each.
type fatalLogger struct {
	log    *slog.Logger
	reason atomic.Pointer[error]
	warned atomic.Int64 // when background last logged, in seconds since 1970

	trouble chan error // capacity 1; background sends, flush receives
}

func (l *fatalLogger) err() error {
	if p := l.reason.Load(); p != nil {
		return *p
	}
	return nil
}

func (l *fatalLogger) fail(err error) { l.reason.CompareAndSwap(nil, &err) }

func (l *fatalLogger) misuse(i pebble.PossibleAPIMisuseInfo) {
	l.fail(fmt.Errorf("%w: %s of key %s", ErrCorrupt, i.Kind, i.UserKey))
}

// background logs an error of a flush or a compaction, which Pebble repeats
// until it succeeds: thousands of times a second while a disk is full.
func (l *fatalLogger) background(err error) {
	select {
	case l.trouble <- err:
	default:
	}
	now := time.Now().Unix()
	if last := l.warned.Load(); now != last && l.warned.CompareAndSwap(last, now) {
		l.log.Error("background work of the store failed", "err", err)
	}
}

func (l *fatalLogger) Infof(string, ...any) {}

func (l *fatalLogger) Errorf(format string, args ...any) {
	l.log.Warn("store: " + fmt.Sprintf(format, args...))
}

func (l *fatalLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	l.fail(err)
	l.log.Error("store failed", "err", err)
}

func (l *fatalLogger) Eventf(context.Context, string, ...any) {}

func (l *fatalLogger) IsTracingEnabled(context.Context) bool { return false }
