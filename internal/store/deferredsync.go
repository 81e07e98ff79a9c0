package store

import (
	"errors"
	"strings"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/integrity"
)

// deferredSyncFS is the file system of a store. It syncs a directory before a marker is created in
// it. While deferred names a directory, it syncs no files and directories at or below it: a copy
// that other callers wait for does not wait for the disk. The code that sets deferred syncs the
// content of the directory afterwards, except for tables: usually they are links to synced ones,
// and Pebble syncs those that it copies.
type deferredSyncFS struct {
	vfs.FS
	deferred atomic.Pointer[string]
}

// DeferSync returns fs, which syncs only tables at or below a directory. The caller syncs the rest
// when everything is written.
func DeferSync(fs vfs.FS, dir string) vfs.FS {
	d := &deferredSyncFS{FS: fs}
	d.deferred.Store(&dir)
	return d
}

// Create syncs the directory before it creates a marker. A marker names a file that Pebble has just
// created, such as a manifest, and Pebble syncs the directory after both: a power failure in
// between could keep the marker and lose the file.
func (fs *deferredSyncFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasPrefix(fs.PathBase(name), markerPrefix) {
		if err := fs.syncDir(fs.PathDir(name)); err != nil {
			return nil, err
		}
	}
	f, err := fs.FS.Create(name, category)
	return fs.wrap(f, err, name)
}

// markerPrefix is the prefix of the names of Pebble's markers.
const markerPrefix = "marker."

func (fs *deferredSyncFS) syncDir(name string) error {
	d, err := fs.OpenDir(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (fs *deferredSyncFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.wrap(f, err, name)
}

// Unwrap returns the file system below, for vfs.Root.
func (fs *deferredSyncFS) Unwrap() vfs.FS { return fs.FS }

func (fs *deferredSyncFS) wrap(f vfs.File, err error, name string) (vfs.File, error) {
	dir := fs.deferred.Load()
	if err != nil || dir == nil || integrity.IsTable(name) ||
		name != *dir && !strings.HasPrefix(name, fs.PathJoin(*dir, "x")[:len(*dir)+1]) {
		return f, err
	}
	return unsyncedFile{f}, nil
}

type unsyncedFile struct{ vfs.File }

func (unsyncedFile) Sync() error                { return nil }
func (unsyncedFile) SyncData() error            { return nil }
func (unsyncedFile) SyncTo(int64) (bool, error) { return false, nil }
