package manifest

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// heldErrnos are those of CreateFile, which opens the file for nobody else: ERROR_SHARING_VIOLATION
// and ERROR_LOCK_VIOLATION.
var heldErrnos = []syscall.Errno{32, 33}

// openShared opens the file so that others may open it, too: vfs.Default opens it for nobody else,
// which fails while anybody has it open, and makes others fail.
func openShared(path string) (io.Closer, error) {
	f, err := os.Open(path)
	var opening *fs.PathError
	if errors.As(err, &opening) {
		return nil, opening.Err // isHeld tells by it
	}
	return f, err
}
