package failstop

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Pebble opens the logs that it writes under walCategory. A checkpoint copies logs under another
// one, syncs the copy and ignores the error of its Close: the syncs of a copy must stay real.
const walCategory vfs.DiskWriteCategory = "pebble-wal"

// SyncLogsAtClose makes Pebble acknowledge a synced commit as soon as the operating system has it:
// after write(2), without fdatasync(2).
//
// It wraps a file system. While syncs is off, the write-ahead logs that Pebble writes through it
// ignore Sync and SyncData until Close, which does one real sync first. Every other file and
// operation passes through. Pebble's log writer writes, then syncs, then acknowledges, so
// db.Apply(batch, pebble.Sync) returns once the record is in the page cache. pebble.NoSync is
// weaker: it leaves the record in a buffer of the process.
//
// # Promises
//
//   - A killed process loses no commit that was acknowledged with pebble.Sync.
//   - A power loss or a crash of the kernel may lose commits of the newest log only, and loses a
//     suffix: if a commit survives, so do those before it. Pebble closes a log, and so syncs it,
//     before it creates the next one.
//   - DB.Flush, DB.Close and LogSyncs.Sync make every earlier commit durable. DB.LogData(nil,
//     pebble.Sync) does not, and an Ingest may survive a power loss that commits before it do not.
//
// # Requirements
//
//   - Open the DB with FormatMajorVersion pebble.FormatColumnarBlocks (19) and never raise it. From
//     pebble.FormatWALSyncChunks on, each chunk of the log records how far the log was synced;
//     after a power loss these promises are false and Pebble refuses the log as corrupt. Pebble
//     does not lower the version of a database that has a newer one: check DB.FormatMajorVersion.
//   - Leave Options.WALFailover unset: it forgets a record once it is synced and does not write it
//     to the next log.
//   - Stack disk-health checks below, as vfs.WithDiskHealthChecks does not time Close, where the
//     real sync is: SyncLogsAtClose(healthChecked), not the reverse. Pebble adds these checks
//     itself only if Options.FS is nil.
//
// The sync of a full log blocks commits while Pebble rotates it, for as long as the write-back of
// its dirty pages takes. Options.WALBytesPerSync starts that earlier, as SyncTo passes through. If
// the sync fails at a rotation, Pebble panics, as it does with any error of closing a log;
// [Latch.FS] goes outside of this file system to prevent that.
func SyncLogsAtClose(base vfs.FS, syncs *LogSyncs) vfs.FS { return walFS{base, syncs} }

// LogSyncs says whether the syncs of logs are real ones: on. It is off at first, and for the logs
// of one DB.
type LogSyncs struct {
	on     atomic.Bool
	newest atomic.Pointer[walFile] // log; nil: none was begun
}

// Set turns it on for commits that begin later, or off.
func (s *LogSyncs) Set(on bool) { s.on.Store(on) }

// IsOn reports whether it is on.
func (s *LogSyncs) IsOn() bool { return s.on.Load() }

// Sync makes all records in the logs durable. It does not hold up commits meanwhile.
func (s *LogSyncs) Sync() error {
	if f := s.newest.Load(); f != nil { // the logs before it are durable
		return f.syncNow()
	}
	return nil
}

type walFS struct {
	vfs.FS
	synced *LogSyncs
}

func (fs walFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	return fs.wrap(f, err, name, category)
}

func (fs walFS) ReuseForWrite(
	oldname, newname string, category vfs.DiskWriteCategory,
) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(oldname, newname, category)
	return fs.wrap(f, err, newname, category)
}

// Unwrap returns the base, for vfs.Root.
func (fs walFS) Unwrap() vfs.FS { return fs.FS }

func (fs walFS) wrap(
	f vfs.File, err error, name string, category vfs.DiskWriteCategory,
) (vfs.File, error) {
	if err != nil || category != walCategory || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	log := &walFile{File: f, name: name, synced: fs.synced}
	fs.synced.newest.Store(log)
	return log, nil
}

// The format of a log: blocks of blockSize, each a sequence of chunks with a header. At the end of
// a block, Pebble's reader treats minTail to maxTail zero bytes as padding, though a log without
// sync chunks has a header there and perhaps the first bytes of a record.
const (
	blockSize = 32 << 10
	minTail   = 11 // header of a chunk without sync offset
	maxTail   = 18 // one less than the header of a chunk with it
)

// walFile is a log that Pebble writes from its beginning to its end. SyncTo passes through: it is
// no part of a commit, and promises durability only if the base really syncs everything.
type walFile struct {
	vfs.File
	name   string
	synced *LogSyncs
	offset int64

	mu       sync.Mutex // guards the fields below
	closed   bool
	closeErr error // why it may not be durable although it was closed
}

// Write syncs its bytes if they begin with a tail that may be zero on disk. If a power loss left it
// zero and kept the next block, the reader would skip one record and go on. Pebble never writes
// more than one block at once, so the sync comes before the next block.
func (f *walFile) Write(p []byte) (int, error) {
	tail := blockSize - f.offset%blockSize
	n, err := f.File.Write(p)
	f.offset += int64(n)
	if err == nil && tail >= minTail && tail <= maxTail {
		err = f.File.SyncData()
	}
	return n, err
}

func (f *walFile) Sync() error { return f.SyncData() }

func (f *walFile) SyncData() error {
	if f.synced.IsOn() {
		return f.File.SyncData()
	}
	return nil
}

// Preallocate does nothing: it would spare the metadata writes of the syncs that append to a file,
// and make a small log take the disk space of a full one.
func (f *walFile) Preallocate(offset, length int64) error { return nil }

// syncNow is a real sync.
func (f *walFile) syncNow() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.closeErr
	}
	return f.File.SyncData()
}

// Close makes the log durable and closes it, even if it cannot be made durable.
func (f *walFile) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if err := f.File.SyncData(); err != nil {
		f.closeErr = fmt.Errorf("sync %s before close: %w", f.name, err)
	}
	if err := f.File.Close(); f.closeErr == nil {
		return err
	}
	return f.closeErr
}
