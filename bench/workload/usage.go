package workload

import (
	"fmt"
	"os"
	"runtime"
	"time"
)

// Usage has the processor time and allocations of the process since its start.
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

// Since returns the usage after before.
func (u Usage) Since(before Usage) Usage {
	return Usage{u.CPU - before.CPU, u.Allocs - before.Allocs, u.AllocBytes - before.AllocBytes}
}

// Resident returns the memory of the process in RAM, in bytes; 0 without /proc.
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
