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
		Name: "bench", Category: categoryOther, Usage: "measure what this machine and disk can do",
		Description: "Makes a new queue in a directory of its own, which is removed in the end, produces tasks and\n" +
			"works on them. It touches no queue of yours: -dir and -url are refused.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "in", Usage: "make the directory within this `DIR`, on the disk that is to be measured; default: that for temporary files"},
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

// benchResult is the document of bench, one for each part.
type benchResult struct {
	Part      string
	Tasks     int
	Took      time.Duration
	PerSecond float64
}

func (a *app) bench(ctx context.Context, c *cli.Command) (err error) {
	if err := noArguments(c); err != nil {
		return err
	}
	if c.IsSet("dir") || c.IsSet("url") {
		return usagef(c, "bench takes neither -dir nor -url, but -in")
	}
	opts := &codeq.Options{Shards: c.Int("shards")}
	if err := opts.Durability.UnmarshalText([]byte(c.String("durability"))); err != nil {
		return usageOf(c, err)
	}
	n, payload, producers := c.Int("tasks"), c.Int("payload"), c.Int("producers")
	if n < 1 || payload < 0 || producers < 1 || c.Int("workers") < 1 {
		return usagef(c, "-tasks, -producers and -workers are at least 1, -payload at least 0")
	}
	dir, err := os.MkdirTemp(c.String("in"), "codeq-bench-")
	if err != nil {
		return coded(exitOther, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	q, err := codeq.Open(dir, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.Close()) }()

	var results []benchResult
	measure := func(part string, f func() error) error {
		began := time.Now()
		if err := f(); err != nil {
			return err
		}
		took := time.Since(began)
		results = append(results, benchResult{part, n, took, float64(n) / took.Seconds()})
		return nil
	}
	task := codeq.Task{Queue: "bench", Payload: make([]byte, payload)}
	err = measure("produce", func() error {
		g, ctx := errgroup.WithContext(ctx)
		var begun atomic.Int64
		for range producers {
			g.Go(func() error {
				for begun.Add(1) <= int64(n) {
					if _, err := q.Produce(ctx, task); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return g.Wait()
	})
	if err != nil {
		return err
	}
	err = measure("work", func() error {
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		var worked atomic.Int64
		mux := new(codeq.Mux)
		codeq.Handle(mux, "bench", func(context.Context, *codeq.Job[[]byte]) error {
			if worked.Add(1) == int64(n) {
				stop()
			}
			return nil
		})
		err := q.Run(ctx, mux, &codeq.RunOptions{Concurrency: c.Int("workers")})
		if err == nil && worked.Load() < int64(n) {
			err = context.Cause(ctx)
		}
		return err
	})
	if err != nil {
		return err
	}
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
