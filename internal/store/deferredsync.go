package store

import (
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// deferredSyncFS is the file system of a store. While deferred names a directory, files and
// directories that are opened at or below it are not synced: a store that is copied while everybody
// waits need not wait for the disk. Whoever sets deferred syncs the content of the directory
// afterwards, except for tables: usually they are links to synced ones, and Pebble syncs those that
// it copies.
type deferredSyncFS struct {
	vfs.FS
	deferred atomic.Pointer[string]
}

// DeferSync returns fs, in which nothing at or below a directory is synced except tables. The
// caller syncs the rest when everything is written.
func DeferSync(fs vfs.FS, dir string) vfs.FS {
	d := &deferredSyncFS{FS: fs}
	d.deferred.Store(&dir)
	return d
}

func (fs *deferredSyncFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, category)
	return fs.wrap(f, err, name)
}

func (fs *deferredSyncFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.wrap(f, err, name)
}

// Unwrap returns the file system below, for vfs.Root.
func (fs *deferredSyncFS) Unwrap() vfs.FS { return fs.FS }

func (fs *deferredSyncFS) wrap(f vfs.File, err error, name string) (vfs.File, error) {
	dir := fs.deferred.Load()
	if err != nil || dir == nil || strings.HasSuffix(name, TableSuffix) ||
		name != *dir && !strings.HasPrefix(name, fs.PathJoin(*dir, "x")[:len(*dir)+1]) {
		return f, err
	}
	return unsyncedFile{f}, nil
}

// TableSuffix is the suffix of the names of Pebble's tables.
const TableSuffix = ".sst"

type unsyncedFile struct{ vfs.File }

func (unsyncedFile) Sync() error                { return nil }
func (unsyncedFile) SyncData() error            { return nil }
func (unsyncedFile) SyncTo(int64) (bool, error) { return false, nil }
