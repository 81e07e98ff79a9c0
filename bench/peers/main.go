package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"codeq/bench/report"
	"codeq/bench/workload"
)

const (
	batchSize = 64   // tasks of a call, where there are several
	backlog   = 4096 // tasks that are produced and not done at the most
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var (
		dir      = flag.String("dir", os.TempDir(), "directory on the disk to measure; what is stored in it is removed")
		out      = flag.String("out", ".", "directory for peers.md, peers.csv and peers-*.svg")
		only     = flag.String("only", "", "regular expression: only the rows whose name it matches; -list shows the names")
		list     = flag.Bool("list", false, "print the names of the rows and exit")
		profiles = flag.String("profiles", "", "directory for profiles of the windows, which take some CPU time; default: none")
		runs     = flag.Int("runs", 1, "runs of each row, of which the median is shown")
		warmUp   = flag.Duration("warmup", 2*time.Second, "how long a load runs before it is measured")
		window   = flag.Duration("window", 10*time.Second, "how long a load is measured")
	)
	flag.Parse()
	if flag.NArg() > 0 || *runs < 1 || *window <= 0 {
		flag.Usage()
		return errors.New("the arguments are not valid")
	}
	match, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	chosen := matching(subjects(), match)
	if *list {
		for _, s := range chosen {
			fmt.Println(s.Name)
		}
		return nil
	}
	machine, err := report.ThisMachine(*dir)
	if err != nil {
		return err
	}
	rows := make([]row, len(chosen))
	for i, s := range chosen {
		rows[i].subject = s
	}
	b := bench{*dir, *profiles, *warmUp, *window}
	for n := range *runs {
		for i := range rows {
			r := b.measure(ctx, rows[i].subject)
			if ctx.Err() != nil {
				break // what was interrupted has no result
			}
			rows[i].results = append(rows[i].results, r)
			fmt.Fprintf(os.Stderr, "%d/%d %d/%d %-28s %s\n", n+1, *runs, i+1, len(rows), rows[i].Name, r)
		}
	}
	return errors.Join(context.Cause(ctx), write(*out, machine, rows))
}

// bench measures subjects, one after the other.
type bench struct {
	dir, profiles  string
	warmUp, window time.Duration
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
		r.Rate(), report.Duration(r.Latencies.Quantile(0.5)), report.Duration(r.Latencies.Quantile(0.99)), r.cpuMicros(), behind)
}

// cpuMicros is the CPU time of a cycle.
func (r result) cpuMicros() float64 {
	return float64(r.CPU.Microseconds()) / float64(max(r.Cycles(), 1))
}

// row is what is shown of a subject.
type row struct {
	subject
	results []result
}

// median is the result with the middle rate, the lower one of two, of the runs
// that did not fail, or else one that failed. There is at least one.
func (r row) median() result {
	var good []result
	for _, res := range r.results {
		if res.Err == nil {
			good = append(good, res)
		}
	}
	if len(good) == 0 {
		return r.results[0]
	}
	slices.SortFunc(good, func(a, b result) int { return cmp.Compare(a.Rate(), b.Rate()) })
	return good[(len(good)-1)/2]
}

// measure runs the load on a subject.
func (b bench) measure(ctx context.Context, s subject) (res result) {
	// What one queue has left behind does not burden the next.
	debug.FreeOSMemory()
	syscall.Sync()
	dir, err := os.MkdirTemp(b.dir, "peers")
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
	if dir, err = filepath.Abs(dir); err != nil {
		return result{Err: err}
	}
	p, err := s.open(ctx, dir, load)
	if err != nil {
		return result{Err: err}
	}
	defer func() { res.Err = errors.Join(res.Err, p.close()) }()
	run := workload.Start(ctx, load, p.driver)
	err = b.warm(run)
	stopProfile := func() error { return nil }
	if b.profiles != "" && err == nil {
		stopProfile, err = workload.Profile(b.profiles, s.Name)
	}
	before := p.cpu()
	if err == nil {
		res.Result, err = run.Measure(b.window)
	}
	res.CPU = res.Usage.CPU + p.cpu() - before
	res.Version = p.version
	// The error that ended the load says more than that of what it ended.
	if ended := run.Stop(); ended != nil {
		err = ended
	}
	if err == nil {
		err = stopProfile()
	}
	res.Err = err
	return res
}

// warm lets the load run for the warm-up, and then until a slow queue has done
// with as many tasks as may wait, or for four times as long: before that it
// gathers tasks more than it completes them.
func (b bench) warm(run *workload.Run) error {
	start := time.Now()
	for {
		select {
		case <-time.After(min(b.warmUp, 100*time.Millisecond)):
		case <-run.Ended():
			return nil // Stop returns the error
		}
		if time.Since(start) < b.warmUp {
			continue
		}
		_, completed, err := run.Counts()
		if err != nil || completed >= backlog || time.Since(start) > 5*b.warmUp {
			return err
		}
	}
}
