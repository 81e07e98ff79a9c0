//go:build !unix && !windows

package manifest

import (
	"errors"
	"io"
	"syscall"
)

// heldErrnos is empty: vfs.Default cannot lock files here.
var heldErrnos []syscall.Errno

func openShared(string) (io.Closer, error) { return nil, errors.ErrUnsupported }
