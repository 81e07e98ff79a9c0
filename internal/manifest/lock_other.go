//go:build !windows

package manifest

import "syscall"

// heldErrnos are those of fcntl(F_SETLK) that say that another process has the lock.
var heldErrnos = []syscall.Errno{syscall.EAGAIN, syscall.EACCES}
