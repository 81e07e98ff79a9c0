// Package crashfs is a disk in memory. At any time it can be copied in the state after a crash,
// which may have lost data that was not synced. It is for tests, also of applications. Unlike
// vfs.MemFS, it can be copied during any operation, and the same seed gives the same copy. A sync
// copies no bytes; a copy shares all chunks of a file but the last.
package crashfs

import (
	"cmp"
	"errors"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/platform"
)

var errNoName = errors.New("crashfs: empty file name")

// Disk is a file system: paths are separated by slashes, and the working directory is the root.
// All methods may be called concurrently.
type Disk struct {
	mu     sync.RWMutex // guards the fields below, and all nodes
	root   *node
	locked map[string]int // by path: -1 for an owner, or the number of readers
}

var _ vfs.FS = (*Disk)(nil)

// node is a file or a directory. A file may have several names.
type node struct {
	modified time.Time

	data, synced content // of a file; synced survives a crash

	children       map[string]*node // of a directory; nil: this is a file
	syncedChildren map[string]*node // nil: it was never synced
}

func newDir() *node {
	return &node{modified: time.Now(), children: make(map[string]*node)}
}

func (n *node) isDir() bool { return n.children != nil }

// New returns an empty disk.
func New() *Disk { return newDisk(newDir()) }

func newDisk(root *node) *Disk { return &Disk{root: root, locked: make(map[string]int)} }

// Clone returns a copy in the current state, as after the kill of a process. All of the copy counts
// as synced.
func (d *Disk) Clone() *Disk { return d.clone(cloner{killed: true}) }

// CrashClone returns a copy in the state after a power loss: all synced data, and each unsynced
// block of a file or name in a directory with a probability of UnsyncedDataPercent, by RNG. It does
// not use RNG for 0 and 100. A removed name may come back until its directory is synced. All of the
// copy counts as synced.
func (d *Disk) CrashClone(cfg vfs.CrashCloneCfg) *Disk { return d.clone(cloner{cfg: cfg}) }

func (d *Disk) clone(c cloner) *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	c.clones = make(map[*node]*node)
	return newDisk(c.clone(d.root))
}

type cloner struct {
	killed bool
	cfg    vfs.CrashCloneCfg
	clones map[*node]*node
}

func (c *cloner) survives() bool {
	p := c.cfg.UnsyncedDataPercent
	return c.killed || p == 100 || p > 0 && c.cfg.RNG.IntN(100) < p
}

func (c *cloner) clone(n *node) *node {
	if done := c.clones[n]; done != nil {
		return done
	}
	clone := &node{modified: n.modified}
	c.clones[n] = clone
	if !n.isDir() {
		c.cloneFile(n, clone)
		return clone
	}
	names := make(map[string]*node)
	if !c.killed {
		maps.Copy(names, n.syncedChildren)
	}
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		if c.survives() {
			names[name] = n.children[name]
		}
	}
	old := func(name string) int { // 1: the name was removed
		if n.children[name] != names[name] {
			return 1
		}
		return 0
	}
	inOrder := slices.SortedFunc(maps.Keys(names), func(a, b string) int { return cmp.Or(old(a)-old(b), cmp.Compare(a, b)) })
	for _, name := range inOrder {
		child := names[name]
		if child.isDir() && c.clones[child] != nil { // renamed: it only has its new name
			delete(names, name)
			continue
		}
		names[name] = c.clone(child)
	}
	clone.children, clone.syncedChildren = names, maps.Clone(names)
	return clone
}

func (c *cloner) cloneFile(n, clone *node) {
	if c.killed {
		clone.data = n.data.clone()
	} else {
		clone.data = n.synced.clone()
		for off := 0; off < n.data.size; off += blockSize {
			if c.survives() {
				clone.data.take(&n.data, off)
			}
		}
	}
	clone.data.save(&clone.synced)
}

func pathError(op, name string, err error) error { return &os.PathError{Op: op, Path: name, Err: err} }

