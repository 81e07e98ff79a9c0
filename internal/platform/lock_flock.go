//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package platform

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// flock's locks are of whole files, and belong to the opened file. Directories may have them.

func lockFile(name string, m mode) (io.Closer, error) { return lockOpened(name, m) }

func setLock(f *os.File, m mode) error {
	how := [...]int{unlocked: syscall.LOCK_UN, shared: syscall.LOCK_SH, exclusive: syscall.LOCK_EX}[m]
	for {
		switch err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); err {
		case syscall.EWOULDBLOCK:
			return ErrHeld
		case syscall.EINTR:
		default:
			return err
		}
	}
}

// haveReaders reports whether readers exclude a lock: then it could be shared.
func haveReaders(f *os.File, m mode) bool {
	if m == shared || setLock(f, shared) != nil {
		return false
	}
	_ = setLock(f, unlocked) // closing the file does the same
	return true
}

func lockDirectory(dir string, m mode) (io.Closer, error) {
	f, err := openAtOnce(dir, os.O_RDONLY|syscall.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	switch err := setLock(f, m); {
	case errors.Is(err, ErrHeld):
		return nil, errors.Join(&Held{Path: dir, Reads: haveReaders(f, m)}, f.Close())
	case err != nil:
		return f, nil // it has no such locks
	}
	return &directoryLock{f}, nil
}

type directoryLock struct{ *os.File }

func (l *directoryLock) Close() error {
	return errors.Join(setLock(l.File, unlocked), l.File.Close())
}
