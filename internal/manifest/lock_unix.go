//go:build unix

package manifest

import (
	"errors"
	"io"
	"os"
	"syscall"
)

// heldErrnos are those of fcntl(F_SETLK) that say that another process has the lock.
var heldErrnos = []syscall.Errno{syscall.EAGAIN, syscall.EACCES}

// openShared takes a lock that excludes that of vfs.Default, F_WRLCK, in other processes.
// REQUIRES: this process has no lock of the file.
func openShared(path string) (io.Closer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	whole := syscall.Flock_t{Type: syscall.F_RDLCK, Whence: io.SeekStart}
	if err := syscall.FcntlFlock(f.Fd(), syscall.F_SETLK, &whole); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
