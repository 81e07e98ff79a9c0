package codeq

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Mux maps queues to the handlers that work on their tasks. Fill it before Run
// and leave it alone afterwards.
type Mux struct {
	handlers map[string]handler
}

// handler works on a task; what it leaves in the frame is stored if it returns nil.
type handler func(ctx context.Context, f *frame) error

// frame is what a worker has of a running task.
type frame struct {
	lease Lease
	out   *output // nil: nothing
}

// output is what a handler wants to have stored with the completion.
type output struct {
	result []byte
	next   []Task
}

// Job is a task in the hands of a handler.
type Job[T any] struct {
	*Lease
	// Args is the decoded payload.
	Args  T
	frame *frame
}

// SetResult has result kept with the completed task for its retention. It is
// dropped if the handler returns an error.
func (j *Job[T]) SetResult(result []byte) { j.frame.output().result = result }

// FollowUp has tasks produced in the same commit that completes this one. They
// are dropped if the handler returns an error.
func (j *Job[T]) FollowUp(tasks ...Task) {
	out := j.frame.output()
	out.next = append(out.next, tasks...)
}

func (f *frame) output() *output {
	if f.out == nil {
		f.out = new(output)
	}
	return f.out
}

// Handle registers the handler of a queue. The payload is decoded from JSON
// into Args, except that for T = []byte Args is the payload itself, and that an
// empty payload leaves Args zero. A payload that cannot be decoded makes the
// task a dead letter.
//
// The handler says by its result what becomes of the task:
//
//	nil                  completed
//	Snooze(d)            given back for d; the attempt does not count
//	RetryAfter(d, err)   tried again after d
//	DeadLetter(err)      a dead letter at once
//	any other error      tried again by Options.Backoff
//
// A panic is an error with the stack in it. A result or follow-up tasks that
// exceed the limits make the task a dead letter. Handle panics if the queue has a
// handler already.
func Handle[T any](m *Mux, queue string, h func(context.Context, *Job[T]) error) {
	if _, ok := m.handlers[queue]; ok {
		panic(fmt.Sprintf("codeq: a second handler for queue %q", queue))
	}
	if m.handlers == nil {
		m.handlers = make(map[string]handler)
	}
	m.handlers[queue] = func(ctx context.Context, f *frame) error {
		job := &Job[T]{Lease: &f.lease, frame: f}
		if raw, ok := any(&job.Args).(*[]byte); ok {
			*raw = f.lease.Payload
		} else if len(f.lease.Payload) == 0 {
			// Args is zero.
		} else if err := json.Unmarshal(f.lease.Payload, &job.Args); err != nil {
			return DeadLetter(fmt.Errorf("codeq: payload of queue %s into %T: %w", queue, job.Args, err))
		}
		return h(ctx, job)
	}
}

func (m *Mux) queues() []string { return slices.Sorted(maps.Keys(m.handlers)) }

// verdict is an error by which a handler says what becomes of its task.
type verdict struct {
	how   failure
	after time.Duration
	err   error
}

func (v *verdict) Error() string {
	switch {
	case v.err != nil:
		return v.err.Error()
	case v.how == failRelease:
		return fmt.Sprintf("codeq: snoozed for %v", v.after)
	default:
		return "codeq: given up by the handler"
	}
}

func (v *verdict) Unwrap() error { return v.err }

// Snooze is returned by a handler to have its task back after d. The attempt
// does not count.
func Snooze(d time.Duration) error { return &verdict{how: failRelease, after: max(d, 0)} }

// RetryAfter is returned by a handler to have its task tried again after d,
// whatever the backoff. The attempt counts; out of attempts, the task becomes
// a dead letter.
func RetryAfter(d time.Duration, err error) error {
	return &verdict{how: failRetry, after: max(d, 0), err: err}
}

// DeadLetter is returned by a handler to give its task up.
func DeadLetter(err error) error { return &verdict{how: failDead, err: err} }

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any    // what was passed to panic
	Stack []byte // of the handler's goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.Value, e.Stack) }

// Unwrap returns the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// failOpOf translates what a handler returned.
func failOpOf(err error) failOp {
	var v *verdict
	if !errors.As(err, &v) {
		return failOp{how: failRetry, wait: -1, cause: err.Error()}
	}
	op := failOp{how: v.how, wait: int64(millis(v.after))}
	if v.err != nil {
		op.cause = err.Error() // with what is wrapped around the verdict
	}
	return op
}
