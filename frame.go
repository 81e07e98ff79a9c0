package codeq

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// frame is what a worker has of a running task. It is the innermost parent of
// the handler's context, and answers for the values of the context of Run: so a
// context that knows its task costs no memory of its own.
type frame struct {
	runner *runner
	lease  Lease
	logger atomic.Pointer[slog.Logger] // nil: nobody has asked for it
	out    *output                     // nil: nothing
}

// output is what a handler wants to have stored with the completion.
type output struct {
	result []byte
	next   []Task
}

func (f *frame) output() *output {
	if f.out == nil {
		f.out = new(output)
	}
	return f.out
}

// frameKey is the key under which a frame finds itself.
type frameKey struct{}

// Value is that of the context of Run.
func (f *frame) Value(key any) any {
	if key == (frameKey{}) {
		return f
	}
	return f.runner.values.Value(key)
}

// A frame does not end; the context that is made of it does.

func (f *frame) Deadline() (time.Time, bool) { return time.Time{}, false }
func (f *frame) Done() <-chan struct{}       { return nil }
func (f *frame) Err() error                  { return nil }

// frameOf returns the frame whose handler was given ctx; nil: none was.
func frameOf(ctx context.Context) *frame {
	f, _ := ctx.Value(frameKey{}).(*frame)
	return f
}

// LeaseFrom returns the task whose handler was given ctx, or a context derived
// from it; ok is false if there is none. The lease is for reading: it belongs
// to the handler.
func LeaseFrom(ctx context.Context) (l *Lease, ok bool) {
	f := frameOf(ctx)
	if f == nil {
		return nil, false
	}
	return &f.lease, true
}

var silence = slog.New(slog.DiscardHandler)

// Logger returns Options.Logger with attributes of the task whose handler was
// given ctx, or a context derived from it: "task" (its ID), "queue", "attempt",
// and "tenant" if it has one. It is made when it is first asked for. Outside of
// a handler Logger returns a logger that is silent. It is safe for concurrent
// use, and of use after the handler has returned.
func Logger(ctx context.Context) *slog.Logger {
	f := frameOf(ctx)
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
