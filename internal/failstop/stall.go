package failstop

import (
	"log/slog"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/guard"
)

// Watch notices operations on files that do not return, as on a disk that hangs. They need not end
// for it: nothing of it waits for the disk, and no lock of it is held during an operation. While
// nothing is under way, it does nothing.
type Watch struct {
	after time.Duration
	log   *slog.Logger
	parts []*Part

	mu     sync.Mutex // guards change
	change chan struct{}

	questions sync.WaitGroup // for free space
}

// NewWatch returns a watch over some parts of a directory, by their names. A part is stalled while
// one of its operations has been under way for so long.
func NewWatch(after time.Duration, log *slog.Logger, names ...string) *Watch {
	w := &Watch{after: after, log: log}
	for _, name := range names {
		w.parts = append(w.parts, &Part{watch: w, name: name})
	}
	return w
}

// After is how long an operation may take.
func (w *Watch) After() time.Duration { return w.after }

// Part is one of the parts, by its index.
func (w *Watch) Part(i int) *Part { return w.parts[i] }

// Stalled is the part that has been stalled for longest, and for how long; nil: none is stalled.
func (w *Watch) Stalled() (longest *Part, age time.Duration) {
	for _, p := range w.parts {
		if a := p.Stalled(); a > age {
			longest, age = p, a
		}
	}
	return longest, age
}

// Changed returns a channel that is closed when a part has become stalled, or is no more.
func (w *Watch) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.change == nil {
		w.change = make(chan struct{})
	}
	return w.change
}

// Await waits until done is closed. If an operation has not returned for twice After meanwhile, it
// returns its part, and for how long that has been stalled. A nil Watch waits.
func (w *Watch) Await(done <-chan struct{}) (stuck *Part, age time.Duration) {
	if w == nil {
		<-done
		return nil, 0
	}
	for began := time.Now(); ; {
		change := w.Changed()
		left := 2 * w.after // nothing is stalled: the end of it would be a change
		if stuck, age = w.Stalled(); stuck != nil {
			left -= min(age, time.Since(began))
		}
		t := time.NewTimer(left)
		select {
		case <-done:
			t.Stop()
			return nil, 0
		default:
		}
		if stuck != nil && left <= 0 {
			t.Stop()
			return stuck, age
		}
		select {
		case <-done:
			t.Stop()
			return nil, 0
		case <-change:
		case <-t.C:
		}
		t.Stop()
	}
}

// Rest stops the timers of the parts on which nothing is under way: they keep the watch in memory,
// and all that it leads to. The next operation sets them again.
func (w *Watch) Rest() {
	for _, p := range w.parts {
		p.mu.Lock()
		if p.first == nil && p.timer != nil && p.timer.Stop() {
			p.armed = false
		}
		p.mu.Unlock()
	}
}

func (w *Watch) changed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.change != nil {
		close(w.change)
		w.change = nil
	}
}

// Part is a part of a directory that may stall by itself, such as a store with its log. Its methods
// are safe for concurrent use.
type Part struct {
	watch *Watch
	name  string

	mu          sync.Mutex  // guards the fields below; held without waiting
	first, last *operation  // under way, the oldest first
	free        *operation  // to be used again, by next
	timer       *time.Timer // nil: never set
	armed       bool        // the timer is set, or stalled
	stalled     bool        // first has taken too long
	since       time.Time   // when first had begun as the stall began
	ended       time.Time   // when the last stall ended

	usages map[string]*freeSpace // by name; see GetDiskUsage
}

// operation is one that is under way.
type operation struct {
	prev, next *operation
	began      time.Time
	what, file string
}

// Name is the name of the part.
func (p *Part) Name() string { return p.name }

// Age is for how long the oldest operation has been under way; 0: none is.
func (p *Part) Age() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.first == nil {
		return 0
	}
	return time.Since(p.first.began)
}

// Stalled is Age if the part is stalled, and otherwise 0.
func (p *Part) Stalled() time.Duration {
	if age := p.Age(); age >= p.watch.after {
		return age
	}
	return 0
}

