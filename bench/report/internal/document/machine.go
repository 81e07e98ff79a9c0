package document

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// Machine describes the machine of a measurement. Fields that the kernel does not provide are
// empty.
type Machine struct {
	CPU        string // model
	Virtual    bool   // there is a hypervisor
	Cores      int    // logical ones
	RAM        uint64 // bytes
	Kernel     string // release
	Go         string // version
	FileSystem string // of the directory
	// Syncs is the rate of fdatasync in the directory, a second, each after an append of 4 KiB, one
	// after the other.
	Syncs float64
	// Load is the load average of the last minute.
	Load float64
}

// ThisMachine describes the machine, and measures the disk of dir, an existing directory, for a
// second.
func ThisMachine(dir string) (Machine, error) {
	m := Machine{Cores: runtime.NumCPU(), Go: strings.TrimPrefix(runtime.Version(), "go")}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return m, err
	}
	if load, err := proc.LoadAvg(); err == nil {
		m.Load = load.Load1
	}
	if all, err := proc.CPUInfo(); err == nil && len(all) > 0 {
		m.CPU, m.Virtual = all[0].ModelName, slices.Contains(all[0].Flags, "hypervisor")
	}
	if mem, err := proc.Meminfo(); err == nil && mem.MemTotalBytes != nil {
		m.RAM = *mem.MemTotalBytes
	}
	var system unix.Utsname
	if err := unix.Uname(&system); err == nil {
		m.Kernel = unix.ByteSliceToString(system.Release[:])
	}
	m.FileSystem = fileSystem(proc, dir)
	if m.Syncs, err = syncRate(dir, time.Second); err != nil {
		return m, fmt.Errorf("measure the disk of %s: %w", dir, err)
	}
	return m, nil
}

// String returns the machine in one line.
func (m Machine) String() string {
	kind := ""
	if m.Virtual {
		kind = ", virtual"
	}
	return fmt.Sprintf("%d logical cores (%s%s), %.1f GiB of RAM, Linux %s, Go %s, %s, %s fdatasyncs a second of 4 KiB; load before the run %.1f",
		m.Cores, cmp.Or(m.CPU, "unknown processor"), kind, float64(m.RAM)/(1<<30), cmp.Or(m.Kernel, "unknown"), m.Go,
		cmp.Or(m.FileSystem, "unknown file system"), Number(m.Syncs), m.Load)
}

// fileSystem returns the type of dir's file system, found by the number of its device.
func fileSystem(proc procfs.FS, dir string) string {
	var s unix.Stat_t
	mounts, err := proc.GetMounts()
	if errors.Join(err, unix.Stat(dir, &s)) != nil {
		return ""
	}
	device := fmt.Sprintf("%d:%d", unix.Major(s.Dev), unix.Minor(s.Dev))
	for _, mount := range mounts {
		if mount.MajorMinorVer == device {
			return mount.FSType
		}
	}
	return ""
}

// syncRate measures Machine.Syncs for d.
func syncRate(dir string, d time.Duration) (rate float64, err error) {
	f, err := os.CreateTemp(dir, "syncs")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	page := make([]byte, 4096)
	n, start := 0, time.Now()
	for ; time.Since(start) < d; n++ {
		if _, err := f.Write(page); err != nil {
			return 0, err
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(start).Seconds(), nil
}
