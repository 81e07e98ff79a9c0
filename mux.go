package codeq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"codeq/internal/engine"
)

// Mux maps queues to the handlers that work on their tasks. Fill it before Run
// and leave it alone afterwards; several Runs may share it.
//
// Run claims tasks of queues that have a handler, and no others: those wait
// until a Run has a handler for them. Handle and Use do not return errors; Run
// refuses a Mux that was not filled rightly, with an [InvalidError] for each
// mistake, before it claims anything.
type Mux struct {
	handlers   map[string]handler
	middleware []Middleware
	err        error // what Run returns in place of running
}

// handler works on a task; what it leaves in the frame is stored if it returns
// nil. l is f.lease unless a middleware has replaced it.
type handler func(ctx context.Context, l *Lease, f *taskContext) error

// Handler is the handler of a queue as middleware sees it: Args and all that is
// decoded are inside it.
type Handler func(ctx context.Context, l *Lease) error

// Middleware puts something around handlers. It is called once for each queue
// when Run begins, and the Handler that it returns is called for each task, by
// several goroutines at a time.
//
// That Handler sees by the error of next what becomes of the task: nil, the
// verdicts that Handle lists, the error of a payload that could not be decoded,
// or a [*PanicError] if the handler panicked. What it returns in turn decides. If
// it panics itself, this is an error like the panic of a handler.
//
// It calls next with ctx or a context derived from it, and with l, whose
// Payload and Headers it may replace beforehand for what is inside. It may call
// next not at all, or again: of the results and follow-ups, those of the last
// call are stored, if that call returned nil. It does not return before next
// does.
type Middleware func(next Handler) Handler

// Use puts middleware around the handlers of all queues, whether they were
// registered before or are later. The first is the outermost, over all calls of
// Use.
func (m *Mux) Use(middleware ...Middleware) {
	for i, mw := range middleware {
		if mw == nil {
			m.refuse(&InvalidError{fmt.Sprintf("Use middleware %d", len(m.middleware)+i), "nil", "a function"})
		}
	}
	m.middleware = append(m.middleware, middleware...)
}

// Queues returns the names of the queues that have a handler, in alphabetical order.
func (m *Mux) Queues() []string { return slices.Sorted(maps.Keys(m.handlers)) }

func (m *Mux) refuse(err error) { m.err = errors.Join(m.err, err) }

// compose returns the handlers with the middleware around them.
func (m *Mux) compose() (_ map[string]handler, err error) {
	switch {
	case m != nil && m.err != nil:
		return nil, m.err
	case m == nil || len(m.handlers) == 0:
		return nil, fmt.Errorf("%w: the Mux is empty", ErrNoHandler)
	}
	composed := maps.Clone(m.handlers)
	if len(m.middleware) == 0 {
		return composed, nil
	}
	defer recovered(&err)
	for queue, h := range m.handlers {
		chain := h.last()
		for i, mw := range slices.Backward(m.middleware) {
			if chain = mw(chain); chain == nil {
				return nil, &InvalidError{fmt.Sprintf("Use middleware %d", i), "returned nil", "a Handler"}
			}
		}
		composed[queue] = func(ctx context.Context, l *Lease, _ *taskContext) error { return chain(ctx, l) }
	}
	return composed, nil
}

var errForeignContext = errors.New("codeq: a middleware passed on a context that is not derived from the task's")

// last is the end of a chain of middleware. A panic becomes an error here, so
// that middleware sees it as one.
func (h handler) last() Handler {
	return func(ctx context.Context, l *Lease) (err error) {
		f := taskContextOf(ctx)
		if f == nil {
			return errForeignContext
		}
		f.out = nil
		defer func() {
			if err != nil {
				f.out = nil
			}
		}()
		defer recovered(&err)
		return h(ctx, l, f)
	}
}

// Job is a task in the hands of a handler, made by Handle. Of any other one SetResult and FollowUp
// panic: nobody would store what they are given.
type Job[T any] struct {
	*Lease
	// Args is the decoded payload.
	Args     T
	frame    *taskContext
	encoding *encoding
}

// SetResult has a copy of result kept with the completed task for its retention. It is
// dropped if the handler returns an error.
func (j *Job[T]) SetResult(result []byte) { j.output().setResult(result, j.limits()) }

func (j *Job[T]) limits() *Limits { return &j.frame.runner.queue.opts.Limits }

// output is what the handler wants to have stored. It panics if there is nobody to store it.
func (j *Job[T]) output() *output {
	if !j.isMade() {
		panic(errJobNotMade.Error())
	}
	return j.frame.output()
}

// isMade reports whether Handle has made the job.
func (j *Job[T]) isMade() bool { return j != nil && j.frame != nil }

var errJobNotMade = errors.New("codeq: this Job was not made by Handle")

