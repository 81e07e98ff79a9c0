//go:build !unix

package killtest

import (
	"errors"
	"os"
)

// pauses: the test cannot pause processes on this system.
const pauses = false

func pause(*os.Process) error  { return errors.ErrUnsupported }
func resume(*os.Process) error { return errors.ErrUnsupported }
