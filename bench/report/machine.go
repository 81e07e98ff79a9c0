package report

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Machine is where a program measures. What /proc does not tell is left empty.
type Machine struct {
	CPU        string // model
	Virtual    bool   // there is a hypervisor
	Cores      int    // logical ones
	RAM        int64  // bytes
	Kernel     string // release
	Go         string // version
	FileSystem string // of the directory
	// Syncs is how many fdatasyncs a second the directory takes, each after
	// an append of 4 KiB, one after the other.
	Syncs float64
	// Load is how many processes ran or wanted to on average in the minute before.
	Load float64
}

// ThisMachine looks at the machine and measures the disk of dir, an existing
// directory, for a second.
func ThisMachine(dir string) (Machine, error) {
	m := Machine{Cores: runtime.NumCPU(), Go: strings.TrimPrefix(runtime.Version(), "go")}
	_, _ = fmt.Sscan(firstLine("/proc/loadavg"), &m.Load)
	m.Kernel = firstLine("/proc/sys/kernel/osrelease")
	m.CPU = procField("/proc/cpuinfo", "model name")
	m.Virtual = strings.Contains(" "+procField("/proc/cpuinfo", "flags")+" ", " hypervisor ")
	_, _ = fmt.Sscan(procField("/proc/meminfo", "MemTotal"), &m.RAM)
	m.RAM <<= 10
	m.FileSystem = fileSystem(dir)
	var err error
	if m.Syncs, err = syncRate(dir, time.Second); err != nil {
		return m, fmt.Errorf("measure the disk of %s: %w", dir, err)
	}
	return m, nil
}

// String is one line for people.
func (m Machine) String() string {
	kind := ""
	if m.Virtual {
		kind = ", virtual"
	}
	return fmt.Sprintf("%d logical cores (%s%s), %.1f GiB of RAM, Linux %s, Go %s, %s, %s fdatasyncs a second of 4 KiB; load before the run %.1f",
		m.Cores, cmp.Or(m.CPU, "unknown processor"), kind, float64(m.RAM)/(1<<30), cmp.Or(m.Kernel, "unknown"), m.Go,
		cmp.Or(m.FileSystem, "unknown file system"), Number(m.Syncs), m.Load)
}

func firstLine(path string) string {
	b, _ := os.ReadFile(path)
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}

// procField is the value of the first line "name : value" of a file of /proc.
func procField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// fileSystem is the type of the one that dir lies in.
func fileSystem(dir string) string {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	kind, longest := "", -1
	for line := range strings.Lines(string(mounts)) {
		// 36 35 98:0 /root /mount/point options... - type source superoptions
		left, right, ok := strings.Cut(line, " - ")
		fields := strings.Fields(left)
		if !ok || len(fields) < 5 {
			continue
		}
		at := strings.TrimSuffix(fields[4], "/")
		if (dir == at || strings.HasPrefix(dir, at+"/")) && len(at) >= longest {
			longest, kind = len(at), strings.Fields(right)[0]
		}
	}
	return kind
}

// syncRate counts for a time.
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
		if err := syscall.Fdatasync(int(f.Fd())); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(start).Seconds(), nil
}
