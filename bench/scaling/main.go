// Command scaling measures how cycles/s of codeq go with shards, producers,
// payloads, the size of groups, tasks in memory, and nodes, and what features do behind
// a backlog:
//
//	go run -C bench/scaling . -out ../results
//
//	go run -C bench/scaling . -out ../results -name levels -only callers,batches
//
// It takes a quarter of an hour, and writes scaling.md, scaling.csv and a chart for each sweep. At
// both ends of each line a further window is profiled, and scaling.md says what the profiles do:
// where the processors' time goes, what is done one after the other, and what is contended.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"codeq/bench/report"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "scaling:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	out := flag.String("out", ".", "directory for scaling.md and what belongs to it")
	dir := flag.String("dir", "", "directory below which queues lie for a while; default: the system's for temporary files")
	m := measurer{}
	flag.DurationVar(&m.window, "window", 3*time.Second, "time that is measured at each value")
	flag.DurationVar(&m.warmup, "warmup", 500*time.Millisecond, "time before a window")
	flag.IntVar(&m.runs, "runs", 1, "windows at each value, each with a new queue; the median counts; of some sweeps never less than 3")
	flag.StringVar(&m.profiles, "profiles", "", "directory that keeps the profiles; default: none")
	name := flag.String("name", "scaling", "how the names of the files begin")
	only := flag.String("only", "", "names of sweeps, separated by commas; default: all")
	short := flag.Bool("short", false, "the first and the last value of each sweep, for a quarter of a second")
	flag.Parse()
	if flag.NArg() > 0 || m.runs < 1 || m.window <= 0 {
		return errors.New("usage: scaling [flags]; -runs and -window are positive")
	}
	z := size{ready: 1_000_000}
	if *short {
		z = size{ends: true, ready: 10_000}
		m.window, m.warmup, m.runs = 250*time.Millisecond, 100*time.Millisecond, 1
	}
	todo, err := chosen(sweeps(z), *only)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	if m.dir, err = os.MkdirTemp(*dir, "codeq-scaling-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(m.dir)) }()
	if m.profiles == "" {
		if m.profiles, err = os.MkdirTemp("", "codeq-scaling-profiles-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(m.profiles)) }()
	}
	m.progress = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	machine, err := report.ThisMachine(m.dir)
	if err != nil {
		return err
	}
	results := results{name: *name, machine: machine, measurer: m}
	for _, sw := range todo {
		if ctx.Err() != nil {
			break
		}
		results.add(sw, m.sweep(ctx, sw))
	}
	results.interrupted = ctx.Err() != nil
	return errors.Join(results.write(*out), results.failed())
}

// chosen are the sweeps of the names.
func chosen(all []*sweep, names string) ([]*sweep, error) {
	if names == "" {
		return all, nil
	}
	var some []*sweep
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(sw *sweep) bool { return sw.name == name })
		if i < 0 {
			return nil, fmt.Errorf("no sweep %q", name)
		}
		some = append(some, all[i])
	}
	return some, nil
}
