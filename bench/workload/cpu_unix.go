//go:build unix

package workload

import (
	"syscall"
	"time"
)

// processorTime returns the processor time of the process, in user and system mode.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails for other arguments only
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
