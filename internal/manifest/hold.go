package manifest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
)

// hold is the file system by which a locked directory is read and changed. It has the directory
// open, and each directory in it from its first use on, so that their inodes are not used again.
// Before a file is opened by its name, created, renamed or removed, it makes sure that the path
// still leads to what it has open; if not, the error matches failstop.ErrLost, and nothing is done.
// So nothing is written in another directory that was put there. What is written to open files,
// such as a log, is not checked; Directory.Close checks everything once more.
//
// Between the check and the call that follows the path may still be changed: Pebble names its files
// by paths. What was created is checked again before anything is written to it.
//
// A file system in memory is not checked. All methods may be called concurrently.
type hold struct {
	vfs.FS
	path   string
	prefix string // of the paths in it; "": it is not held
	inodes bool   // the file system is that of the operating system

	opening   atomic.Pointer[record] // that of every store while they may be written, without files, or nil
	removed   atomic.Bool            // by RemoveAll
	opened    atomic.Bool            // see Directory.Opened
	recovered func() bool            // see Directory.Opened; nil: nothing was taken back

	mu   sync.Mutex          // guards dirs, and is held for no call of the file system that may hang
	dirs map[string]*heldDir // by the name in path; "": path
}

// heldDir is a directory that is open.
type heldDir struct {
	path string
	file *os.File    // nil: there are no inodes
	info fs.FileInfo // of file

	mu      sync.Mutex // guards the following, and is held while a record is written
	record  *record    // of a store that is written; nil: nothing in it was changed yet
	written time.Time  // when the record was begun or renewed
}

// newHold holds a directory.
func newHold(fsys vfs.FS, path string) (*hold, error) {
	h := &hold{
		FS: fsys, path: path, prefix: strings.TrimSuffix(fsys.PathJoin(path, "x"), "x"), inodes: vfs.Root(fsys) == vfs.Default,
		dirs: make(map[string]*heldDir),
	}
	d, err := h.openDir(path)
	if err != nil {
		return nil, err
	}
	h.dirs[""] = d
	return h, nil
}

// Unwrap returns the file system below, for vfs.Root.
func (h *hold) Unwrap() vfs.FS { return h.FS }

func (h *hold) openDir(path string) (*heldDir, error) {
	d := &heldDir{path: path}
	if !h.inodes {
		return d, nil
	}
	var err error
	if d.file, err = os.Open(path); err == nil {
		d.info, err = d.file.Stat()
	}
	if err == nil && !d.info.IsDir() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *heldDir) close() error {
	if d == nil || d.file == nil {
		return nil
	}
	return d.file.Close()
}

