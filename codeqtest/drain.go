package codeqtest

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"codeq"
	"codeq/internal/inspect"
)

// limit bounds the time of Drain and Work.
const limit = 366 * 24 * time.Hour

var errLimit = errors.New("still not done after 366 days")

// Drain runs the handlers of mux until none of their queues has a task that is ready, scheduled,
// blocked or leased, as in codeq.Queue.WaitIdle: it waits for retries, scheduled tasks and blocked
// tasks, but not for dead letters. In a bubble this takes no real time.
//
// Drain ignores tasks in queues without a handler. The test ends if the queues are not idle after
// 366 days, for example because a handler produces its own successor each day, or a queue stays
// paused; use Work for these. Without a bubble the days are real.
//
// Handlers run on other goroutines: they must report failures with t.Error or assert, or by their
// error, not with t.Fatal or require.
func (q *Queue) Drain(mux *codeq.Mux) {
	q.t.Helper()
	r := q.start(mux) // without a failure, no handler runs at the end
	ctx, cancel := context.WithTimeoutCause(r.ctx, limit, errLimit)
	defer cancel()
	err := q.WaitIdle(ctx, r.queues...)
	if stopped := r.stop(); stopped != nil {
		err = stopped
	}
	if err != nil {
		left := q.describe("", codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased)
		q.t.Fatalf("codeqtest: drain %q: %v%s\n%s", r.queues, err, q.paused(r.queues), left)
	}
}

// paused lists the paused ones of the queues; "" if there is none.
func (q *Queue) paused(queues []string) string {
	var names []string
	for _, name := range queues {
		if set, err := q.Settings(name); err == nil && set.Paused {
			names = append(names, strconv.Quote(name))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; paused: " + strings.Join(names, ", ")
}

// Work runs the handlers of mux until nothing can be claimed from their queues, and waits for the
// handlers to end. It does not wait for scheduled tasks, such as retries, nor for tasks that a
// pause, a rate or a limit of concurrency holds back at the moment: they stay for a later call, for
// example after Advance. In a bubble no time passes, unless handlers sleep; Work also runs tasks
// that become ready in that time.
//
// Work does not end if a handler produces its own successor at once, or returns Snooze(0).
func (q *Queue) Work(mux *codeq.Mux) {
	q.t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), limit, errLimit)
	defer cancel()
	opts := q.runOptions(mux)
	for claimed := -1; claimed != 0; {
		q.settle()
		var err error
		claimed, err = inspect.Of(q.Queue).RunUntilEmpty(ctx, mux, &opts)
		if err == nil {
			err = q.WaitIdle(ctx, "") // no such queue: waits for messages between shards
		}
		if err != nil {
			q.t.Fatalf("codeqtest: work on %q: %v\n%s", opts.Queues, err, q.describe("", codeq.Ready, codeq.Leased))
		}
	}
}

// runOptions is RunOptions with the defaults of Drain and Work.
func (q *Queue) runOptions(mux *codeq.Mux) codeq.RunOptions {
	opts := q.RunOptions
	opts.Grace = 0
	if opts.Concurrency == 0 {
		opts.Concurrency = 1
	}
	if len(opts.Queues) == 0 && mux != nil {
		opts.Queues = mux.Queues()
	}
	if opts.OnError == nil {
		opts.OnError = func(l *codeq.Lease, err error) {
			q.t.Logf("codeqtest: attempt %d of task %s of queue %q: %v", l.Attempt, l.ID, l.Queue, err)
		}
	}
	return opts
}

// running is an active Run.
type running struct {
	queues []string
	ctx    context.Context // ends with Run
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when Run has returned
	err    error         // of Run; valid once done is closed
}

// start calls Run on another goroutine.
func (q *Queue) start(mux *codeq.Mux) *running {
	opts := q.runOptions(mux)
	r := &running{queues: opts.Queues, done: make(chan struct{})}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	go func() {
		defer close(r.done)
		r.err = q.Run(r.ctx, mux, &opts)
		r.cancel(r.err)
	}()
	return r
}

// stop ends Run and returns its error.
func (r *running) stop() error {
	r.cancel(nil)
	<-r.done
	return r.err
}
