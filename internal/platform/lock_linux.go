package platform

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// byProcess is set once the kernel has refused such a lock as something that it does not know, as
// some emulations of Linux do.
var byProcess atomic.Bool

var errUnknownLock = errors.New("the kernel does not know locks of open file descriptions")

func lockFile(name string, m mode) (io.Closer, error) {
	if !byProcess.Load() {
		l, err := lockOpened(name, m)
		if !errors.Is(err, errUnknownLock) {
			return l, err
		}
		byProcess.Store(true)
	}
	return lockInProcess(name, m)
}

func setLock(f *os.File, m mode) error {
	err := fcntl(f, unix.F_OFD_SETLK, record(m, lockedByte, 1))
	switch {
	case errors.Is(err, unix.EAGAIN):
		return ErrHeld
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %w", errUnknownLock, err)
	}
	return err
}

func record(m mode, start, length int64) *unix.Flock_t {
	types := [...]int16{unlocked: unix.F_UNLCK, shared: unix.F_RDLCK, exclusive: unix.F_WRLCK}
	return &unix.Flock_t{Type: types[m], Whence: io.SeekStart, Start: start, Len: length}
}

func fcntl(f *os.File, command int, l *unix.Flock_t) error {
	for {
		if err := unix.FcntlFlock(f.Fd(), command, l); err != unix.EINTR {
			return err
		}
	}
}

// haveReaders reports whether readers exclude a lock.
func haveReaders(f *os.File, m mode) bool {
	l := record(m, lockedByte, 1)
	return fcntl(f, unix.F_OFD_GETLK, l) == nil && l.Type == unix.F_RDLCK
}

// A directory cannot be opened for writing, which an exclusive lock demands. So owners and readers
// share locks of single bytes of it, and ask who else has one. An owner's byte tells its PID, and
// its host to those on the same one. (flock would exclude owners, but a program that is started
// under flock(1) of the directory has inherited such a lock.)
const readersByte = 1 << 62 // those before it are of owners

func (h Holder) ownersByte() int64 {
	return int64(crc32.ChecksumIEEE([]byte(h.Host))>>2)<<32 | int64(uint32(h.PID))
}

// ownerAt returns the owner of the locked byte.
func ownerAt(at int64) Holder {
	h := Holder{PID: int(uint32(at)), Host: self.Host}
	if h.ownersByte() != at {
		h.Host = "" // another one, as of a container
	}
	return h
}

func lockDirectory(dir string, m mode) (io.Closer, error) {
	f, err := openAtOnce(dir, os.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	own, others := record(shared, self.ownersByte(), 1), record(exclusive, 0, readersByte+1)
	if m == shared {
		own, others = record(shared, readersByte, 1), record(exclusive, 0, readersByte)
	}
	if fcntl(f, unix.F_OFD_SETLK, own) != nil || fcntl(f, unix.F_OFD_GETLK, others) != nil {
		return f, nil // it has no such locks
	}
	l := &directoryLock{f}
	switch {
	case others.Type == unix.F_UNLCK:
		return l, nil
	case others.Start == readersByte:
		err = &Held{Path: dir, Reads: true}
	default:
		err = &Held{Path: dir, Holder: ownerAt(others.Start)}
	}
	return nil, errors.Join(err, l.Close())
}

type directoryLock struct{ *os.File }

func (l *directoryLock) Close() error {
	return errors.Join(fcntl(l.File, unix.F_OFD_SETLK, record(unlocked, 0, 0)), l.File.Close())
}
