package workload

import (
	"fmt"
	"os"
	"runtime"
	"time"
)

// Usage is what the process has used since its start.
type Usage struct {
	CPU        time.Duration // of all cores, in user and system mode; 0: not known
	Allocs     uint64
	AllocBytes uint64
}

// ReadUsage stops the process for some microseconds.
func ReadUsage() Usage {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return Usage{
		CPU:    processorTime(),
		Allocs: m.Mallocs, AllocBytes: m.TotalAlloc,
	}
}

// Since is what was used after before.
func (u Usage) Since(before Usage) Usage {
	return Usage{u.CPU - before.CPU, u.Allocs - before.Allocs, u.AllocBytes - before.AllocBytes}
}

// Resident is the memory of the process that is in RAM, in bytes; 0 where
// /proc does not tell.
func Resident() int64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, pages int64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		return 0
	}
	return pages * int64(os.Getpagesize())
}