// parent returns the directory of a name, and the last part of the name, which is empty for the
// root. REQUIRES: d.mu is held.
func (d *Disk) parent(op, name string) (dir *node, last string, err error) {
	dir = d.root
	rest := path.Clean("/" + name)[1:]
	for {
		first, more, found := strings.Cut(rest, "/")
		if !found {
			return dir, first, nil
		}
		child := dir.children[first]
		if child == nil {
			return nil, "", pathError(op, name, fs.ErrNotExist)
		}
		if !child.isDir() {
			return nil, "", pathError(op, name, syscall.ENOTDIR)
		}
		dir, rest = child, more
	}
}

// entry is parent, and refuses an empty name.
func (d *Disk) entry(op, name string) (dir *node, last string, err error) {
	dir, last, err = d.parent(op, name)
	if err == nil && last == "" {
		err = pathError(op, name, errNoName)
	}
	return dir, last, err
}

// find returns the node of a name. REQUIRES: d.mu is held.
func (d *Disk) find(op, name string) (*node, error) {
	dir, last, err := d.parent(op, name)
	if err != nil || last == "" {
		return dir, err
	}
	if n := dir.children[last]; n != nil {
		return n, nil
	}
	return nil, pathError(op, name, fs.ErrNotExist)
}

// create creates an empty file. REQUIRES: d.mu is held.
func (d *Disk) create(name string) (*node, error) {
	dir, last, err := d.entry("create", name)
	if err != nil {
		return nil, err
	}
	if old := dir.children[last]; old != nil && old.isDir() {
		return nil, pathError("create", name, syscall.EISDIR)
	}
	n := &node{modified: time.Now()}
	dir.children[last] = n
	return n, nil
}

func (d *Disk) Create(name string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.create(name)
	if err != nil {
		return nil, err
	}
	return &file{disk: d, node: n, name: name, reads: true, writes: true}, nil
}

func (d *Disk) Link(oldname, newname string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	link := func(err error) error { return &os.LinkError{Op: "link", Old: oldname, New: newname, Err: err} }
	n, err := d.find("link", oldname)
	if err == nil && n.isDir() {
		err = link(syscall.EPERM)
	}
	if err != nil {
		return err
	}
	dir, last, err := d.entry("link", newname)
	if err != nil {
		return err
	}
	if dir.children[last] != nil {
		return link(fs.ErrExist)
	}
	dir.children[last] = n
	return nil
}

func (d *Disk) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	d.mu.RLock()
	n, err := d.find("open", name)
	d.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	return apply(opts, &file{disk: d, node: n, name: name, reads: true}), nil
}

func apply(opts []vfs.OpenOption, f *file) *file {
	for _, o := range opts {
		o.Apply(f)
	}
	return f
}

func (d *Disk) OpenReadWrite(name string, _ vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	d.mu.Lock()
	n, err := d.find("open", name)
	if errors.Is(err, fs.ErrNotExist) {
		n, err = d.create(name)
	}
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return apply(opts, &file{disk: d, node: n, name: name, reads: true, writes: true}), nil
}

func (d *Disk) OpenDir(name string) (vfs.File, error) { return d.Open(name) }

func (d *Disk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, last, err := d.entry("remove", name)
	if err != nil {
		return err
	}
	n := dir.children[last]
	switch {
	case n == nil:
		return pathError("remove", name, fs.ErrNotExist)
	case len(n.children) > 0:
		return pathError("remove", name, syscall.ENOTEMPTY)
	}
	delete(dir.children, last)
	return nil
}

