//go:build unix

package workload

import (
	"syscall"
	"time"
)

// processorTime is what the process has used of all cores, in user and system mode.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails for other arguments only
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
