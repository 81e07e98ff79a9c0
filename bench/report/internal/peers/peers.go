// Package peers puts codeq and its alternatives under the same load in one run, and writes a table
// (peers.md), the numbers for benchstat (peers.txt), and charts.
//
// The load is that of package workload: 32 producers, 128 workers, tasks of 14 bytes, at most 4,096
// tasks that are produced and not done. The comment on a driver describes its use of the queue. A
// cycle counts when the queue has confirmed the completion. Beside a queue that keeps completed
// tasks, codeq keeps them, too.
//
// The servers come from the system (Debian: redis-server beanstalkd postgresql); the program starts
// them on free ports of loopback with their data below -dir, and ends them. A missing server is
// left out of the table.
package peers

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"codeq/bench/report/internal/command"
	"codeq/bench/report/internal/document"
	"codeq/bench/workload"
)

const (
	batchSize = 64   // tasks of a batch
	backlog   = 4096 // maximum of tasks that are produced and not done
)

// bench measures subjects, one after the other.
type bench struct{ command.Options }

// Declare declares the flags of the command.
func Declare(f *flag.FlagSet) func(context.Context) error {
	var b bench
	b.Directories(f)
	b.Windows(f, "rows whose names", 2*time.Second, 10*time.Second)
	b.Profile(f)
	list := f.Bool("list", false, "print the names of the rows, and measure nothing")
	return func(ctx context.Context) error {
		chosen := matching(subjects(), &b.Only)
		if *list {
			for _, s := range chosen {
				fmt.Println(s.Name)
			}
			return nil
		}
		return b.run(ctx, chosen)
	}
}

// run measures, and writes the rows also after an interrupt.
func (b *bench) run(ctx context.Context, chosen []subject) error {
	machine, err := b.Begin()
	if err != nil {
		return err
	}
	rows := make([]row, len(chosen))
	for i, s := range chosen {
		rows[i].subject = s
	}
	for i := range rows {
		r := b.measure(ctx, rows[i].subject)
		if ctx.Err() != nil {
			break // an interrupted row has no result
		}
		rows[i].result = &r
		command.Progress("%d/%d %-28s %s", i+1, len(rows), rows[i].Name, r)
	}
	return errors.Join(context.Cause(ctx), write(b.Out, machine, rows))
}

// result of one run.
type result struct {
	workload.Result
	CPU     time.Duration // of this process and the servers, in the window
	Version string
	Err     error
}

func (r result) String() string {
	if r.Err != nil {
		return r.Err.Error()
	}
	behind := ""
	if r.FellBehind() {
		behind = ", fell behind"
	}
	return fmt.Sprintf("%.0f cycles/s, p50 %s, p99 %s, %.1f us of CPU a cycle%s",
		r.Rate(), document.Duration(r.Latencies.Quantile(0.5)), document.Duration(r.Latencies.Quantile(0.99)), r.cpuMicros(), behind)
}

// cpuMicros returns the CPU time of a cycle.
func (r result) cpuMicros() float64 {
	return float64(r.CPU.Microseconds()) / float64(max(r.Cycles(), 1))
}

// row is a subject with its result.
type row struct {
	subject
	result *result // nil: not measured
}

// measure runs the load on a subject.
func (b *bench) measure(ctx context.Context, s subject) (res result) {
	// Garbage of one queue must not slow the next one.
	debug.FreeOSMemory()
	syscall.Sync()
	dir, err := os.MkdirTemp(b.Dir, "peers")
	if err != nil {
		return result{Err: err}
	}
	defer func() { res.Err = errors.Join(res.Err, os.RemoveAll(dir)) }()
	// A server may run as another user.
	if err := os.Chmod(dir, 0o711); err != nil {
		return result{Err: err}
	}
	load := s.Load
	load.Batch, load.Backlog = s.Batch, backlog
	load = load.WithDefaults()
	p, err := s.open(ctx, dir, load)
	if err != nil {
		return result{Err: err}
	}
	defer func() { res.Err = errors.Join(res.Err, p.close()) }()
	run := workload.Start(ctx, load, p.driver)
	err = b.warm(run)
	stopProfile := func() error { return nil }
	if b.Profiles != "" && err == nil {
		stopProfile, err = workload.Profile(b.Profiles, s.Name)
	}
	before := p.cpu()
	if err == nil {
		res.Result, err = run.Measure(b.Window)
	}
	res.CPU = res.Usage.CPU + p.cpu() - before
	res.Version = p.version
	// The first error is more useful than those that follow from it.
	if ended := run.Stop(); ended != nil {
		err = ended
	}
	if err == nil {
		err = stopProfile()
	}
	res.Err = err
	return res
}

// warm waits for the warm-up, and then until the queue has completed a full backlog of tasks, for
// four warm-ups at most: before that, a slow queue still fills its backlog.
func (b *bench) warm(run *workload.Run) error {
	start := time.Now()
	for {
		select {
		case <-time.After(min(b.Warmup, 100*time.Millisecond)):
		case <-run.Ended():
			return nil // Stop returns the error
		}
		if time.Since(start) < b.Warmup {
			continue
		}
		_, completed, err := run.Counts()
		if err != nil || completed >= backlog || time.Since(start) > 5*b.Warmup {
			return err
		}
	}
}
