//go:build !unix

package killtest

import (
	"errors"
	"os"
)

// pauses says that processes can be paused here.
const pauses = false

func pause(*os.Process) error  { return errors.ErrUnsupported }
func resume(*os.Process) error { return errors.ErrUnsupported }
