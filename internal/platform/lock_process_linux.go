package platform

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Where locks belong to processes only (see byProcess), the kernel releases them when the process
// closes any descriptor of the file, and refuses no second one of the process. So a table decides
// within the process, by device and inode, before the file is opened; and readers share one
// descriptor. A file that others in the process open and close loses its lock nevertheless.

// fileID is the same for all paths to a file.
type fileID struct{ device, inode uint64 }

// processLock is a lock of one owner, or of readers.
type processLock struct {
	*os.File
	id      fileID
	readers int // 0: an owner has it
}

// locked are the locks of this process.
var locked = struct {
	sync.Mutex
	files map[fileID]*processLock
}{files: make(map[fileID]*processLock)}

func lockInProcess(name string, m mode) (io.Closer, error) {
	locked.Lock()
	defer locked.Unlock()
	if m == exclusive {
		if err := create(name); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	id := idOf(info)
	switch l := locked.files[id]; {
	case l != nil && m == shared && l.readers > 0:
		l.readers++
		return l, nil
	case l != nil:
		return nil, &Held{Path: name, Reads: l.readers > 0, Here: true}
	}
	f, _, err := openLock(name, m)
	if err != nil {
		return nil, err
	}
	record := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: lockedByte, Len: 1}
	if m == shared {
		record.Type = unix.F_RDLCK
	}
	asked := record
	switch err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &record); {
	case err == unix.EAGAIN || err == unix.EACCES:
		h := &Held{Path: name, Holder: holderIn(f)}
		if unix.FcntlFlock(f.Fd(), unix.F_GETLK, &asked) == nil && asked.Type != unix.F_UNLCK {
			if h.Reads = asked.Type == unix.F_RDLCK; h.Reads || h.Holder.PID == 0 {
				h.Holder = Holder{PID: int(max(asked.Pid, 0))}
			}
		}
		return nil, errors.Join(h, f.Close())
	case err != nil:
		return nil, errors.Join(&fs.PathError{Op: "lock", Path: name, Err: err}, f.Close())
	}
	l := &processLock{File: f, id: id}
	if m == shared {
		l.readers = 1
	} else {
		self.tell(f)
	}
	locked.files[id] = l
	return l, nil
}

// Close releases the lock of the owner, or of one reader.
func (l *processLock) Close() error {
	locked.Lock()
	defer locked.Unlock()
	if l.readers == 0 {
		_ = l.Truncate(0)
	}
	if l.readers--; l.readers > 0 {
		return nil
	}
	delete(locked.files, l.id)
	return l.File.Close() // which releases it, also if another process has a copy of the descriptor
}

func idOf(info fs.FileInfo) fileID {
	st := info.Sys().(*syscall.Stat_t)
	return fileID{uint64(st.Dev), uint64(st.Ino)}
}
