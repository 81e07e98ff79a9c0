package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"codeq"
)

// The first middleware is the outermost. It sees by its error what becomes of a task.
func ExampleMux_Use() {
	q, done := open()
	defer done()

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	mux.Use(
		func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				err := next(ctx, l)
				var p *codeq.PanicError
				switch {
				case errors.As(err, &p):
					fmt.Printf("%s: panic: %v\n", l.Queue, p.Value)
				case err != nil:
					fmt.Printf("%s: %v\n", l.Queue, err)
				default:
					fmt.Printf("%s: ok\n", l.Queue)
				}
				return err
			}
		},
		func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				if l.Tenant == "" {
					return codeq.DeadLetter(errors.New("no tenant"))
				}
				return next(ctx, l)
			}
		},
	)
	codeq.Handle(&mux, "mail", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	codeq.Handle(&mux, "video", func(context.Context, *codeq.Job[[]byte]) error {
		defer stop()
		panic("no such codec")
	})

	_, err := q.ProduceBatch(ctx, []codeq.Task{
		{Queue: "mail", Tenant: "anna"},
		{Queue: "mail"},
		{Queue: "video", Tenant: "anna"},
	})
	check(err)
	check(q.Run(ctx, &mux, &codeq.RunOptions{
		Concurrency: 1,
		Queues:      []string{"mail", "video"}, // in this order
	}))
	// Output:
	// mail: ok
	// mail: no tenant
	// video: panic: no such codec
}

// What a handler logs says which task it is about.
func ExampleLogger() {
	dir, err := os.MkdirTemp("", "codeq-example-")
	check(err)
	defer os.RemoveAll(dir)
	withoutTimes := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "task" { // they differ from run to run
			return slog.Attr{}
		}
		return a
	}
	q, err := codeq.Open(dir, &codeq.Options{
		Logger: slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: withoutTimes})),
	})
	check(err)
	defer q.Close()
	_, err = q.Produce(ctx, codeq.Task{Queue: "mail", Tenant: "anna"})
	check(err)

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		return send(ctx, "ann@example.org")
	})
	check(q.Run(ctx, &mux, nil))
	// Output: level=INFO msg=sent queue=mail attempt=1 tenant=anna to=ann@example.org
}

// send is given the context only, as what a handler calls mostly is.
func send(ctx context.Context, to string) error {
	codeq.Logger(ctx).Info("sent", "to", to)
	return nil
}

func ExampleLeaseFrom() {
	q, done := open()
	defer done()
	_, err := q.Produce(ctx, codeq.Task{Queue: "mail", Headers: map[string]string{"locale": "de"}})
	check(err)

	greet := func(ctx context.Context) string {
		l, ok := codeq.LeaseFrom(ctx)
		if ok && l.Headers["locale"] == "de" {
			return "Guten Tag"
		}
		return "Good day"
	}

	ctx, stop := context.WithCancel(ctx)
	var mux codeq.Mux
	codeq.Handle(&mux, "mail", func(ctx context.Context, job *codeq.Job[[]byte]) error {
		defer stop()
		fmt.Println(greet(ctx))
		return nil
	})
	check(q.Run(ctx, &mux, nil))
	fmt.Println(greet(ctx))
	// Output:
	// Guten Tag
	// Good day
}