func (d *Disk) RemoveAll(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, last, err := d.entry("remove", name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	delete(dir.children, last)
	return nil
}

// rename moves a node to another name. REQUIRES: d.mu is held.
func (d *Disk) rename(oldname, newname string) (*node, error) {
	from, old, err := d.entry("rename", oldname)
	if err != nil {
		return nil, err
	}
	n := from.children[old]
	if n == nil {
		return nil, pathError("rename", oldname, fs.ErrNotExist)
	}
	to, last, err := d.entry("rename", newname)
	if err != nil {
		return nil, err
	}
	if target := to.children[last]; target != nil && target != n {
		switch {
		case target.isDir() && !n.isDir():
			return nil, pathError("rename", newname, syscall.EISDIR)
		case !target.isDir() && n.isDir():
			return nil, pathError("rename", newname, syscall.ENOTDIR)
		case len(target.children) > 0:
			return nil, pathError("rename", newname, syscall.ENOTEMPTY)
		}
	}
	delete(from.children, old)
	to.children[last] = n
	return n, nil
}

func (d *Disk) Rename(oldname, newname string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.rename(oldname, newname)
	return err
}

func (d *Disk) ReuseForWrite(oldname, newname string, _ vfs.DiskWriteCategory) (vfs.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.rename(oldname, newname)
	if err != nil {
		return nil, err
	}
	return &file{disk: d, node: n, name: newname, writes: true}, nil
}

func (d *Disk) MkdirAll(name string, _ os.FileMode) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir := d.root
	for part := range strings.SplitSeq(path.Clean("/"+name), "/") {
		if part == "" {
			continue
		}
		child := dir.children[part]
		if child == nil {
			child = newDir()
			dir.children[part] = child
		}
		if !child.isDir() {
			return pathError("mkdir", name, syscall.ENOTDIR)
		}
		dir = child
	}
	return nil
}

func (d *Disk) Lock(name string) (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.locked[name]; n != 0 {
		return nil, &platform.Held{Path: name, Reads: n > 0, Here: true}
	}
	if _, err := d.create(name); err != nil {
		return nil, err
	}
	return d.lock(name, -1), nil
}

// LockShared locks an existing file together with other readers.
func (d *Disk) LockShared(name string) (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locked[name] < 0 {
		return nil, &platform.Held{Path: name, Here: true}
	}
	if _, err := d.find("lock", name); err != nil {
		return nil, err
	}
	return d.lock(name, 1), nil
}

// lock adds the lock of an owner (-1) or a reader (1). REQUIRES: mu is held, and no other lock
// excludes it.
func (d *Disk) lock(name string, n int) io.Closer {
	d.locked[name] += n
	return &fileLock{d, name, n}
}

type fileLock struct {
	disk *Disk // nil: it was closed
	name string
	n    int
}

func (l *fileLock) Close() error {
	if d := l.disk; d != nil {
		l.disk = nil
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.locked[l.name] -= l.n; d.locked[l.name] == 0 {
			delete(d.locked, l.name)
		}
	}
	return nil
}

// orderOf sorts the names of a directory in an order that is arbitrary but deterministic.
func orderOf(name string) uint32 { return crc32.ChecksumIEEE([]byte(name)) }

func (d *Disk) List(name string) ([]string, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	n, err := d.find("list", name)
	if err != nil {
		return nil, err
	}
	if !n.isDir() {
		return nil, pathError("list", name, syscall.ENOTDIR)
	}
	names := slices.Collect(maps.Keys(n.children))
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(orderOf(a), orderOf(b)), cmp.Compare(a, b)) })
	return names, nil
}

func (d *Disk) Stat(name string) (vfs.FileInfo, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	n, err := d.find("stat", name)
	if err != nil {
		return nil, err
	}
	return n.info(name), nil
}

func (*Disk) PathBase(p string) string { return path.Base(p) }

func (*Disk) PathJoin(elem ...string) string { return path.Join(elem...) }

func (*Disk) PathDir(p string) string { return path.Dir(p) }

// GetDiskUsage fails: only memory limits the disk.
func (*Disk) GetDiskUsage(string) (vfs.DiskUsage, error) { return vfs.DiskUsage{}, vfs.ErrUnsupported }

func (*Disk) Unwrap() vfs.FS { return nil }
