package store

import (
	"io"
	"io/fs"
	"log/slog"
	"os"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
)

// readOnlyMemTable is the size of the memtables into which a log is read.
const readOnlyMemTable = 4 << 20

// OpenReadOnly opens a store as Open does, and changes nothing in its directory: what its logs have
// is read into memory, as far as they are not in tables. Nothing may be committed. Several may be
// open at once: the caller makes sure that no process writes the store meanwhile.
func OpenReadOnly(fsys vfs.FS, dir string, log *slog.Logger, shared *Caches) (*Store, error) {
	fsys = readOnlyFS{fsys}
	if err := exists(fsys, dir); err != nil {
		return nil, err
	}
	if _, err := integrity.Check(fsys, dir); err != nil {
		return nil, Error(err)
	}
	st := &Store{
		fs: &deferredSyncFS{FS: fsys}, dir: dir, log: log.With("dir", dir), latch: failstop.New(log, "store"),
		partition: new(partition), share: new(memTableShare), reclaimer: newReclaimer(ReclaimFrom), readOnly: true,
	}
	st.reclaimer.store = st // for Stats; it is not started
	options := &pebble.Options{
		FS: fsys, ReadOnly: true, FormatMajorVersion: Format, Cache: shared.blocks, FileCache: shared.files,
		MemTableSize: readOnlyMemTable,
	}
	// The default scheduler wakes up ten times a second.
	options.Experimental.CompactionScheduler = pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()
	var err error
	if st.db, err = st.latch.Open(dir, options); err != nil {
		return nil, openError(dir, err)
	}
	return st, nil
}

// readOnlyFS refuses every change. Locks are not taken: the file may not exist, nor be writable.
type readOnlyFS struct{ vfs.FS }

// Unwrap returns the file system below, for vfs.Root.
func (r readOnlyFS) Unwrap() vfs.FS { return r.FS }

func refused(op, name string) error {
	return &fs.PathError{Op: op, Path: name, Err: fs.ErrPermission}
}

func (readOnlyFS) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	return nil, refused("create", name)
}

func (readOnlyFS) OpenReadWrite(name string, _ vfs.DiskWriteCategory, _ ...vfs.OpenOption) (vfs.File, error) {
	return nil, refused("open for writing", name)
}

func (readOnlyFS) ReuseForWrite(_, name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	return nil, refused("reuse", name)
}

func (readOnlyFS) Link(_, name string) error                 { return refused("link", name) }
func (readOnlyFS) Remove(name string) error                  { return refused("remove", name) }
func (readOnlyFS) RemoveAll(name string) error               { return refused("remove", name) }
func (readOnlyFS) Rename(_, name string) error               { return refused("rename", name) }
func (readOnlyFS) MkdirAll(name string, _ os.FileMode) error { return refused("mkdir", name) }
func (readOnlyFS) Lock(string) (io.Closer, error)            { return io.NopCloser(nil), nil }
