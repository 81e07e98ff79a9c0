package failstop

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A store fails if its log cannot be written, because the content of the log after a failed write
// is unknown. So a store keeps space in reserve. When the disk is full, the rest of a commit, or of
// a MANIFEST, is written with it. From then on Ready returns ErrNoSpace, so that nothing else is
// begun, and no table is written, until there is room for the reserve again.
//
// The reserve is files without a name; for the first, the file system has allocated space. Where it
// cannot do that, where a commit is larger than the reserve, or where others take its space first,
// a full disk may make the store fail.

const (
	// reserveBytes is the space of the reserve: several commits of the usual size.
	reserveBytes = 4 << 20

	// reserveFiles is how many files a store may begin after the disk is full: the logs of a commit
	// and of a flush that is under way beside it, a MANIFEST, and its marker.
	reserveFiles = 4
)

type reserve struct {
	gone atomic.Bool   // it has to be made
	used atomic.Bool   // it was used, and has not been made again
	uses atomic.Uint64 // how often it was used

	mu    sync.Mutex // guards the fields below
	fs    vfs.FS     // nil: no reserve is kept
	name  string
	files []vfs.File // empty: there is no reserve
	next  time.Time  // when to try again to make it
}

// keep starts to maintain the reserve of the store in dir. The reserve is made at the first
// hasReserve, so that it does not take space from other stores that are being opened.
func (r *reserve) keep(fs vfs.FS, dir string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fs, r.name = fs, fs.PathJoin(dir, "RESERVE")
	r.gone.Store(true)
}

// make returns false if there is no room. The first file takes the space: where no further file can
// be made for another reason, there is the space at least. REQUIRES: mu is held.
func (r *reserve) make() bool {
	var err error
	for err == nil && len(r.files) < reserveFiles {
		var f vfs.File
		if f, err = r.fs.Create(r.name, vfs.WriteCategoryUnspecified); err != nil {
			break
		}
		_ = r.fs.Remove(r.name) // where an open file cannot be removed, it stays as an empty file
		r.files = append(r.files, f)
		if len(r.files) == 1 && !allocate(f) {
			err = syscall.ENOSPC
		}
	}
	if IsNoSpace(err) {
		r.drop()
		return false
	}
	return true
}

// allocate returns false if there is no room for the space of the reserve.
func allocate(f vfs.File) bool {
	for {
		if err := f.Preallocate(0, reserveBytes); !errors.Is(err, syscall.EINTR) {
			return !IsNoSpace(err)
		}
	}
}

// use gives the space of the reserve back to the file system. It returns false if there was none.
func (r *reserve) use() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fs == nil {
		return false
	}
	r.gone.Store(true)
	r.used.Store(true)
	r.next = time.Now().Add(retryEvery)
	if !r.drop() {
		return false
	}
	r.uses.Add(1)
	return true
}

// drop closes the files. It returns false if there are none. REQUIRES: mu is held.
func (r *reserve) drop() bool {
	if len(r.files) == 0 {
		return false
	}
	for _, f := range r.files {
		_ = f.Close()
	}
	_ = r.fs.Remove(r.name)
	r.files = nil
	return true
}

// end removes the reserve of a store before it is closed.
func (r *reserve) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop()
	r.fs = nil
	r.gone.Store(false)
	r.used.Store(false)
}

// restore tries to make the reserve again, several times a second at most. It does not wait for
// another call, which may wait for a disk that hangs: that is busy.
func (r *reserve) restore() (made, busy bool) {
	if !r.mu.TryLock() {
		return false, true
	}
	defer r.mu.Unlock()
	now := time.Now()
	if !r.gone.Load() || now.Before(r.next) {
		return false, false
	}
	r.next = now.Add(retryEvery)
	if made = r.make(); made {
		r.gone.Store(false)
		r.used.Store(false)
	}
	return made, false
}

// hasReserve reports whether the reserve exists, after trying to make it if it does not. While
// another call makes it for the first time, nothing says that the disk is full.
func (l *Latch) hasReserve() bool {
	if !l.reserve.gone.Load() || l.Err() != nil {
		return true
	}
	made, busy := l.reserve.restore()
	if made {
		l.proceed()
	}
	return made || !l.reserve.gone.Load() || busy && !l.reserve.used.Load()
}

// isPressed reports whether the reserve was used, and cannot be made again: the rest of the disk is
// for vital files.
func (l *Latch) isPressed() bool { return l.reserve.used.Load() && !l.hasReserve() }

// withReserve calls do. If do is vital and fails for lack of space, it uses the reserve and calls
// do again, unless done says that only a sync after the work failed.
func (l *Latch) withReserve(vital bool, do func() (done bool, err error)) error {
	uses := l.reserve.uses.Load()
	done, err := do()
	if !vital || done || !IsNoSpace(err) {
		return err
	}
	if l.reserve.use() {
		l.log.Warn("the disk is full: the "+l.name+" uses its reserve", "err", err)
	} else if l.reserve.uses.Load() == uses {
		return err
	} // else another goroutine has made room meanwhile
	_, err = do()
	return err
}
