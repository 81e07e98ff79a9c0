package bench

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"codeq"
)

var (
	warmup   = flag.Duration("warmup", 2*time.Second, "time before the window of a benchmark")
	window   = flag.Duration("window", 20*time.Second, "time that a benchmark measures")
	profiles = flag.String("profiles", "", "directory for CPU, allocation, heap, block, mutex and goroutine profiles of each benchmark")
)

const (
	producers = 32
	workers   = 128
	batch     = 64
	queueName = "bench"
)

var payload = []byte(`{"bench":true}`)

var durabilities = []codeq.Durability{codeq.DurabilityNone, codeq.DurabilityProcess, codeq.DurabilityDisk}

// forEach runs f at every durability with one and with two shards.
func forEach(b *testing.B, f func(b *testing.B, q *codeq.Queue)) {
	for _, d := range durabilities {
		for _, shards := range []int{1, 2} {
			b.Run(fmt.Sprintf("durability=%v/shards=%d", d, shards), func(b *testing.B) {
				q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: shards, Durability: d})
				if err != nil {
					b.Fatal(err)
				}
				defer func() {
					if err := q.Close(); err != nil {
						b.Error(err)
					}
				}()
				f(b, q)
			})
		}
	}
}

// load is a running workload. Every goroutine of it ends when ctx does.
type load struct {
	created   atomic.Int64
	completed atomic.Int64

	worked atomic.Int64 // handlers that have returned, or are about to

	mu      sync.Mutex
	latency []time.Duration // of sampled tasks, produce to completed
}

// sampleEvery is how many tasks a producer lets pass between two whose latency
// is measured.
const sampleEvery = 128

// task returns the n-th task of a producer. A sampled one has a payload of the
// same length that holds the time.
func (l *load) task(n int) codeq.Task {
	if n%sampleEvery != 0 {
		return codeq.Task{Queue: queueName, Payload: payload}
	}
	stamp := make([]byte, len(payload))
	binary.LittleEndian.PutUint64(stamp[1:], uint64(time.Now().UnixNano()))
	return codeq.Task{Queue: queueName, Payload: stamp}
}

// complete counts a completed task.
func (l *load) complete(p []byte) {
	l.completed.Add(1)
	if p[0] == payload[0] {
		return
	}
	took := time.Duration(time.Now().UnixNano() - int64(binary.LittleEndian.Uint64(p[1:])))
	l.mu.Lock()
	l.latency = append(l.latency, took)
	l.mu.Unlock()
}

// measure lets the load run for the warm-up and the window, and reports. done
// returns how many tasks have been completed; nil: what complete has counted.
func (l *load) measure(b *testing.B, done func() int64) {
	if done == nil {
		done = l.completed.Load
	}
	time.Sleep(*warmup)
	stopProfiles := startProfiles(b)
	l.mu.Lock()
	l.latency = l.latency[:0]
	l.mu.Unlock()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	used := cpuTime(b)
	created, completed, start := l.created.Load(), done(), time.Now()
	time.Sleep(*window)
	created, completed = l.created.Load()-created, done()-completed
	elapsed := time.Since(start)
	used = cpuTime(b) - used
	runtime.ReadMemStats(&after)
	stopProfiles()

	b.ReportMetric(0, "ns/op") // the run is as long as the window
	if completed < created*9/10 {
		b.Skipf("discarded: completions fell behind: %d created, %d completed in %v", created, completed, elapsed)
	}
	cycles := float64(min(created, completed))
	b.ReportMetric(cycles/elapsed.Seconds(), "cycles/s")
	b.ReportMetric(float64(used.Nanoseconds())/1e3/cycles, "cpu-us/cycle")
	b.ReportMetric(float64(after.Mallocs-before.Mallocs)/cycles, "allocs/cycle")
	b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/cycles, "B/cycle")
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.latency)
	if n := len(l.latency); n > 0 {
		b.ReportMetric(float64(l.latency[n/2].Microseconds()), "p50-us")
		b.ReportMetric(float64(l.latency[n*99/100].Microseconds()), "p99-us")
	}
	b.ReportMetric(resident()/1e6, "rss-MB")
}

// cpuTime is what the process has used of all cores, in user and system mode.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// resident is the memory of the process that is in RAM, in bytes; 0 where
// /proc does not tell.
func resident() float64 {
	b, err := os.ReadFile("/proc/self/statm")
	var size, pages float64
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		return 0
	}
	return pages * float64(os.Getpagesize())
}

// startProfiles begins the profiles that -profiles asks for.
func startProfiles(b *testing.B) (stop func()) {
	if *profiles == "" {
		return func() {}
	}
	name := func(kind string) string {
		return filepath.Join(*profiles, strings.NewReplacer("/", "_", "=", "-").Replace(b.Name())+"."+kind+".pprof")
	}
	create := func(kind string) *os.File {
		f, err := os.Create(name(kind))
		if err != nil {
			b.Fatal(err)
		}
		return f
	}
	if err := os.MkdirAll(*profiles, 0o755); err != nil {
		b.Fatal(err)
	}
	runtime.SetBlockProfileRate(int(10 * time.Microsecond))
	runtime.SetMutexProfileFraction(100)
	cpu := create("cpu")
	if err := pprof.StartCPUProfile(cpu); err != nil {
		b.Fatal(err)
	}
	return func() {
		pprof.StopCPUProfile()
		files := []*os.File{cpu}
		for _, kind := range []string{"allocs", "heap", "block", "mutex", "goroutine"} {
			f := create(kind)
			if err := pprof.Lookup(kind).WriteTo(f, 0); err != nil {
				b.Error(err)
			}
			files = append(files, f)
		}
		runtime.SetBlockProfileRate(0)
		runtime.SetMutexProfileFraction(0)
		for _, f := range files {
			if err := f.Close(); err != nil {
				b.Error(err)
			}
		}
	}
}

// endedBy reports an error that is not the end of ctx.
func endedBy(ctx context.Context, b *testing.B, err error) {
	if ctx.Err() == nil {
		b.Error(err)
	}
}