// IsUnsteady reports whether the part is stalled, or was less than twice Watch.After ago: a disk
// that answers once in a while would be trusted again and again.
func (p *Part) IsUnsteady() bool {
	if p.Stalled() > 0 {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.ended.IsZero() && time.Since(p.ended) < 2*p.watch.after
}

// Do watches an operation on a file.
func (p *Part) Do(what, file string, do func() error) error {
	defer p.end(p.begin(what, file))
	return do()
}

func (p *Part) begin(what, file string) *operation {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.free
	if o == nil {
		o = new(operation)
	} else {
		p.free = o.next
	}
	*o = operation{prev: p.last, began: time.Now(), what: what, file: file}
	if p.last == nil {
		p.first = o
	} else {
		p.last.next = o
	}
	p.last = o
	if !p.armed {
		p.arm(p.watch.after)
	}
	return o
}

// end is deferred: a panic of the file system is not an operation that hangs.
func (p *Part) end(o *operation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o.prev == nil {
		p.first = o.next
	} else {
		o.prev.next = o.next
	}
	if o.next == nil {
		p.last = o.prev
	} else {
		o.next.prev = o.prev
	}
	*o = operation{next: p.free}
	p.free = o
	if !p.stalled {
		return
	}
	if p.first == nil || time.Since(p.first.began) < p.watch.after {
		p.stalled, p.ended = false, time.Now()
		p.watch.log.Warn("disk answers again", "store", p.name, "after", time.Since(p.since).Round(time.Millisecond))
		p.watch.changed()
		p.look()
	}
}

// arm sets the timer. REQUIRES: mu is held.
func (p *Part) arm(d time.Duration) {
	p.armed = true
	if p.timer == nil {
		p.timer = time.AfterFunc(d, func() {
			guard.Contain(p.watch.log, "watch of a disk", func() {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.look()
			}, nil)
		})
		return
	}
	p.timer.Reset(d)
}

// look finds out whether the part is stalled, and when to look again: most operations have ended
// by then, and the timer is set once for all of them. REQUIRES: mu is held.
func (p *Part) look() {
	switch {
	case p.stalled: // end looks
	case p.first == nil:
		p.armed = false
	default:
		age := time.Since(p.first.began)
		if age < p.watch.after {
			p.arm(p.watch.after - age)
			return
		}
		p.stalled, p.since = true, p.first.began
		p.watch.log.Error("disk does not answer", "store", p.name, "operation", p.first.what, "file", p.first.file,
			"for", age.Round(time.Millisecond))
		p.watch.changed()
	}
}

// FS returns base, with the operations watched that concern files of some directories: the part of
// a file is that of the nearest directory above it, or of itself; other is that of WatchAlso. Other
// files are not watched, nor is RemoveAll, which takes the longer, the more files there are.
func (w *Watch) FS(base vfs.FS, dirs map[string]*Part, other *Part) vfs.FS {
	fs := &watchFS{FS: base, other: other}
	fs.dirs.Store(&dirs)
	return fs
}

type watchFS struct {
	vfs.FS
	other *Part // nil: WatchAlso does nothing

	mu   sync.Mutex                       // held to replace dirs
	dirs atomic.Pointer[map[string]*Part] // never changed, but replaced
}

// WatchAlso watches the files of another directory that are opened from now on, until end is
// called. It does nothing if fs was not made by Watch.FS.
func WatchAlso(fs vfs.FS, dir string) (end func()) {
	w, ok := fs.(*watchFS)
	if !ok || w.other == nil || (*w.dirs.Load())[dir] != nil {
		return func() {}
	}
	change := func(change func(map[string]*Part)) {
		w.mu.Lock()
		defer w.mu.Unlock()
		dirs := maps.Clone(*w.dirs.Load())
		change(dirs)
		w.dirs.Store(&dirs)
	}
	change(func(dirs map[string]*Part) { dirs[dir] = w.other })
	return func() {
		change(func(dirs map[string]*Part) { delete(dirs, dir) })
		w.other.mu.Lock()
		defer w.other.mu.Unlock()
		clear(w.other.usages)
	}
}

// Unwrap returns the base, for vfs.Root.
func (fs *watchFS) Unwrap() vfs.FS { return fs.FS }

// part is that of a file; nil: it is not watched.
func (fs *watchFS) part(name string) *Part {
	for dirs := *fs.dirs.Load(); ; {
		if p := dirs[name]; p != nil {
			return p
		}
		above := fs.PathDir(name)
		if len(above) >= len(name) {
			return nil
		}
		name = above
	}
}

func (fs *watchFS) do(what, name string, do func() error) error {
	p := fs.part(name)
	if p == nil {
		return do()
	}
	return p.Do(what, name, do)
}

func (fs *watchFS) open(what, name string, open func() (vfs.File, error)) (vfs.File, error) {
	p := fs.part(name)
	if p == nil {
		return open()
	}
	var f vfs.File
	err := p.Do(what, name, func() (err error) { f, err = open(); return err })
	if err != nil {
		return f, err
	}
	return &watchedFile{f, p, name}, nil
}

func (fs *watchFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.open("create", name, func() (vfs.File, error) { return fs.FS.Create(name, c) })
}

func (fs *watchFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return fs.open("create", name, func() (vfs.File, error) { return fs.FS.ReuseForWrite(old, name, c) })
}

func (fs *watchFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.open("open", name, func() (vfs.File, error) { return fs.FS.Open(name, opts...) })
}

func (fs *watchFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return fs.open("open", name, func() (vfs.File, error) { return fs.FS.OpenReadWrite(name, c, opts...) })
}

func (fs *watchFS) OpenDir(name string) (vfs.File, error) {
	return fs.open("open", name, func() (vfs.File, error) { return fs.FS.OpenDir(name) })
}

func (fs *watchFS) MkdirAll(dir string, perm os.FileMode) error {
	return fs.do("mkdir", dir, func() error { return fs.FS.MkdirAll(dir, perm) })
}

func (fs *watchFS) Link(old, name string) error {
	return fs.do("link", old, func() error { return fs.FS.Link(old, name) })
}

func (fs *watchFS) Remove(name string) error {
	return fs.do("remove", name, func() error { return fs.FS.Remove(name) })
}

func (fs *watchFS) Rename(old, name string) error {
	return fs.do("rename", name, func() error { return fs.FS.Rename(old, name) })
}

func (fs *watchFS) List(name string) (names []string, err error) {
	err = fs.do("list", name, func() (err error) { names, err = fs.FS.List(name); return err })
	return names, err
}

func (fs *watchFS) Stat(name string) (info vfs.FileInfo, err error) {
	err = fs.do("stat", name, func() (err error) { info, err = fs.FS.Stat(name); return err })
	return info, err
}

// watchedFile watches the operations on a file, or a directory.
type watchedFile struct {
	vfs.File
	part *Part
	name string
}

func (f *watchedFile) Read(p []byte) (int, error) {
	defer f.part.end(f.part.begin("read", f.name))
	return f.File.Read(p)
}

func (f *watchedFile) ReadAt(p []byte, off int64) (int, error) {
	defer f.part.end(f.part.begin("read", f.name))
	return f.File.ReadAt(p, off)
}

func (f *watchedFile) Write(p []byte) (int, error) {
	defer f.part.end(f.part.begin("write", f.name))
	return f.File.Write(p)
}

func (f *watchedFile) WriteAt(p []byte, off int64) (int, error) {
	defer f.part.end(f.part.begin("write", f.name))
	return f.File.WriteAt(p, off)
}

func (f *watchedFile) Preallocate(off, length int64) error {
	defer f.part.end(f.part.begin("preallocate", f.name))
	return f.File.Preallocate(off, length)
}

func (f *watchedFile) Sync() error {
	defer f.part.end(f.part.begin("sync", f.name))
	return f.File.Sync()
}

func (f *watchedFile) SyncData() error {
	defer f.part.end(f.part.begin("sync", f.name))
	return f.File.SyncData()
}

func (f *watchedFile) SyncTo(length int64) (full bool, err error) {
	defer f.part.end(f.part.begin("sync", f.name))
	return f.File.SyncTo(length)
}

func (f *watchedFile) Close() error {
	defer f.part.end(f.part.begin("close", f.name))
	return f.File.Close()
}
