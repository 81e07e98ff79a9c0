//go:build unix

package killtest

import (
	"os"
	"syscall"
)

// pauses says that processes can be paused here.
const pauses = true

func pause(p *os.Process) error  { return p.Signal(syscall.SIGSTOP) }
func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
