package manifest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"sync"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
)

// The lock of a directory is that of the kernel on LOCK: an owner has it exclusively, by FS.Lock,
// and readers share it. On unix it is a record lock of fcntl, which belongs to the process: it does
// not tell an owner from a reader of one process, and is released when the process closes any
// descriptor of the file. So within the process the table held decides, before LOCK is opened, and
// all readers share one descriptor.

// held are the locks of this process.
var held = struct {
	sync.Mutex
	locks map[lockName]*heldLock
}{locks: make(map[lockName]*heldLock)}

// lockName is the file of a lock. The file system is its root, since wrappers of one are equal.
type lockName struct {
	fs   vfs.FS
	path string
}

// heldLock is a lock of one owner, or of readers.
type heldLock struct {
	name    lockName
	readers int       // 0: an owner has it
	file    io.Closer // nil: there is no LOCK
}

var errHeldHere = errors.New("lock held by this process")

func lockExclusively(fsys vfs.FS, path string) (io.Closer, error) {
	return lock(fsys, path, 0, func() (io.Closer, error) { return fsys.Lock(path) })
}

// lockShared locks against owners, and changes nothing. If there is no LOCK, nobody has the
// directory open, and an owner that opens it later is not noticed: LOCK is missing only in a copy
// that somebody has made without it.
func lockShared(fsys vfs.FS, path string) (io.Closer, error) {
	return lock(fsys, path, 1, func() (io.Closer, error) {
		if _, err := fsys.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if vfs.Root(fsys) != vfs.Default { // only this process has it
			return fsys.Lock(path)
		}
		return openShared(path)
	})
}

// lock takes a lock for an owner (0 readers), or for one reader; open is called unless other
// readers have it already.
func lock(fsys vfs.FS, path string, readers int, open func() (io.Closer, error)) (io.Closer, error) {
	held.Lock()
	defer held.Unlock()
	name := lockName{vfs.Root(fsys), path}
	l := held.locks[name]
	switch {
	case l != nil && (readers == 0 || l.readers == 0):
		return nil, fmt.Errorf("%w: %s: %w", base.ErrLocked, path, errHeldHere)
	case l == nil:
		file, err := open()
		if err != nil && isHeld(err) {
			err = fmt.Errorf("%w: %w", base.ErrLocked, err)
		}
		if err != nil {
			return nil, err
		}
		l = &heldLock{name: name, file: file}
		held.locks[name] = l
	}
	l.readers += readers
	return l, nil
}

// Close releases the lock of the owner, or of one reader.
func (l *heldLock) Close() error {
	held.Lock()
	defer held.Unlock()
	if l.readers--; l.readers > 0 {
		return nil
	}
	delete(held.locks, l.name)
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// isHeld reports whether an error of a lock says that it is held, and not that the file cannot be
// opened or locked at all.
func isHeld(err error) bool {
	var opening *fs.PathError
	var errno syscall.Errno
	switch {
	case errors.As(err, &opening):
		return false
	case errors.As(err, &errno):
		return slices.Contains(heldErrnos, errno)
	}
	return true // other errors are the file system's, such as for a lock of this process
}
