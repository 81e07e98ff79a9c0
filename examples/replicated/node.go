package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq"
)

const jobQueue = "job"

// job is the payload of a task. No two have the same number.
type job struct{ Number string }

// report is a line on the standard output of a node, as JSON.
type report struct {
	Asked time.Time // start of a request that all shards have answered; zero: none
	Done  int64     // attempts finished in this process
	Idle  bool      // no tasks are left, on any node
}

// serve runs a node. It produces tasks until orders ends, and works on tasks until ctx ends.
func serve(ctx context.Context, c *config, i int, orders io.Reader, reports io.Writer, log *slog.Logger) (err error) {
	q, err := codeq.Open(c.path(i, ""), &codeq.Options{
		Cluster: &codeq.Cluster{Node: c.name(i), Listen: c.address(i), Peers: c.peers()},
		Logger:  log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	acked, err := openNotes(c.path(i, ackedNotes))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, acked.Close()) }()
	done, err := openNotes(c.path(i, doneNotes))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done.Close()) }()

	var handled atomic.Int64
	mux := new(codeq.Mux)
	codeq.Handle(mux, jobQueue, func(ctx context.Context, j *codeq.Job[job]) error {
		select {
		case <-time.After(10 * time.Millisecond): // the work
		case <-ctx.Done(): // the lease is lost, or the node ends
			return context.Cause(ctx)
		}
		// The work is done now. If the process is killed before that is stored, another node does
		// it again.
		handled.Add(1)
		return done.add(j.Args.Number)
	})

	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return q.Run(gctx, mux, &codeq.RunOptions{
			Concurrency: c.workers,
			// After this time, other nodes take over the tasks of a killed process.
			LeaseFor: 3 * time.Second,
			OnError: func(l *codeq.Lease, err error) {
				log.Warn("attempt ended", "id", l.ID, "attempt", l.Attempt, "err", err)
			},
		})
	})
	producing, stopProducing := context.WithCancel(gctx)
	g.Go(func() error {
		// orders also ends when the parent process ends.
		_, err := io.Copy(io.Discard, orders)
		stopProducing()
		return err
	})
	var idle atomic.Bool
	g.Go(func() error {
		err := produceAll(producing, q, c, i, acked, log)
		if err == nil {
			err = q.WaitIdle(gctx)
		}
		if gctx.Err() != nil {
			return nil
		}
		idle.Store(err == nil)
		return err
	})
	g.Go(func() error {
		out := json.NewEncoder(reports)
		for gctx.Err() == nil {
			r, asked := report{Idle: idle.Load(), Done: handled.Load()}, time.Now()
			// While a shard has no leader, this waits.
			if _, err := q.Stats(gctx); err != nil {
				log.Warn("no counts", "err", err)
			} else {
				r.Asked = asked
			}
			if err := out.Encode(r); err != nil {
				return err
			}
			sleep(gctx, 50*time.Millisecond)
		}
		return nil
	})
	return g.Wait()
}

// produceAll produces c.rate tasks a second until ctx ends. It uses several goroutines, like the
// requests of a real service: a call that waits for a shard's leader delays no other.
func produceAll(ctx context.Context, q *codeq.Queue, c *config, i int, acked *notes, log *slog.Logger) error {
	tick := time.NewTicker(time.Second / time.Duration(c.rate))
	defer tick.Stop()
	life := time.Now().UnixMilli() // makes the numbers of this process unique
	var last atomic.Int64
	var g errgroup.Group
	for range 32 {
		g.Go(func() error {
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return nil
				}
				number := fmt.Sprintf("%d.%d.%d", i, life, last.Add(1))
				task, err := codeq.NewTask(jobQueue, job{number})
				if err != nil {
					return err
				}
				// Not canceled by ctx: the outcome would be unknown otherwise.
				if _, err := q.Produce(context.WithoutCancel(ctx), task); err != nil {
					// There was no majority of nodes for a while. The task was not acknowledged; a
					// real service would return an error to its client.
					log.Warn("not produced", "number", number, "err", err)
					continue
				}
				// A real service would acknowledge the task to its client here. If the process is
				// killed before this line, no client relies on the task.
				if err := acked.add(number); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
