package testkit

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/crashfs"
)

// MinFree is the Options.MinFreeBytes of queues on a disk that tests fill.
const MinFree = 4 << 20

// FreeAt has a free space for each level of engine.Room of such a queue.
var FreeAt = [...]int64{64 << 20, MinFree - 1, MinFree/4*3 - 1, MinFree/2 - 1, MinFree/4 - 1}

// SmallDisk is a file system with limited room.
type SmallDisk struct {
	vfs.FS
	Size  atomic.Int64
	Used  atomic.Int64
	Asked atomic.Int64 // calls of GetDiskUsage
	Only  string       // suffix of the limited files; "": all files
	Err   error        // of operations without room
	Nodes atomic.Int64 // maximum number of files
	files atomic.Int64 // number of files, removed but open ones included
	open  sync.Map     // name to the *smallDiskFile open for writing
}

// NewSmallDisk returns an empty disk in memory with a size in bytes, for any number of files.
func NewSmallDisk(size int64) *SmallDisk {
	d := &SmallDisk{FS: crashfs.New(), Err: syscall.ENOSPC}
	d.Size.Store(size)
	d.Nodes.Store(1 << 30)
	return d
}

func (d *SmallDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	d.Asked.Add(1)
	return vfs.DiskUsage{AvailBytes: uint64(max(d.Size.Load()-d.Used.Load(), 0)), TotalBytes: uint64(d.Size.Load())}, nil
}

func (d *SmallDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if _, err := d.Stat(name); err != nil && !d.takeNode() {
		return nil, d.Err
	}
	f, err := d.FS.Create(name, c)
	return d.writing(f, name), err
}

// takeNode counts a new file; false: there are too many. A failed call never takes the place of a
// concurrent one.
func (d *SmallDisk) takeNode() bool {
	for {
		n := d.files.Load()
		if n >= d.Nodes.Load() {
			return false
		}
		if d.files.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (d *SmallDisk) writing(f vfs.File, name string) *smallDiskFile {
	w := &smallDiskFile{File: f, disk: d, name: name}
	d.open.Store(name, w)
	return w
}

func (d *SmallDisk) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d.forget(old)
	d.files.Add(1)
	f, err := d.FS.ReuseForWrite(old, name, c)
	return d.writing(f, name), err
}

func (d *SmallDisk) Remove(name string) error {
	d.forget(name)
	return d.FS.Remove(name)
}

func (d *SmallDisk) forget(name string) {
	if info, err := d.Stat(name); err == nil {
		d.Used.Add(-info.Size())
		if w, open := d.open.LoadAndDelete(name); open {
			w.(*smallDiskFile).nameless.Store(true) // it counts as a file until it is closed
			return
		}
		d.files.Add(-1)
	}
}

type smallDiskFile struct {
	vfs.File
	disk     *SmallDisk
	name     string
	reserved int64 // set aside for a file without a name
	nameless atomic.Bool
}

// take reserves n bytes for the file; false: there is no room.
func (f *smallDiskFile) take(n int64) bool {
	if used := f.disk.Used.Add(n); used > f.disk.Size.Load() && strings.HasSuffix(f.name, f.disk.Only) {
		f.disk.Used.Add(-n)
		return false
	}
	return true
}

// Write writes p, or half of it if there is no room for all.
func (f *smallDiskFile) Write(p []byte) (int, error) {
	if f.take(int64(len(p))) {
		return f.File.Write(p)
	}
	half := p[:len(p)/2]
	if !f.take(int64(len(half))) {
		return 0, f.disk.Err
	}
	n, err := f.File.Write(half)
	return n, errors.Join(err, f.disk.Err)
}

// Preallocate reserves space for a removed file. Other files take space when they are written.
func (f *smallDiskFile) Preallocate(_, length int64) error {
	if _, err := f.disk.Stat(f.name); err == nil || f.disk.Only != "" {
		return nil
	}
	if !f.take(length) {
		return f.disk.Err
	}
	f.reserved += length
	return nil
}

func (f *smallDiskFile) Close() error {
	f.disk.Used.Add(-f.reserved)
	f.reserved = 0
	f.disk.open.CompareAndDelete(f.name, f)
	if f.nameless.CompareAndSwap(true, false) {
		f.disk.files.Add(-1)
	}
	return f.File.Close()
}

// Free sets the free space.
func (d *SmallDisk) Free(bytes int64) { d.Size.Store(d.Used.Load() + bytes) }

// FillNodes makes the creation of further files fail.
func (d *SmallDisk) FillNodes() { d.Nodes.Store(d.files.Load()) }
