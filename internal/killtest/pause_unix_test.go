//go:build unix

package killtest

import (
	"os"
	"syscall"
)

// pauses: the test can pause processes on this system.
const pauses = true

func pause(p *os.Process) error  { return p.Signal(syscall.SIGSTOP) }
func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
