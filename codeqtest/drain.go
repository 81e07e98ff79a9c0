package codeqtest

import (
	"context"
	"errors"
	"time"

	"codeq"
)

// limit is how much time may pass in Drain and Work.
const limit = 366 * 24 * time.Hour

var errLimit = errors.New("still not done after 366 days")

// Drain has the handlers of mux work until none of their queues has a task that
// is ready, scheduled, blocked or leased, as codeq.Queue.WaitIdle sees it:
// retries, tasks for a later time and tasks that wait for others included, dead
// letters excluded. In a bubble the time that this takes passes at once.
//
// Tasks that the handlers produce into queues without a handler are left
// alone. The test ends when the queues are not idle after 366 days, as when a
// handler produces its own successor each day; see Work for such.
//
// Handlers run on other goroutines: they report to the test with t.Error or
// assert, or by the error that they return, not with t.Fatal or require.
func (q *Queue) Drain(mux *codeq.Mux) {
	q.t.Helper()
	r := q.start(mux, 0) // when it is stopped no handler runs, unless something failed
	ctx, cancel := context.WithTimeoutCause(r.ctx, limit, errLimit)
	defer cancel()
	err := q.WaitIdle(ctx, r.queues...)
	if stopped := r.stop(); stopped != nil {
		err = stopped
	}
	if err != nil {
		q.t.Fatalf("codeqtest: drain %q: %v\n%s", r.queues, err, q.describe("", codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased))
	}
}

// Work has the handlers of mux work until none of their queues has a task that
// is ready, and waits for the handlers to end. It does not wait for tasks that
// are scheduled, as for a retry. In a bubble no time passes, unless
// handlers let it pass; a task that becomes ready by then is worked on as well.
//
// A handler that at once produces its own successor, or has its task
// back by Snooze(0), keeps Work from ending.
func (q *Queue) Work(mux *codeq.Mux) {
	q.t.Helper()
	began := time.Now()
	for {
		r := q.start(mux, limit)
		q.settle()
		for !q.bubble && r.ctx.Err() == nil && q.ready(r.queues) > 0 {
			time.Sleep(time.Millisecond)
		}
		err := r.stop()
		ready := q.ready(r.queues)
		if err == nil && ready > 0 && time.Since(began) > limit {
			err = errLimit
		}
		if err != nil {
			q.t.Fatalf("codeqtest: work on %q: %v\n%s", r.queues, err, q.describe("", codeq.Ready, codeq.Leased))
		}
		if ready == 0 { // else they were claimed when Run was stopped, or are follow-ups
			return
		}
	}
}

// ready is the number of ready tasks of some queues.
func (q *Queue) ready(queues []string) (n uint64) {
	q.t.Helper()
	stats, err := q.Stats(context.Background())
	if err != nil {
		q.t.Fatalf("codeqtest: %v", err)
	}
	for _, name := range queues {
		n += stats[name].Ready
	}
	return n
}

// running is a Run under way.
type running struct {
	queues []string
	ctx    context.Context // ends with Run
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when Run has returned
	err    error         // of Run; valid once done is closed
}

// start calls Run. A grace of 0 is Run's default.
func (q *Queue) start(mux *codeq.Mux, grace time.Duration) *running {
	opts := q.RunOptions
	opts.Grace = grace
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
