package codeq

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// taskContext is the running task of a worker. It is the handler's context, or the parent of it,
// with the values of the context of Run. Many handlers never ask when their context ends: ending,
// which says so, is made when one does.
type taskContext struct {
	runner   *runner
	lease    Lease
	deadline time.Time                   // of the attempt, by the task's Timeout; zero: none
	logger   atomic.Pointer[slog.Logger] // nil: not used yet
	out      *output                     // nil: nothing

	mu     sync.Mutex              // guards what follows
	over   bool                    // the context has ended
	cause  error                   // of the end; nil: context.Canceled
	ending context.Context         // ends with the taskContext, and has no values; nil: not used yet
	cancel context.CancelCauseFunc // of ending
}

// output is what a handler stores with the completion, in memory that it does not share with the
// handler.
type output struct {
	result    []byte
	resultErr error // why the result cannot be stored
	next      batch
	nextErr   error // why the follow-ups cannot be stored
}

func (o *output) setResult(result []byte, l *Limits) {
	o.result, o.resultErr = nil, checkResult(result, l)
	if o.resultErr == nil {
		o.result = bytes.Clone(result)
	}
}

// followUp adds tasks, which inherit the trace context in trace.
func (o *output) followUp(tasks []Task, trace map[string]string, l *Limits) {
	if o.nextErr != nil {
		return
	}
	tasks = slices.Clone(tasks)
	inheritTrace(tasks, trace, l.Headers)
	o.next.verb = "Complete"
	o.nextErr = o.next.add(tasks, l)
}

// fill moves the output to op. An error says why it can never be stored.
func (o *output) fill(op *completeOp) error {
	if o.resultErr != nil {
		return o.resultErr
	}
	if o.nextErr != nil {
		return o.nextErr
	}
	if err := o.next.finish(); err != nil {
		return err
	}
	op.result, op.next = o.result, append(op.next, o.next.tasks...)
	return nil
}

func (f *taskContext) output() *output {
	if f.out == nil {
		f.out = new(output)
	}
	return f.out
}

// taskContextKey is the key under which a taskContext is its own value.
type taskContextKey struct{}

// Value returns the value in the context of Run. Package context finds the cause of the end, and
// the contexts to cancel, as values under keys of its own.
func (f *taskContext) Value(key any) any {
	if key == (taskContextKey{}) {
		return f
	}
	if v := f.runner.values.Value(key); v != nil {
		return v
	}
	if ctx := f.asked(); ctx != nil {
		return ctx.Value(key)
	}
	return nil
}

// Deadline returns the deadline of the attempt.
func (f *taskContext) Deadline() (time.Time, bool) { return f.deadline, !f.deadline.IsZero() }

// Done returns a channel that is closed when the context ends.
func (f *taskContext) Done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ask().Done()
}

// Err returns nil until the context ends.
func (f *taskContext) Err() error {
	if ctx := f.asked(); ctx != nil {
		return ctx.Err()
	}
	return nil
}

// asked returns ending; nil if the context has not ended and nobody has used ending.
func (f *taskContext) asked() context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over || f.ending == nil && !f.deadline.IsZero() && time.Until(f.deadline) <= 0 {
		return f.ask()
	}
	return f.ending
}

// ask returns ending, and makes it first if there is none. REQUIRES: mu is held.
func (f *taskContext) ask() context.Context {
	if f.ending == nil {
		f.ending, f.cancel = context.WithCancelCause(context.Background())
		if f.over {
			f.cancel(f.cause)
		}
		if !f.deadline.IsZero() {
			var stop context.CancelFunc
			cancel := f.cancel
			f.ending, stop = context.WithDeadline(f.ending, f.deadline)
			f.cancel = func(cause error) {
				cancel(cause)
				stop()
			}
		}
	}
	return f.ending
}

// end ends the context, if it has not ended.
func (f *taskContext) end(cause error) {
	f.mu.Lock()
	if !f.over {
		f.over, f.cause = true, cause
	}
	cancel, cause := f.cancel, f.cause
	f.mu.Unlock()
	if cancel != nil { // a second call does nothing
		cancel(cause)
	}
}

// taskContextOf returns the taskContext whose handler was given ctx; nil: none was.
func taskContextOf(ctx context.Context) *taskContext {
	if ctx == nil {
		return nil
	}
	f, _ := ctx.Value(taskContextKey{}).(*taskContext)
	return f
}

// LeaseFrom returns the task whose handler was given ctx, or a context derived from it; ok is false
// if there is none. The lease must only be read: it belongs to the handler.
func LeaseFrom(ctx context.Context) (l *Lease, ok bool) {
	f := taskContextOf(ctx)
	if f == nil {
		return nil, false
	}
	return &f.lease, true
}

var silence = slog.New(slog.DiscardHandler)

// LoggerFrom returns [Options.Logger] with attributes of the task whose handler was given ctx, or a
// context derived from it: "task" (its ID), "queue", "attempt", and "tenant" if it has one. It is
// made by the first call. Outside of a handler LoggerFrom returns a logger that discards
// everything. LoggerFrom is safe for concurrent use, and the logger works after the handler has
// returned.
func LoggerFrom(ctx context.Context) *slog.Logger {
	f := taskContextOf(ctx)
	if f == nil {
		return silence
	}
	if l := f.logger.Load(); l != nil {
		return l
	}
	l := f.runner.queue.opts.Logger.With(
		"task", f.lease.ID.String(), "queue", f.lease.Queue, "attempt", f.lease.Attempt)
	if f.lease.Tenant != "" {
		l = l.With("tenant", f.lease.Tenant)
	}
	f.logger.Store(l)
	return l
}
