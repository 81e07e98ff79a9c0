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

// taskContext is what a worker has of a running task. It is the handler's context, or the parent of
// it, with the values of the context of Run. Many handlers are done before anybody asks when their
// context ends: what tells that is made when somebody does.
type taskContext struct {
	runner   *runner
	lease    Lease
	deadline time.Time                   // of the attempt, by the task's Timeout; zero: none
	logger   atomic.Pointer[slog.Logger] // nil: nobody has asked for it
	out      *output                     // nil: nothing

	mu     sync.Mutex              // guards what follows
	over   bool                    // the context has ended
	cause  error                   // of that; nil: context.Canceled
	ending context.Context         // ends with the frame, and has nothing else; nil: nobody has asked for it
	cancel context.CancelCauseFunc // of ending
}

// output is what a handler wants to have stored with the completion, in memory that the handler
// does not have.
type output struct {
	result    []byte
	resultErr error // why the result cannot be stored
	next      batch
	nextErr   error // why the follow-ups cannot
}

func (o *output) setResult(result []byte, l *Limits) {
	o.result, o.resultErr = nil, checkResult(result, l)
	if o.resultErr == nil {
		o.result = bytes.Clone(result)
	}
}

// followUp adds tasks, which inherit the trace context of trace.
func (o *output) followUp(tasks []Task, trace map[string]string, l *Limits) {
	if o.nextErr != nil {
		return
	}
	tasks = slices.Clone(tasks)
	inheritTrace(tasks, trace, l.Headers)
	o.next.verb = "Complete"
	o.nextErr = o.next.add(tasks, l)
}

// fill has op store the output. An error is why it never can.
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

// frameKey is the key under which a frame finds itself.
type frameKey struct{}

// Value is that of the context of Run. Package context finds the cause of the end, and whom to tell
// of it, as a value under a key of its own.
func (f *taskContext) Value(key any) any {
	if key == (frameKey{}) {
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

// Deadline is that of the attempt.
func (f *taskContext) Deadline() (time.Time, bool) { return f.deadline, !f.deadline.IsZero() }

// Done is closed when the frame ends.
func (f *taskContext) Done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ask().Done()
}

// Err is nil until the frame ends.
func (f *taskContext) Err() error {
	if ctx := f.asked(); ctx != nil {
		return ctx.Err()
	}
	return nil
}

// asked is what tells of the frame's end; nil if it has not ended, and nobody has asked when it
// will.
func (f *taskContext) asked() context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over || f.ending == nil && !f.deadline.IsZero() && time.Until(f.deadline) <= 0 {
		return f.ask()
	}
	return f.ending
}

// ask makes what tells of the frame's end. REQUIRES: mu is held.
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
	if cancel != nil { // a second time it does nothing
		cancel(cause)
	}
}

// taskContextOf returns the frame whose handler was given ctx; nil: none was.
func taskContextOf(ctx context.Context) *taskContext {
	if ctx == nil {
		return nil
	}
	f, _ := ctx.Value(frameKey{}).(*taskContext)
	return f
}

// LeaseFrom returns the task whose handler was given ctx, or a context derived from it; ok is false
// if there is none. The lease is for reading: it belongs to the handler.
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
// made when it is first asked for. Outside of a handler LoggerFrom returns a logger that is silent.
// It is safe for concurrent use, and of use after the handler has returned.
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
