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
	"codeq/internal/integrity"
)

// hold is the file system for all access to a locked directory. It keeps the directory open, and
// each directory in it from its first use on, so that their inodes are not reused. Before a file is
// opened by its name, created, renamed or removed, it checks that the path still leads to the open
// directory; if not, the error matches integrity.ErrLost, and nothing is done. So it never writes
// to a replaced directory. Writes to open files, such as a log, are not checked; Directory.Close
// checks everything once more.
//
// Between the check and the following call the path may still change, since Pebble names its files
// by paths. A created file is checked again before the first write.
//
// A file system in memory is not checked. All methods are safe for concurrent use.
type hold struct {
	vfs.FS
	path   string
	prefix string // of the paths in the directory; "": they are not checked
	inodes bool   // the file system is that of the operating system

	opening   atomic.Pointer[record] // for every store that is written, without files; or nil
	removed   atomic.Bool            // by RemoveAll
	opened    atomic.Bool            // see Directory.Opened
	recovered func() bool            // see Directory.Opened; nil: nothing was recovered

	mu   sync.Mutex          // guards dirs; not held during file operations that may hang
	dirs map[string]*heldDir // by the name in path; "": path
}

// heldDir is an open directory.
type heldDir struct {
	path string
	file *os.File    // nil: there are no inodes
	info fs.FileInfo // of file

	mu      sync.Mutex // guards the following, and is held while a record is written
	record  *record    // of a written store; nil: it is unchanged so far
	written time.Time  // time of the record's last write
}

// newHold opens a directory.
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

// check checks that the path of a directory still leads to it.
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
	return fmt.Errorf("%w: %s was moved, removed or replaced while it was open: %w", base.ErrFailed, path, integrity.ErrLost)
}

// within returns the first part of a path below the directory. deep: the path goes on below it. ok
// is false if the path is not in the directory.
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

// check checks that a path still leads to the same directory, and returns that directory, if it is
// held.
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
		return nil, nil // the call itself will fail
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

// change is check before a change. It first writes the record of a store.
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

// forget closes the held directory of a path that is about to be replaced or removed.
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

// checkAll checks that all paths still lead to the open directories, and that stores still have
// their files.
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

// Close closes all directories.
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

// created returns a created file, if its path still leads to the held directory.
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

// GetDiskUsage also renews the record of a store; its owner calls it regularly.
func (h *hold) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	d, err := h.check(h.PathJoin(path, "x"))
	if err != nil {
		return vfs.DiskUsage{}, err
	}
	h.renew(d)
	return h.FS.GetDiskUsage(path)
}
