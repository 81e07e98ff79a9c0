// Command worker is a service with a task queue inside: it takes orders, charges them, and sends a
// mail for each. It shows the life of a service that embeds codeq: open the queue, run handlers and
// producers, watch the counts, and shut down on a signal without losses.
//
//	worker [-dir DIR] [-every INTERVAL] [-workers N] [-stats INTERVAL] [-for TIME] [-http ADDR]
//
// With -http it serves a dashboard of the queue with all rights and no login: use a loopback
// address, such as 127.0.0.1:8080. It then also serves the queue to other programs on this machine
// (codeq.OpenLocal, the command codeq), by a local socket.
//
// Start it, stop it with Ctrl-C or kill -9, start it again: every accepted order is processed.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/codeqweb"
)

type config struct {
	dir     string
	every   time.Duration
	workers int
	stats   time.Duration
	http    string // "": no dashboard
}

func main() {
	var c config
	flag.StringVar(&c.dir, "dir", filepath.Join(os.TempDir(), "codeq-worker"), "keep the queue in `DIR`")
	flag.DurationVar(&c.every, "every", 100*time.Millisecond, "take an order each `INTERVAL`; 0: none")
	flag.IntVar(&c.workers, "workers", 4, "run `N` handlers at a time")
	flag.DurationVar(&c.stats, "stats", 2*time.Second, "log the counts each `INTERVAL`; 0: at the end only")
	flag.StringVar(&c.http, "http", "", "serve a dashboard at `ADDR`, such as 127.0.0.1:8080")
	limit := flag.Duration("for", 0, "stop after this `TIME`; 0: when a signal says so")
	flag.Parse()

	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if *limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *limit)
		defer cancel()
	}
	if err := serve(ctx, c, log); err != nil {
		log.Error("worker failed", "err", err)
		os.Exit(1)
	}
}

// serve works until ctx ends. The next serve finishes the remaining tasks.
func serve(ctx context.Context, c config, log *slog.Logger) (err error) {
	q, err := codeq.Open(c.dir, &codeq.Options{
		MaxAttempts: 5,
		Backoff:     codeq.Backoff{Base: 500 * time.Millisecond},
		Retention:   24 * time.Hour, // of completed tasks
		Logger:      log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.Close()) }()

	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return q.Run(gctx, handlers(), &codeq.RunOptions{
			Concurrency: c.workers,
			Grace:       5 * time.Second, // for handlers that run when ctx ends
			OnError: func(l *codeq.Lease, err error) {
				log.Warn("attempt ended", "queue", l.Queue, "id", l.ID, "attempt", l.Attempt, "err", err)
			},
		})
	})
	g.Go(func() error { return takeOrders(gctx, q, c.every) })
	if c.http != "" {
		g.Go(func() error { return serveLocal(gctx, q, log) })
		g.Go(func() error { return serveHTTP(gctx, q, c.http, log) })
	}
	g.Go(func() error {
		return each(gctx, c.stats, func(time.Time) error { return logCounts(q, log) })
	})
	return errors.Join(g.Wait(), logCounts(q, log))
}

// serveLocal serves the queue to other programs on this machine. An error is only logged.
func serveLocal(ctx context.Context, q *codeq.Queue, log *slog.Logger) error {
	if err := q.ServeLocal(ctx); err != nil && ctx.Err() == nil {
		log.Warn("no local socket", "err", err)
	}
	return nil
}

// serveHTTP serves the dashboard until ctx ends.
func serveHTTP(ctx context.Context, q *codeq.Queue, addr string, log *slog.Logger) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	dashboard := codeqweb.Handler(q, &codeqweb.Options{
		// A real service would check the user's session here.
		Access: func(*http.Request) codeqweb.Access { return codeqweb.All },
		Audit: func(r *http.Request, e *codeqweb.Entry) {
			log.Info("changed by hand", "action", e.Action, "target", e.Target, "from", e.Remote, "err", e.Error)
		},
	})
	server := &http.Server{Handler: dashboard, ReadHeaderTimeout: 10 * time.Second}
	log.Info("dashboard", "url", "http://"+listener.Addr().String()+"/")
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		_ = dashboard.Close() // ends the streams; Shutdown waits for them
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		stopped <- server.Shutdown(grace)
	})
	err = server.Serve(listener)
	if stop() { // the server has failed
		return errors.Join(err, dashboard.Close())
	}
	return <-stopped
}

// takeOrders produces a task each interval, like the HTTP handlers of a real service.
func takeOrders(ctx context.Context, q *codeq.Queue, every time.Duration) error {
	number := 0
	return each(ctx, every, func(now time.Time) error {
		number++
		task, err := newOrder(order{Number: number, Arrives: now.Add(time.Second)})
		if err != nil {
			return err
		}
		// Once Produce returns, the order survives a crash of the process. Produce takes less than
		// a millisecond. It is not canceled by ctx: a canceled call has an unknown outcome.
		_, err = q.Produce(context.WithoutCancel(ctx), task)
		return err
	})
}

// logCounts logs the number of tasks in each state.
func logCounts(q *codeq.Queue, log *slog.Logger) error {
	stats, err := q.Stats(context.Background())
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(stats)) {
		c := stats[name]
		log.Info("tasks", "queue", name, "ready", c.Ready, "scheduled", c.Scheduled,
			"leased", c.Leased, "dead", c.Dead, "done", c.Done)
	}
	return nil
}

// each calls f once in each interval until ctx ends or f fails; never if the interval is 0.
func each(ctx context.Context, interval time.Duration, f func(time.Time) error) error {
	if interval <= 0 {
		return nil
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			if err := f(now); err != nil {
				return err
			}
		}
	}
}
