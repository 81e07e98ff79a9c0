package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) tailCommand() *cli.Command {
	return &cli.Command{
		Name: "tail", Category: categorySee, Usage: "follow the events of tasks",
		Description: "Writes a line for each change of a task, as it happens. If the directory is closed, it waits\n" +
			"until a process serves it; after the end of that process it waits for another one. Events may be\n" +
			"missed in between, and if there are more than can be written; the number of the latter is\n" +
			"reported (with -json: {\"Lost\": N}).",
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "queue", Usage: "of this `QUEUE`; repeated: of one of them"},
			&cli.StringSliceFlag{Name: "kind", Usage: "of this `KIND`: produced, claimed, completed, retried, released, dead, canceled, expired, progress, suspended, unhandled; repeated: one of them"},
			&cli.IntFlag{Name: "n", Usage: "end after `N` events; 0: at a signal"},
		},
		Action: a.tail,
	}
}

// follower is a subscription. Lost returns the number of events lost so far.
type follower interface {
	Next(ctx context.Context) (codeq.Event, error)
	Lost() uint64
	Close()
}

// tailBuffer bounds the events that wait while lines are written.
const tailBuffer = 1 << 16

// retryTail is the time between two attempts to find a process that serves the queue.
const retryTail = time.Second

func (a *app) tail(ctx context.Context, c *cli.Command) error {
	t, err := a.target(c)
	if err != nil {
		return err
	}
	opts := codeq.SubscribeOptions{Queues: c.StringSlice("queue"), Buffer: tailBuffer}
	for _, name := range c.StringSlice("kind") {
		var k codeq.EventKind
		if err := k.UnmarshalText([]byte(name)); err != nil {
			return usageOf(c, err)
		}
		opts.Kinds = append(opts.Kinds, k)
	}
	err = a.follow(ctx, t, opts, c.Int("n"))
	if errors.Is(err, context.Canceled) {
		return nil // the usual end
	}
	return err
}

// follow writes n events, or all until ctx ends.
func (a *app) follow(ctx context.Context, t *target, opts codeq.SubscribeOptions, n int) error {
	waiting, followed := false, false
	for shown := 0; ; {
		f, closeTarget, err := t.follow(ctx, opts)
		if err == nil {
			if waiting {
				a.note("codeq: a process serves the queue")
			}
			waiting, followed = false, true
			err = a.writeEvents(ctx, f, n, &shown)
			f.Close()
			closeTarget()
			if err == nil {
				return nil
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		switch code := exitCode(err); {
		case t.url == "" && (errors.Is(err, codeq.ErrNotServed) || errors.Is(err, codeq.ErrClosed)):
			if !waiting {
				a.note("codeq: nothing happens: no process serves the queue; waiting for one")
			}
			waiting = true
		case t.url != "" && followed && (code == exitInUse || code == exitNotNow || code == exitNoQueue):
			// Streams end after some minutes, and dashboards restart: subscribe again.
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryTail):
		}
	}
}

// follow subscribes to the events of an open target.
func (t *target) follow(ctx context.Context, opts codeq.SubscribeOptions) (follower, func(), error) {
	if t.url != "" {
		r, err := t.dial()
		if err != nil {
			return nil, nil, err
		}
		f, err := r.subscribe(ctx, opts)
		return f, func() {}, err
	}
	q, err := codeq.OpenLocal(ctx, t.dir)
	if err != nil {
		return nil, nil, err
	}
	done := func() { _ = q.Close() } // the connection only
	s, err := q.Subscribe(opts)
	if err != nil {
		done()
		return nil, nil, err
	}
	return s, done, nil
}

// writeEvents writes events until shown is n, then it returns nil.
func (a *app) writeEvents(ctx context.Context, f follower, n int, shown *int) error {
	lost := uint64(0)
	for {
		e, err := f.Next(ctx)
		if err != nil {
			return err
		}
		if now := f.Lost(); now > lost {
			if err := a.result(struct{ Lost uint64 }{now - lost}, "%d events were lost", now-lost); err != nil {
				return err
			}
			lost = now
		}
		if a.asJSON {
			err = a.json(e)
		} else {
			err = a.line("%s", a.eventLine(&e))
		}
		if err != nil {
			return err
		}
		if *shown++; *shown == n {
			return nil
		}
	}
}

func (a *app) eventLine(e *codeq.Event) string {
	line := fmt.Sprintf("%s %-9s %s %s", e.Time.In(a.loc).Format("15:04:05.000"), e.Kind, e.ID, e.Queue)
	if e.Tenant != "" {
		line += " tenant=" + e.Tenant
	}
	if e.Attempt > 0 {
		line += fmt.Sprintf(" attempt=%d", e.Attempt)
	}
	if e.Kind == codeq.EventProgress {
		line += " progress=" + progressText(e.Progress)
	}
	if e.LastError != "" {
		line += " error=" + e.LastError
	}
	return line
}
