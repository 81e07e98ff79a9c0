package failstop

import (
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
)

// FS returns base without the failures that Pebble cannot handle: of creating, writing, syncing or
// closing the write-ahead log, the MANIFEST, a marker or the options in dir; of syncing dir; and of
// listing it once background work has begun, which a failed Open would leave without its cache.
// Such a failure makes the latch fail instead, and so does integrity.ErrLost of any operation.
// Otherwise, reads and tables fail normally; Pebble retries to write tables.
//
// Once the latch has failed, nothing in dir changes any more, although Pebble is told so. Other
// directories, such as a checkpoint, are not affected.
//
// It must be the outermost of several file systems, so that it sees the errors of the others.
func (l *Latch) FS(base vfs.FS, dir string) vfs.FS {
	return &latchFS{FS: base, latch: l, dir: base.PathDir(base.PathJoin(dir, "file"))}
}

type latchFS struct {
	vfs.FS
	latch *Latch
	dir   string
	begun atomic.Bool // a log was created, which happens after background work has begun
}

// Unwrap returns the base, for vfs.Root.
func (fs *latchFS) Unwrap() vfs.FS { return fs.FS }

func (fs *latchFS) inside(name string) bool { return fs.PathDir(name) == fs.dir }

func isVital(base string) bool {
	return isLog(base) || strings.HasPrefix(base, "MANIFEST-") || strings.HasPrefix(base, "marker.") ||
		strings.HasPrefix(base, "OPTIONS-") || strings.HasSuffix(base, ".dbtmp")
}

func isLog(base string) bool { return strings.HasSuffix(base, ".log") }

func (fs *latchFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.begin(name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *latchFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.begin(name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(old, name, c) })
}

// begin opens a file for writing; if the latch has failed, or fails now, a file that exists
// nowhere.
func (fs *latchFS) begin(name string, open func() (vfs.File, error)) (vfs.File, error) {
	if !fs.inside(name) {
		return open()
	}
	base := fs.PathBase(name)
	vital := isVital(base)
	if !vital {
		fs.latch.backOff()
		if fs.latch.isPressed() {
			return nil, syscall.ENOSPC
		}
	}
	if isLog(base) {
		fs.begun.Store(true)
	}
	if fs.latch.Err() == nil {
		var f vfs.File
		create := func() (done bool, err error) { f, err = open(); return false, err }
		err := fs.latch.withReserve(vital, create)
		if err == nil {
			return &writtenFile{f, fs.latch, vital}, nil
		}
		if !vital {
			return nil, fs.latch.Seen(err)
		}
		fs.latch.Fail(err)
	}
	f, err := vfs.NewMem().Create("nowhere", vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	return &writtenFile{f, fs.latch, vital}, nil
}

func (fs *latchFS) Open(name string, opts ...vfs.OpenOption) (f vfs.File, err error) {
	if !fs.inside(name) {
		return fs.FS.Open(name, opts...)
	}
	if fs.latch.Err() != nil {
		fs.latch.backOff() // compactions look for tables that were written nowhere
	}
	err = fs.latch.retryRead(func() error {
		f, err = fs.FS.Open(name, opts...)
		return fs.latch.Seen(err)
	})
	if err != nil {
		if cause := fs.latch.Err(); cause != nil { // readers look for them too: it is no damage
			err = cause
		}
		return nil, err
	}
	return checkTable(&readFile{f, fs.latch}, name)
}

// Lock keeps the lock, so that the latch can release it if the store cannot be closed.
func (fs *latchFS) Lock(name string) (io.Closer, error) {
	c, err := fs.FS.Lock(name)
	if err != nil || !fs.inside(name) {
		return c, err
	}
	fs.latch.lock = onceCloser{c, new(sync.Once)}
	return fs.latch.lock, nil
}

type onceCloser struct {
	io.Closer
	once *sync.Once
}

func (c onceCloser) Close() (err error) {
	c.once.Do(func() { err = c.Closer.Close() })
	return err
}

func (fs *latchFS) List(dir string) ([]string, error) {
	names, err := fs.FS.List(dir)
	if err != nil && dir == fs.dir && fs.begun.Load() {
		fs.latch.Fail(err)
		return nil, nil
	}
	return names, err
}

func (fs *latchFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	if err != nil || name != fs.dir {
		return f, err
	}
	return &writtenFile{f, fs.latch, true}, nil
}

func (fs *latchFS) Remove(name string) error {
	if fs.inside(name) && fs.latch.Err() != nil {
		return nil
	}
	return fs.latch.Seen(fs.FS.Remove(name))
}

func (fs *latchFS) Rename(old, name string) error {
	if !fs.inside(name) {
		return fs.FS.Rename(old, name)
	}
	vital := isVital(fs.PathBase(name))
	return fs.latch.try(vital, func() error {
		return fs.latch.withReserve(vital, func() (done bool, err error) { return false, fs.FS.Rename(old, name) })
	})
}

// GetDiskUsage tells Pebble how fast to delete. Pebble can do without it.
func (fs *latchFS) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	u, err := fs.FS.GetDiskUsage(path)
	if err != nil {
		err = vfs.ErrUnsupported
	}
	return u, err
}

