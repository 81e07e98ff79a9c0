// Package scaling measures cycles/s of codeq over shards, producers, payloads, sizes of groups,
// tasks in memory, and nodes, and the features of a task behind a backlog. In the root of the
// repository:
//
//	go run -C bench/report . scaling -out ../results
//	go run -C bench/report . scaling -out ../results -name levels -only 'callers|batches'
//
// It takes a quarter of an hour, and writes scaling.md, scaling.txt for benchstat, and a chart for
// each sweep. At both ends of each line a further window is profiled: scaling.md shows the
// processor time by layer, the serial part of the work, and contention.
package scaling

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"time"

	"codeq/bench/report/internal/command"
)

// Declare declares the flags of the command.
func Declare(f *flag.FlagSet) func(context.Context) error {
	m := measurer{progress: command.Progress}
	m.Directories(f)
	m.Windows(f, "sweeps whose names", 500*time.Millisecond, 3*time.Second)
	m.Profile(f)
	f.IntVar(&m.runs, "runs", 1, "`N` windows at each value, each with a new queue; of some sweeps never less than 6")
	name := f.String("name", "scaling", "the names of the files begin with `NAME`")
	short := f.Bool("short", false, "the first and the last value of each sweep, for a quarter of a second")
	return func(ctx context.Context) error {
		z := size{ready: 1_000_000}
		if *short {
			z = size{ends: true, ready: 10_000}
			m.Window, m.Warmup, m.runs = 250*time.Millisecond, 100*time.Millisecond, 1
		}
		chosen := slices.DeleteFunc(sweeps(z), func(sw *sweep) bool { return !m.Only.MatchString(sw.name) })
		return m.run(ctx, *name, chosen)
	}
}

// run measures, and writes the sweeps also after an interrupt.
func (m *measurer) run(ctx context.Context, name string, chosen []*sweep) (err error) {
	machine, err := m.Begin()
	if err != nil {
		return err
	}
	if m.Dir, err = os.MkdirTemp(m.Dir, "codeq-scaling-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(m.Dir)) }()
	if m.Profiles == "" {
		m.Profiles = filepath.Join(m.Dir, "profiles") // not kept
	}
	results := results{name: name, machine: machine, measurer: *m}
	for _, sw := range chosen {
		if ctx.Err() != nil {
			break
		}
		results.add(sw, m.sweep(ctx, sw))
	}
	results.interrupted = ctx.Err() != nil
	return errors.Join(results.write(context.WithoutCancel(ctx), m.Out), results.failed())
}
