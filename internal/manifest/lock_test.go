package manifest

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
)

// TestIsHeld: only errors that say that somebody has the lock count.
func TestIsHeld(t *testing.T) {
	for _, errno := range heldErrnos {
		if !isHeld(fmt.Errorf("lock: %w", errno)) {
			t.Errorf("%v does not say that the lock is held", errno)
		}
		if isHeld(&fs.PathError{Op: "open", Path: "LOCK", Err: errno}) {
			t.Errorf("%v of an open says that the lock is held", errno)
		}
	}
	if !isHeld(errors.New("lock held by current process")) {
		t.Error("a lock of this process is not held")
	}
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOENT, syscall.ENOSPC, syscall.ENOLCK} {
		if isHeld(errno) {
			t.Errorf("%v says that the lock is held", errno)
		}
	}
}
