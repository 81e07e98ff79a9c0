package codeq

import (
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// lateFS is the file system of a store. While late names a directory, files and
// directories that are opened at or below it ignore that they are to be synced:
// a store that is copied while everybody waits need not wait for the disk. Who
// names the directory syncs what is in it afterwards, but for tables: as a rule they are
// links to synced ones, and those that Pebble had to copy are synced by it.
type lateFS struct {
	vfs.FS
	late atomic.Pointer[string]
}

func (fs *lateFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	return fs.wrap(f, err, name)
}

func (fs *lateFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.wrap(f, err, name)
}

// Unwrap returns the file system below, for vfs.Root.
func (fs *lateFS) Unwrap() vfs.FS { return fs.FS }

func (fs *lateFS) wrap(f vfs.File, err error, name string) (vfs.File, error) {
	late := fs.late.Load()
	if err != nil || late == nil || strings.HasSuffix(name, tableSuffix) ||
		name != *late && !strings.HasPrefix(name, fs.PathJoin(*late, "x")[:len(*late)+1]) {
		return f, err
	}
	return lateFile{f}, nil
}

// tableSuffix is how the names of Pebble's tables end.
const tableSuffix = ".sst"

type lateFile struct{ vfs.File }

func (lateFile) Sync() error                { return nil }
func (lateFile) SyncData() error            { return nil }
func (lateFile) SyncTo(int64) (bool, error) { return false, nil }