// check makes sure that the path of a directory still leads to it.
func (d *heldDir) check() error {
	if d.file == nil {
		return nil
	}
	info, err := os.Stat(d.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err != nil || !os.SameFile(info, d.info) {
		return lost(d.path)
	}
	return nil
}

func lost(path string) error {
	return fmt.Errorf("%w: %s was moved, removed or replaced while it was open: %w", base.ErrFailed, path, failstop.ErrLost)
}

// within returns the name of what is in the directory and has a path, or holds the file that has
// it: deep. ok is false if the path does not lead into the directory.
func (h *hold) within(path string) (name string, deep, ok bool) {
	if h.prefix == "" {
		return "", false, false
	}
	if path == h.path {
		return "", false, true
	}
	rest, ok := strings.CutPrefix(path, h.prefix)
	if !ok {
		return "", false, false
	}
	name, _, deep = strings.Cut(rest, h.prefix[len(h.prefix)-1:])
	return name, deep, true
}

// check makes sure that a path leads where it has led. It returns the directory in which the path
// is, if that is one in the held one.
func (h *hold) check(path string) (*heldDir, error) {
	name, deep, ok := h.within(path)
	if !ok {
		return nil, nil
	}
	h.mu.Lock()
	top, d := h.dirs[""], h.dirs[name]
	h.mu.Unlock()
	if err := top.check(); err != nil || !deep {
		return nil, err
	}
	if d != nil {
		return d, d.check()
	}
	d, err := h.openDir(h.PathJoin(h.path, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // which the call finds out
	}
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if other := h.dirs[name]; other != nil {
		return other, d.close()
	}
	h.dirs[name] = d
	return d, nil
}

// change is check before the path, or what it names, is changed. The record of a store is written
// first.
func (h *hold) change(path string) (*heldDir, error) {
	d, err := h.check(path)
	if err != nil || d == nil {
		return d, err
	}
	if opening := h.opening.Load(); opening != nil && isStore(h.PathBase(d.path)) {
		return d, h.begin(d, opening)
	}
	return d, nil
}

// forget ends the hold of what is in the directory by the name of path, which is about to be
// another one.
func (h *hold) forget(path string) error {
	name, deep, ok := h.within(path)
	if !ok || deep || name == "" {
		return nil
	}
	h.mu.Lock()
	d := h.dirs[name]
	delete(h.dirs, name)
	h.mu.Unlock()
	return d.close()
}

// checkAll makes sure that all directories are where they were, and that stores have the files with
// what was acknowledged.
func (h *hold) checkAll() error {
	if h.removed.Load() {
		return nil
	}
	h.mu.Lock()
	dirs := slices.Collect(maps.Values(h.dirs))
	h.mu.Unlock()
	for _, d := range dirs {
		if err := errors.Join(d.check(), d.checkFiles()); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the hold.
func (h *hold) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, d := range h.dirs {
		errs = append(errs, d.close())
	}
	return errors.Join(errs...)
}

func (h *hold) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d, err := h.change(name)
	if err != nil {
		return nil, err
	}
	f, err := h.FS.Create(name, c)
	return h.created(d, name, f, err)
}

func (h *hold) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	d, err := h.change(name)
	if err != nil {
		return nil, err
	}
	f, err := h.FS.OpenReadWrite(name, c, opts...)
	return h.created(d, name, f, err)
}

func (h *hold) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d, err := h.change(name)
	if err != nil {
		return nil, err
	}
	d.removed(h.PathBase(old))
	f, err := h.FS.ReuseForWrite(old, name, c)
	return h.created(d, name, f, err)
}

// created returns a file that is about to be written, if it is where it is to be.
func (h *hold) created(d *heldDir, name string, f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	if _, err := h.check(name); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	h.note(d, h.PathBase(name))
	return f, nil
}

func (h *hold) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if _, err := h.check(name); err != nil {
		return nil, err
	}
	return h.FS.Open(name, opts...)
}

func (h *hold) OpenDir(name string) (vfs.File, error) {
	if _, err := h.check(name); err != nil {
		return nil, err
	}
	return h.FS.OpenDir(name)
}

func (h *hold) List(dir string) ([]string, error) {
	if _, err := h.check(h.PathJoin(dir, "x")); err != nil {
		return nil, err
	}
	return h.FS.List(dir)
}

func (h *hold) Link(old, name string) error {
	if _, err := h.check(old); err != nil {
		return err
	}
	if _, err := h.change(name); err != nil {
		return err
	}
	return h.FS.Link(old, name)
}

func (h *hold) Remove(name string) error {
	d, err := h.change(name)
	if err != nil {
		return err
	}
	d.removed(h.PathBase(name))
	return h.FS.Remove(name)
}

func (h *hold) RemoveAll(name string) error {
	d, err := h.change(name)
	if err != nil {
		return err
	}
	d.removed(h.PathBase(name))
	if err := h.forget(name); err != nil {
		return err
	}
	err = h.FS.RemoveAll(name)
	if err == nil && name == h.path {
		h.removed.Store(true)
	}
	return err
}

func (h *hold) Rename(old, name string) error {
	from, err := h.change(old)
	if err != nil {
		return err
	}
	to, err := h.change(name)
	if err != nil {
		return err
	}
	from.removed(h.PathBase(old))
	if err := errors.Join(h.forget(old), h.forget(name)); err != nil {
		return err
	}
	h.sealed(to, h.PathBase(name))
	return h.FS.Rename(old, name)
}

func (h *hold) MkdirAll(dir string, perm os.FileMode) error {
	if _, err := h.change(dir); err != nil {
		return err
	}
	return h.FS.MkdirAll(dir, perm)
}

func (h *hold) Lock(name string) (io.Closer, error) {
	if _, err := h.check(name); err != nil {
		return nil, err
	}
	return h.FS.Lock(name)
}

// GetDiskUsage is called now and then by whoever writes a store.
func (h *hold) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	d, err := h.check(h.PathJoin(path, "x"))
	if err != nil {
		return vfs.DiskUsage{}, err
	}
	h.renew(d)
	return h.FS.GetDiskUsage(path)
}
