package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/sync/errgroup"

	"codeq"
)

func (a *app) benchCommand() *cli.Command {
	return &cli.Command{
		Name: "bench", Category: categoryOther, Usage: "measure the speed of this machine and disk",
		Description: "Produces tasks in a new queue in a temporary directory, works on them, and removes the\n" +
			"directory. It uses no other queue: -dir and -url are refused.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "in", Usage: "create the directory in this `DIR`, on the disk to measure; default: that for temporary files"},
			&cli.IntFlag{Name: "tasks", Value: 100_000, Usage: "`N` tasks"},
			&cli.IntFlag{Name: "payload", Value: 100, Usage: "`N` bytes of payload"},
			&cli.IntFlag{Name: "shards", Usage: "`N` shards; default: that of a new queue"},
			&cli.IntFlag{Name: "producers", Value: 64, Usage: "`N` callers that produce at the same time"},
			&cli.IntFlag{Name: "workers", Value: 64, Usage: "`N` handlers that run at the same time"},
			&cli.StringFlag{Name: "durability", Value: "disk", Usage: "disk, process or none"},
		},
		Action: a.bench,
	}
}

// benchResult is the JSON output of bench for one part.
type benchResult struct {
	Part      string
	Tasks     int
	Took      time.Duration
	PerSecond float64
}

func (a *app) bench(ctx context.Context, c *cli.Command) error {
	r, err := newBenchRun(c)
	if err != nil {
		return err
	}
	results, err := r.measure(ctx, c.String("in"))
	if err != nil {
		return err
	}
	return a.benchResults(results)
}

// benchRun is a run of bench on a queue of its own.
type benchRun struct {
	opts      codeq.Options
	tasks     int
	payload   int // bytes
	producers int
	workers   int
}

const benchQueue = "bench"

// newBenchRun checks the command line.
func newBenchRun(c *cli.Command) (*benchRun, error) {
	if c.IsSet("dir") || c.IsSet("url") {
		return nil, usagef(c, "bench takes neither -dir nor -url, but -in")
	}
	r := &benchRun{
		opts:  codeq.Options{Shards: c.Int("shards")},
		tasks: c.Int("tasks"), payload: c.Int("payload"), producers: c.Int("producers"), workers: c.Int("workers"),
	}
	if err := r.opts.Durability.UnmarshalText([]byte(c.String("durability"))); err != nil {
		return nil, usageOf(c, err)
	}
	if r.tasks < 1 || r.payload < 0 || r.producers < 1 || r.workers < 1 {
		return nil, usagef(c, "-tasks, -producers and -workers are at least 1, -payload at least 0")
	}
	return r, nil
}

// measure times the parts one after the other, on a new queue below a directory.
func (r *benchRun) measure(ctx context.Context, in string) (results []benchResult, err error) {
	dir, err := os.MkdirTemp(in, "codeq-bench-")
	if err != nil {
		return nil, coded(exitOther, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	q, err := codeq.Open(dir, &r.opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	for _, part := range []struct {
		name string
		run  func(context.Context, *codeq.Queue) error
	}{{"produce", r.produce}, {"work", r.work}} {
		began := time.Now()
		if err := part.run(ctx, q); err != nil {
			return nil, err
		}
		took := time.Since(began)
		results = append(results, benchResult{part.name, r.tasks, took, float64(r.tasks) / took.Seconds()})
	}
	return results, nil
}

// produce stores all tasks, each with a call of its own.
func (r *benchRun) produce(ctx context.Context, q *codeq.Queue) error {
	task := codeq.Task{Queue: benchQueue, Payload: make([]byte, r.payload)}
	var begun atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range r.producers {
		g.Go(func() error {
			for begun.Add(1) <= int64(r.tasks) {
				if _, err := q.Produce(ctx, task); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// work runs an empty handler until all tasks are done.
func (r *benchRun) work(ctx context.Context, q *codeq.Queue) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var worked atomic.Int64
	mux := new(codeq.Mux)
	codeq.Handle(mux, benchQueue, func(context.Context, *codeq.Job[[]byte]) error {
		if worked.Add(1) == int64(r.tasks) {
			stop()
		}
		return nil
	})
	err := q.Run(ctx, mux, &codeq.RunOptions{Concurrency: r.workers})
	if err == nil && worked.Load() < int64(r.tasks) {
		err = context.Cause(ctx)
	}
	return err
}

func (a *app) benchResults(results []benchResult) error {
	if a.asJSON {
		for _, r := range results {
			if err := a.json(r); err != nil {
				return err
			}
		}
		return nil
	}
	t := newTable("PART", ">TASKS", ">TOOK", ">PER SECOND")
	for _, r := range results {
		t.add(r.Part, r.Tasks, r.Took.Round(time.Millisecond), fmt.Sprintf("%.0f", r.PerSecond))
	}
	return a.table(t)
}