// SetResultValue is SetResult with v encoded as the payloads of the queue are;
// ResultAs decodes it. If v cannot be encoded the error, returned by the
// handler, makes the task a dead letter.
func (j *Job[T]) SetResultValue(v any) error {
	if !j.isMade() {
		return errJobNotMade
	}
	result, err := j.encoding.encode(v)
	if err != nil {
		return DeadLetter(fmt.Errorf("codeq: result of queue %s from %T: %w", j.Queue, v, err))
	}
	j.SetResult(result)
	return nil
}

// FollowUp has tasks produced in the same commit that completes this one. It copies them. They
// are dropped if the handler returns an error.
//
// A follow-up that has neither a traceparent nor a tracestate header gets both
// of this task, so that a W3C trace context goes on, unless its headers would
// then exceed [Limits.Headers]. It gets no other header.
func (j *Job[T]) FollowUp(tasks ...Task) {
	j.output().followUp(tasks, j.Headers, j.limits())
}

// Handle registers the handler of a queue. The payload is decoded into Args, by
// JSON unless options say otherwise, except that for T = []byte Args is the
// payload itself, and that an empty payload leaves Args zero. A payload that
// cannot be decoded makes the task a dead letter.
//
// The handler says by its result what becomes of the task:
//
//	nil                  completed
//	Snooze(d)            given back for d; the attempt does not count
//	RetryAfter(d, err)   tried again after d
//	DeadLetter(err)      a dead letter at once
//	any other error      tried again by Options.Backoff
//
// A panic is an error, a [*PanicError] with the stack in it. So is a nil pointer that is
// returned as an error, whatever its method Error does. A result or follow-up
// tasks that exceed the limits make the task a dead letter.
//
// The handler's context knows the task: see LeaseFrom and LoggerFrom. It has the
// values of the context of Run, and if the task has a Timeout its deadline.
//
// A queue has one handler: of a second one, as of a nil one, Run tells by an
// [InvalidError].
func Handle[T any](m *Mux, queue string, h func(context.Context, *Job[T]) error, opts ...PayloadOption) {
	if _, ok := m.handlers[queue]; ok {
		m.refuse(&InvalidError{"Handle queue", strconv.Quote(queue), "one handler for each queue"})
	}
	if h == nil {
		m.refuse(&InvalidError{"Handle handler of queue " + strconv.Quote(queue), "nil", "a function"})
	}
	enc, err := encodingOf(opts)
	if err != nil {
		m.refuse(fmt.Errorf("handler of queue %q: %w", queue, err))
	}
	if m.handlers == nil {
		m.handlers = make(map[string]handler)
	}
	m.handlers[queue] = func(ctx context.Context, l *Lease, f *taskContext) error {
		job := &Job[T]{Lease: l, frame: f, encoding: enc}
		if err := enc.decode(l.Payload, &job.Args); err != nil {
			return DeadLetter(fmt.Errorf("codeq: payload of queue %s into %T: %w", queue, job.Args, err))
		}
		return h(ctx, job)
	}
}

// verdict is an error by which a handler says what becomes of its task.
type verdict struct {
	how   engine.Failure
	after time.Duration
	err   error
}

func (v *verdict) Error() string {
	switch {
	case v.err != nil:
		return errorText(v.err)
	case v.how == engine.FailRelease:
		return fmt.Sprintf("codeq: snoozed for %v", v.after)
	default:
		return "codeq: given up by the handler"
	}
}

func (v *verdict) Unwrap() error { return v.err }

// Snooze is returned by a handler to have its task back after d. The attempt
// does not count.
func Snooze(d time.Duration) error { return &verdict{how: engine.FailRelease, after: max(d, 0)} }

// RetryAfter is returned by a handler to have its task tried again after d,
// whatever the backoff. The attempt counts; out of attempts, the task becomes
// a dead letter.
func RetryAfter(d time.Duration, err error) error {
	return &verdict{how: engine.FailRetry, after: max(d, 0), err: err}
}

// DeadLetter is returned by a handler to give its task up.
func DeadLetter(err error) error { return &verdict{how: engine.FailDead, err: err} }

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

// recovered, deferred, turns a panic into an error.
func recovered(err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{Value: v, Stack: debug.Stack()}
	}
}

// failOpOf translates what a handler returned.
func failOpOf(err error) failOp {
	v := verdictOf(err)
	if v == nil {
		return failOp{how: engine.FailRetry, wait: -1, cause: errorText(err)}
	}
	op := failOp{how: v.how, wait: int64(millis(v.after))}
	if v.err != nil {
		op.cause = errorText(err) // with what is wrapped around the verdict
	}
	return op
}

// verdictOf is the verdict in a handler's error; nil if there is none. The methods As and
// Unwrap of the error may panic.
func verdictOf(err error) (v *verdict) {
	defer func() {
		if recover() != nil {
			v = nil
		}
	}()
	errors.As(err, &v)
	return v
}

// errorText is the text of a caller's error. Its method Error may panic, as those of most
// types do when the error is a nil pointer.
func errorText(err error) (text string) {
	defer func() {
		if v := recover(); v != nil {
			text = fmt.Sprintf("error of type %T, whose method Error panics: %v", err, v)
		}
	}()
	return err.Error()
}
