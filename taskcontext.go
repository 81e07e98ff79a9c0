package codeq

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"

	"codeq/internal/headers"
	"codeq/internal/workers"
)

// taskContext is the running task of a worker. It is the handler's context, or the parent of it,
// with the values of the context of Run.
type taskContext struct {
	workers.Context
	runner *runner
	lease  Lease
	logger atomic.Pointer[slog.Logger] // nil: not used yet
	out    *output                     // nil: nothing
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
	for i := range tasks {
		tasks[i].Headers = headers.InheritTrace(tasks[i].Headers, trace, l.Headers)
	}
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

func (c *taskContext) output() *output {
	if c.out == nil {
		c.out = new(output)
	}
	return c.out
}

// taskContextKey is the key under which a taskContext is its own value.
type taskContextKey struct{}

// Value returns the value in the context of Run.
func (c *taskContext) Value(key any) any {
	if key == (taskContextKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// taskContextOf returns the taskContext whose handler was given ctx; nil: none was.
func taskContextOf(ctx context.Context) *taskContext {
	if ctx == nil {
		return nil
	}
	c, _ := ctx.Value(taskContextKey{}).(*taskContext)
	return c
}

// LeaseFrom returns the task whose handler was given ctx, or a context derived from it; ok is false
// if there is none. The lease must only be read: it belongs to the handler.
func LeaseFrom(ctx context.Context) (l *Lease, ok bool) {
	c := taskContextOf(ctx)
	if c == nil {
		return nil, false
	}
	return &c.lease, true
}

var silence = slog.New(slog.DiscardHandler)

// LoggerFrom returns [Options.Logger] with attributes of the task whose handler was given ctx, or a
// context derived from it: "task" (its ID), "queue", "attempt", and "tenant" if it has one. It is
// made by the first call. Outside of a handler LoggerFrom returns a logger that discards
// everything. LoggerFrom is safe for concurrent use, and the logger works after the handler has
// returned.
func LoggerFrom(ctx context.Context) *slog.Logger {
	c := taskContextOf(ctx)
	if c == nil {
		return silence
	}
	if l := c.logger.Load(); l != nil {
		return l
	}
	l := c.runner.queue.opts.Logger.With(
		"task", c.lease.ID.String(), "queue", c.lease.Queue, "attempt", c.lease.Attempt)
	if c.lease.Tenant != "" {
		l = l.With("tenant", c.lease.Tenant)
	}
	c.logger.Store(l)
	return l
}
