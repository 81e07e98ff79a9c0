package platform

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A lock is the kernel's, and belongs to a file that was opened, not to a process: reading or
// copying a locked file releases nothing, and a second lock of one process is refused like that of
// another one, by whatever path. It is of one byte far behind the content, which stays readable
// where locks are mandatory.
//
// It is released before its file is closed: a child process that is being started has a copy of the
// descriptor until it runs its program.

// lockedByte is the byte that is locked.
const lockedByte = 1 << 30

// maxReplaced is how often a lock is tried again since its file was removed or replaced meanwhile.
const maxReplaced = 100

// mode is that of a lock.
type mode uint8

const (
	unlocked mode = iota
	shared        // with other readers
	exclusive
)

// ErrHeld is matched by the error of a lock that another one excludes. Other errors say that the
// file cannot be opened, or that its file system cannot lock.
var ErrHeld = errors.New("lock is held")

// Held is the error of a lock that another one excludes. It matches ErrHeld.
type Held struct {
	Path   string
	Reads  bool   // readers share the lock
	Here   bool   // this process has it
	Holder Holder // as far as it is known
}

// Holder is the process that has a lock, as it says itself. It is for messages only.
type Holder struct {
	PID     int    `json:"pid"` // 0: unknown
	Host    string `json:"host,omitempty"`
	Process string `json:"process"` // differs between processes that have the same PID and host
}

func (h *Held) Is(target error) bool { return target == ErrHeld }

func (h *Held) Error() string {
	who := "another process"
	switch {
	case h.Reads:
		who = "a process that reads"
	case h.Here:
		who = "this process"
	case h.Holder.PID != 0:
		who = fmt.Sprint("process ", h.Holder.PID)
	}
	if !h.Here && h.Holder.Host != "" {
		who += " on host " + h.Holder.Host
	}
	return who + " has locked " + h.Path
}

// self is this process, as its locks tell it.
var self = func() Holder {
	host, _ := os.Hostname()
	return Holder{os.Getpid(), host, rand.Text()}
}()

// Lock locks a file exclusively, and makes it if it is missing. The lock's holder replaces the
// content by its own name. The file is never removed.
func (p privateFS) Lock(name string) (io.Closer, error) { return lockFile(name, exclusive) }

// lockShared locks a file, which must exist, with other readers. It changes nothing.
func lockShared(name string) (io.Closer, error) { return lockFile(name, shared) }

// LockShared locks a file of any file system, which must exist, with other readers. It changes
// nothing. A file system without a method of this name allows one reader.
func LockShared(fsys vfs.FS, name string) (io.Closer, error) {
	root := vfs.Root(fsys)
	if root == vfs.Default {
		return lockShared(name)
	}
	if l, ok := root.(interface {
		LockShared(name string) (io.Closer, error)
	}); ok {
		return l.LockShared(name)
	}
	if _, err := fsys.Stat(name); err != nil {
		return nil, err
	}
	return fsys.Lock(name)
}

// LockDirectory locks a directory itself, as far as the system can: it excludes others when a file
// that they should have locked was removed or replaced. A directory of another file system than the
// system's is not locked. REQUIRES: processes that come at the same time have excluded each other
// by such a file, if there is one; otherwise each may exclude the other.
func LockDirectory(fsys vfs.FS, dir string, reads bool) (io.Closer, error) {
	if vfs.Root(fsys) != vfs.Default {
		return io.NopCloser(nil), nil
	}
	m := exclusive
	if reads {
		m = shared
	}
	return lockDirectory(dir, m)
}

// heldFile is a file with its lock.
type heldFile struct {
	*os.File
	mode mode
}

// lockOpened locks a file by a lock that belongs to the opened file.
func lockOpened(name string, m mode) (io.Closer, error) {
	for range maxReplaced {
		f, made, err := openLock(name, m)
		if errors.Is(err, fs.ErrNotExist) && m == exclusive {
			continue // it was removed again
		}
		if err != nil {
			return nil, err
		}
		if err := setLock(f, m); err != nil {
			if errors.Is(err, ErrHeld) {
				err = heldBy(f, m)
			} else {
				err = &fs.PathError{Op: "lock", Path: name, Err: err}
				if made {
					err = errors.Join(err, os.Remove(name))
				}
			}
			return nil, errors.Join(err, f.Close())
		}
		l := &heldFile{f, m}
		if is, err := isAt(f, name); err != nil || !is {
			if err := errors.Join(err, l.Close()); err != nil {
				return nil, err
			}
			continue
		}
		if m == exclusive {
			self.tell(f)
		}
		return l, nil
	}
	return nil, &fs.PathError{Op: "lock", Path: name, Err: errors.New("the file is replaced again and again")}
}

// openLock opens a file to be locked, and makes it if a lock is exclusive.
func openLock(name string, m mode) (f *os.File, made bool, err error) {
	flag := os.O_RDONLY
	if m == exclusive {
		flag = os.O_RDWR
		if err := create(name); err == nil {
			made = true
		} else if !errors.Is(err, fs.ErrExist) {
			return nil, false, err
		}
	}
	if f, err = openAtOnce(name, flag); err != nil {
		return nil, false, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "lock", Path: name, Err: errors.New("not a regular file")}
	}
	if err != nil {
		return nil, false, errors.Join(err, f.Close())
	}
	return f, made, nil
}

// isAt reports whether a path leads to a file that was opened.
func isAt(f *os.File, path string) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	found, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(opened, found), err
}

// Close releases the lock.
func (l *heldFile) Close() error {
	if l.mode == exclusive {
		_ = l.Truncate(0) // so that the file does not look like that of a dead process
	}
	return errors.Join(setLock(l.File, unlocked), l.File.Close())
}

// tell writes the holder of a lock into the locked file. The lock does not need it: a full disk is
// no error.
func (h Holder) tell(f *os.File) {
	b, err := json.Marshal(h)
	if err == nil && f.Truncate(0) == nil {
		_, _ = f.WriteAt(append(b, '\n'), 0)
	}
}

// holderIn reads the holder of the lock from a file; zero: the file does not name it.
func holderIn(f *os.File) (h Holder) {
	b, _ := io.ReadAll(io.NewSectionReader(f, 0, 1<<10))
	if json.Unmarshal(bytes.TrimSpace(b), &h) != nil {
		return Holder{}
	}
	return h
}

// heldBy returns why a file cannot be locked in a mode: others hold it.
func heldBy(f *os.File, m mode) error {
	if haveReaders(f, m) {
		return &Held{Path: f.Name(), Reads: true} // the file names an owner before them
	}
	by := holderIn(f)
	return &Held{Path: f.Name(), Holder: by, Here: by.Process == self.Process}
}
