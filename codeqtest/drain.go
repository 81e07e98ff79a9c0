package codeqtest

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"codeq"
	"codeq/internal/hook"
)

// limit is how much time may pass in Drain and Work.
const limit = 366 * 24 * time.Hour

var errLimit = errors.New("still not done after 366 days")

// Drain has the handlers of mux work until none of their queues has a task that is ready,
// scheduled, blocked or leased, as codeq.Queue.WaitIdle sees it: retries, tasks for a later time
// and tasks that wait for others included, dead letters excluded. In a bubble the time that this
// takes passes at once.
//
// Tasks that the handlers produce into queues without a handler are left alone. The test ends when
// the queues are not idle after 366 days, as when a handler produces its own successor each day, or
// a queue is paused and nobody resumes it meanwhile; see Work for such. Without a bubble these are
// real days.
//
// Handlers run on other goroutines: they report to the test with t.Error or assert, or by the error
// that they return, not with t.Fatal or require.
func (q *Queue) Drain(mux *codeq.Mux) {
	q.t.Helper()
	r := q.start(mux) // when it is stopped no handler runs, unless something failed
	ctx, cancel := context.WithTimeoutCause(r.ctx, limit, errLimit)
	defer cancel()
	err := q.WaitIdle(ctx, r.queues...)
	if stopped := r.stop(); stopped != nil {
		err = stopped
	}
	if err != nil {
		q.t.Fatalf("codeqtest: drain %q: %v%s\n%s", r.queues, err, q.paused(r.queues), q.describe("", codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased))
	}
}

// paused names those of the queues that are; "" if none is.
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

// Work has the handlers of mux work until nothing can be claimed from their queues, and waits for
// the handlers to end. It does not wait for tasks that are scheduled, as for a retry, nor for those
// that a pause, a rate or a limit of concurrency holds back at the moment: they stay, and a later
// call does them, as after Advance. In a bubble no time passes, unless handlers let it pass; a task
// that becomes ready by then is worked on as well.
//
// A handler that at once produces its own successor, or has its task back by Snooze(0), keeps Work
// from ending.
func (q *Queue) Work(mux *codeq.Mux) {
	q.t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), limit, errLimit)
	defer cancel()
	opts := q.runOptions(mux)
	for claimed := -1; claimed != 0; {
		q.settle()
		var err error
		claimed, err = hook.RunUntilEmpty(ctx, q.Queue, mux, &opts)
		if err == nil {
			err = q.WaitIdle(ctx, "") // of no name: what the completions have sent to other shards is there
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

// running is a Run under way.
type running struct {
	queues []string
	ctx    context.Context // ends with Run
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when Run has returned
	err    error         // of Run; valid once done is closed
}

// start calls Run.
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

// stop ends Run and returns its error, if it had one.
func (r *running) stop() error {
	r.cancel(nil)
	<-r.done
	return r.err
}
