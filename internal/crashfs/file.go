package crashfs

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

var (
	errNotForReading = errors.New("crashfs: file was not opened for reading")
	errNotForWriting = errors.New("crashfs: file was not opened for writing")
	errIsDirectory   = errors.New("crashfs: this is a directory")
)

// file is an open file or directory. Its node is nil after Close, so that later use panics.
type file struct {
	disk          *Disk
	node          *node
	name          string // as in Open
	pos           int    // of Read and Write
	reads, writes bool
}

func (f *file) Close() error {
	if f.node == nil {
		panic("crashfs: " + f.name + " is closed twice")
	}
	f.node = nil
	return nil
}

func (f *file) Read(p []byte) (int, error) {
	n, err := f.ReadAt(p, int64(f.pos))
	f.pos += n
	if n > 0 {
		err = nil
	}
	return n, err
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.disk.mu.RLock()
	defer f.disk.mu.RUnlock()
	switch {
	case !f.reads:
		return 0, errNotForReading
	case f.node.isDir():
		return 0, errIsDirectory
	}
	n := f.node.data.readAt(p, int(off))
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *file) write(p []byte, off int) (int, error) {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	switch {
	case !f.writes:
		return 0, errNotForWriting
	case f.node.isDir():
		return 0, errIsDirectory
	}
	f.node.data.writeAt(p, off)
	f.node.modified = time.Now()
	return len(p), nil
}

// spoiled overwrites the argument of Write.
var spoiled [blockSize]byte

func init() {
	for i := range spoiled {
		spoiled[i] = 0xdb
	}
}

// Write overwrites p, as vfs.File allows, to reveal callers that rely on p afterwards.
func (f *file) Write(p []byte) (int, error) {
	n, err := f.write(p, f.pos)
	f.pos += n
	for rest := p[:n]; len(rest) > 0; {
		rest = rest[copy(rest, spoiled[:]):]
	}
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (int, error) { return f.write(p, int(off)) }

func (f *file) Sync() error {
	f.disk.mu.Lock()
	defer f.disk.mu.Unlock()
	if n := f.node; n.isDir() {
		n.syncedChildren = maps.Clone(n.children)
	} else {
		n.data.save(&n.synced)
	}
	return nil
}

func (f *file) SyncData() error { return f.Sync() }

// SyncTo promises nothing, and does nothing.
func (f *file) SyncTo(int64) (fullSync bool, err error) { return false, nil }

func (f *file) Preallocate(int64, int64) error { return nil }

func (f *file) Prefetch(int64, int64) error { return nil }

func (f *file) Fd() uintptr { return vfs.InvalidFd }

func (f *file) Stat() (vfs.FileInfo, error) {
	f.disk.mu.RLock()
	defer f.disk.mu.RUnlock()
	return f.node.info(f.name), nil
}

// info is the state of a node at one time.
type info struct {
	name     string
	size     int64
	modified time.Time
	dir      bool
}

func (n *node) info(name string) info {
	return info{path.Base(name), int64(n.data.size), n.modified, n.isDir()}
}

func (i info) Name() string           { return i.name }
func (i info) Size() int64            { return i.size }
func (i info) ModTime() time.Time     { return i.modified }
func (i info) IsDir() bool            { return i.dir }
func (i info) Sys() any               { return nil }
func (i info) DeviceID() vfs.DeviceID { return vfs.DeviceID{} }

func (i info) Mode() fs.FileMode {
	if i.dir {
		return fs.ModeDir | 0o755
	}
	return 0o755
}
