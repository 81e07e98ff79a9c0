package testkit

import (
	"errors"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// ErrBroken is the error of injected failures.
var ErrBroken = errors.New("the disk is broken")

// HookFS is a file system that calls Before before each change. An error of Before becomes the
// error of the operation, which is then not done, or half done if it is a write.
type HookFS struct {
	vfs.FS
	Before func(op, name string) error
	Wrote  func(f vfs.File)  // after a write; may be nil
	Read   func(name string) // before a file is opened to read, and each read; may be nil
}

// Breakable returns a file system. While broken is set, an operation on the files of shard 0 with
// an extension fails on it. The operation "begin" means create or reuse.
func Breakable(base vfs.FS, op, extension string, fails error) (fs *HookFS, broken *atomic.Bool) {
	broken = new(atomic.Bool)
	return &HookFS{FS: base, Before: func(o, name string) error {
		if o == "create" || o == "reuse" {
			o = "begin"
		}
		if broken.Load() && o == op && strings.Contains(name, "shard-000") && strings.HasSuffix(name, extension) {
			return fails
		}
		return nil
	}}, broken
}

func (fs *HookFS) file(op, name string, open func() (vfs.File, error)) (vfs.File, error) {
	if err := fs.Before(op, name); err != nil {
		return nil, err
	}
	f, err := open()
	if err != nil {
		return nil, err
	}
	return &hookFile{f, fs, name}, nil
}

func (fs *HookFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file("create", name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *HookFS) ReuseForWrite(oldname, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.file("reuse", name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(oldname, name, c) })
}

func (fs *HookFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.file("open", name, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

func (fs *HookFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if fs.Read == nil {
		return fs.FS.Open(name, opts...)
	}
	fs.Read(name)
	f, err := fs.FS.Open(name, opts...)
	if err != nil {
		return nil, err
	}
	return &hookFile{f, fs, name}, nil
}

func (fs *HookFS) OpenDir(name string) (vfs.File, error) {
	return fs.file("open directory", name, func() (vfs.File, error) { return fs.FS.OpenDir(name) })
}

func (fs *HookFS) Rename(oldname, newname string) error {
	if err := fs.Before("rename", newname); err != nil {
		return err
	}
	return fs.FS.Rename(oldname, newname)
}

func (fs *HookFS) Remove(name string) error {
	if err := fs.Before("remove", name); err != nil {
		return err
	}
	return fs.FS.Remove(name)
}

func (fs *HookFS) Unwrap() vfs.FS { return fs.FS }

type hookFile struct {
	vfs.File
	fs   *HookFS
	name string
}

func (f *hookFile) Write(p []byte) (int, error) {
	if err := f.fs.Before("write", f.name); err != nil {
		n, _ := f.File.Write(p[:len(p)/2])
		return n, err
	}
	n, err := f.File.Write(p)
	if f.fs.Wrote != nil {
		f.fs.Wrote(f.File)
	}
	return n, err
}

func (f *hookFile) Read(p []byte) (int, error) {
	if f.fs.Read != nil {
		f.fs.Read(f.name)
	}
	return f.File.Read(p)
}

func (f *hookFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fs.Read != nil {
		f.fs.Read(f.name)
	}
	return f.File.ReadAt(p, off)
}

func (f *hookFile) Sync() error {
	if err := f.fs.Before("sync", f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *hookFile) SyncData() error {
	if err := f.fs.Before("sync", f.name); err != nil {
		return err
	}
	return f.File.SyncData()
}

func (f *hookFile) SyncTo(length int64) (bool, error) {
	if err := f.fs.Before("sync", f.name); err != nil {
		return false, err
	}
	return f.File.SyncTo(length)
}

func (f *hookFile) Close() error {
	return errors.Join(f.fs.Before("close", f.name), f.File.Close())
}
