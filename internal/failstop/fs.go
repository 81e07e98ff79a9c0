package failstop

import (
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// FS returns base with the failures hidden from Pebble that it cannot stand:
// to create, write, sync or close the write-ahead log, the MANIFEST or a marker
// in dir, or to sync dir. Instead the latch fails. What is read, and tables,
// fail as they do; Pebble tries again to write those.
//
// Once the latch has failed, nothing in dir changes any more, and Pebble is told
// that it does. What is in other directories, such as a checkpoint, is left alone.
//
// It belongs outside of other file systems: no error of theirs is one that
// Pebble cannot stand then. An error while the store is being opened may be
// hidden as well: ask Err when pebble.Open has returned.
func (l *Latch) FS(base vfs.FS, dir string) vfs.FS { return &latchFS{base, l, dir} }

type latchFS struct {
	vfs.FS
	latch *Latch
	dir   string
}

// Unwrap returns the base, for vfs.Root.
func (fs *latchFS) Unwrap() vfs.FS { return fs.FS }

func (fs *latchFS) inside(name string) bool { return fs.PathDir(name) == fs.dir }

func isVital(base string) bool {
	return strings.HasSuffix(base, ".log") || strings.HasPrefix(base, "MANIFEST-") || strings.HasPrefix(base, "marker.")
}

func (fs *latchFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.begin(name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *latchFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.begin(name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(old, name, c) })
}

// begin opens a file for writing: one that nobody finds if the latch has failed
// or fails now.
func (fs *latchFS) begin(name string, open func() (vfs.File, error)) (vfs.File, error) {
	if !fs.inside(name) {
		return open()
	}
	vital := isVital(fs.PathBase(name))
	if !vital {
		fs.latch.backOff()
	}
	if fs.latch.Err() == nil {
		f, err := open()
		if err == nil {
			return &written{f, fs.latch, vital}, nil
		}
		if !vital {
			return nil, err
		}
		fs.latch.Fail(err)
	}
	f, err := vfs.NewMem().Create("nowhere", vfs.WriteCategoryUnspecified)
	if err != nil {
		return nil, err
	}
	return &written{f, fs.latch, vital}, nil
}

func (fs *latchFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if fs.latch.Err() != nil && fs.inside(name) {
		fs.latch.backOff() // compactions look for tables that were written nowhere
	}
	f, err := fs.FS.Open(name, opts...)
	if err != nil {
		return nil, err
	}
	return &read{f}, nil
}

func (fs *latchFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	if err != nil || name != fs.dir {
		return f, err
	}
	return &written{f, fs.latch, true}, nil
}

func (fs *latchFS) Remove(name string) error {
	return fs.change(name, func() error { return fs.FS.Remove(name) })
}

func (fs *latchFS) Rename(old, name string) error {
	return fs.change(name, func() error { return fs.FS.Rename(old, name) })
}

func (fs *latchFS) Link(old, name string) error {
	return fs.change(name, func() error { return fs.FS.Link(old, name) })
}

func (fs *latchFS) change(name string, do func() error) error {
	if fs.latch.Err() != nil && fs.inside(name) {
		return nil
	}
	return do()
}

// GetDiskUsage tells Pebble how fast to delete, which can do without.
func (fs *latchFS) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	u, err := fs.FS.GetDiskUsage(path)
	if err != nil {
		err = vfs.ErrUnsupported
	}
	return u, err
}

// written is a file that Pebble writes, or the directory that it syncs.
type written struct {
	vfs.File
	latch *Latch
	vital bool
}

func (f *written) Write(p []byte) (int, error) {
	err := f.try(func() error {
		_, err := f.File.Write(p)
		return err
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (f *written) Sync() error     { return f.try(f.File.Sync) }
func (f *written) SyncData() error { return f.try(f.File.SyncData) }

func (f *written) SyncTo(length int64) (full bool, err error) {
	err = f.try(func() (err error) {
		full, err = f.File.SyncTo(length)
		return err
	})
	return full, err
}

func (f *written) Preallocate(offset, length int64) error {
	if f.latch.Err() != nil {
		return nil
	}
	return f.File.Preallocate(offset, length) // Pebble can stand it to fail, as it does where there is no such thing
}

func (f *written) Stat() (vfs.FileInfo, error) {
	info, err := f.File.Stat()
	if err != nil && f.vital {
		f.latch.Fail(err)
		return nowhere{}, nil
	}
	return info, err
}

// Close releases the file, whatever has failed.
func (f *written) Close() error {
	err := f.File.Close()
	return f.try(func() error { return err })
}

func (f *written) try(do func() error) error {
	if f.latch.Err() != nil {
		return nil
	}
	err := do()
	if err != nil && f.vital {
		f.latch.Fail(err)
		return nil
	}
	return err
}

// nowhere is what is known of a log of which nothing can be learnt: no byte.
type nowhere struct{ vfs.FileInfo }

func (nowhere) Size() int64 { return 0 }

// read is a file that Pebble reads. A compaction that fails to is begun again at
// once.
type read struct{ vfs.File }

func (f *read) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
		time.Sleep(retryEvery)
	}
	return n, err
}