// writtenFile is a file that Pebble writes, or a directory that it syncs.
type writtenFile struct {
	vfs.File
	latch *Latch
	vital bool
}

func (f *writtenFile) Write(p []byte) (int, error) {
	err := f.latch.try(f.vital, func() error {
		if !f.vital && f.latch.reserve.used.Load() {
			return syscall.ENOSPC // the rest is for vital files
		}
		written := 0
		return f.latch.withReserve(f.vital, func() (done bool, err error) {
			n, err := f.File.Write(p[written:])
			written += n
			return written == len(p), err
		})
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (f *writtenFile) Sync() error     { return f.latch.try(f.vital, f.File.Sync) }
func (f *writtenFile) SyncData() error { return f.latch.try(f.vital, f.File.SyncData) }

func (f *writtenFile) SyncTo(length int64) (full bool, err error) {
	err = f.latch.try(f.vital, func() (err error) {
		full, err = f.File.SyncTo(length)
		return err
	})
	return full, err
}

func (f *writtenFile) Preallocate(offset, length int64) error {
	if f.latch.Err() != nil || f.latch.reserve.used.Load() {
		return nil
	}
	// Pebble can handle its failure, as on systems without it
	return f.File.Preallocate(offset, length)
}

func (f *writtenFile) Stat() (vfs.FileInfo, error) {
	info, err := f.File.Stat()
	if err != nil && f.vital {
		f.latch.Fail(err)
		return emptyInfo{}, nil
	}
	return info, err
}

// Close releases the file, even if the latch has failed.
func (f *writtenFile) Close() error {
	err := f.File.Close()
	return f.latch.try(f.vital, func() error { return err })
}

// try does something that changes the store, unless the latch has failed. If it is vital, its
// failure is that of the latch.
func (l *Latch) try(vital bool, do func() error) error {
	if l.Err() != nil {
		return nil
	}
	err := do()
	if err != nil && vital {
		l.Fail(err)
		return nil
	}
	return l.Seen(err)
}

// Seen makes the latch fail by an integrity.ErrLost, and returns the error.
func (l *Latch) Seen(err error) error {
	if errors.Is(err, integrity.ErrLost) {
		l.Fail(err)
	}
	return err
}

// emptyInfo stands in when the information on a log cannot be read: it has no bytes.
type emptyInfo struct{ vfs.FileInfo }

func (emptyInfo) Size() int64 { return 0 }

// readFile is a file that Pebble reads.
type readFile struct {
	vfs.File
	latch *Latch
}

func (f *readFile) ReadAt(p []byte, off int64) (n int, err error) {
	if n, err = f.File.ReadAt(p, off); err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	err = f.latch.retryRead(func() error {
		n, err = f.File.ReadAt(p, off)
		return err
	})
	return n, err
}
