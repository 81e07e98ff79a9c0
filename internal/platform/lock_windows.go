package platform

import (
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/windows"
)

// LockFileEx's locks belong to the opened file.

func lockFile(name string, m mode) (io.Closer, error) { return lockOpened(name, m) }

// openAtOnce opens a file so that others may read and write it, but neither remove nor rename it.
func openAtOnce(name string, flag int) (*os.File, error) {
	path, err := windows.UTF16PtrFromString(name)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	access := uint32(windows.GENERIC_READ)
	if flag&os.O_RDWR != 0 {
		access |= windows.GENERIC_WRITE
	}
	h, err := windows.CreateFile(path, access, windows.FILE_SHARE_READ|windows.FILE_SHARE_WRITE, nil,
		windows.OPEN_EXISTING, windows.FILE_ATTRIBUTE_NORMAL, 0)
	switch err {
	case nil:
		return os.NewFile(uintptr(h), name), nil
	case windows.ERROR_SHARING_VIOLATION:
		return nil, &Held{Path: name}
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: err}
}

func setLock(f *os.File, m mode) error {
	at := &windows.Overlapped{Offset: lockedByte}
	if m == unlocked {
		return windows.UnlockFileEx(windows.Handle(f.Fd()), 0, 1, 0, at)
	}
	flags := uint32(windows.LOCKFILE_FAIL_IMMEDIATELY)
	if m == exclusive {
		flags |= windows.LOCKFILE_EXCLUSIVE_LOCK
	}
	err := windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, at)
	if err == windows.ERROR_LOCK_VIOLATION || err == windows.ERROR_IO_PENDING {
		return ErrHeld
	}
	return err
}

// haveReaders reports whether readers exclude a lock: then it could be shared.
func haveReaders(f *os.File, m mode) bool {
	if m == shared || setLock(f, shared) != nil {
		return false
	}
	_ = setLock(f, unlocked)
	return true
}

// lockDirectory does nothing: a file that is open is neither removed nor renamed.
func lockDirectory(string, mode) (io.Closer, error) { return io.NopCloser(nil), nil }
