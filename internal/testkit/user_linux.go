package testkit

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread of another user. REQUIRES: the process runs as root. Other goroutines
// that f starts run as root.
func AsUser(t *testing.T, user uintptr, f func() error) error {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		const keep = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, user, keep); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}
