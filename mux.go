package codeq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/record"
)

// Mux maps queues to the handlers that work on their tasks. Fill it before [Queue.Run] and do not
// change it afterwards; several Runs may share it.
//
// Run claims only tasks of queues that have a handler; others wait until a Run has a handler for
// them. [Handle] and Use do not return errors; Run refuses an invalid Mux, with an [InvalidError]
// for each mistake, before it claims anything.
type Mux struct {
	handlers   map[string]handler
	batches    map[string]*batchHandler // of those of handlers that HandleBatch has registered
	middleware []Middleware
	err        error // if not nil, Run returns it and claims nothing
}

// handler works on a task; the output in f is stored if the handler returns nil. l is f.lease
// unless a middleware has replaced it.
type handler func(ctx context.Context, l *Lease, f *taskContext) error

// Handler is the handler of a queue as middleware sees it: the payload is decoded inside it.
type Handler func(ctx context.Context, l *Lease) error

// Middleware wraps handlers. It is called once for each queue when [Queue.Run] begins, and the
// [Handler] that it returns is called for each task, by several goroutines at a time.
//
// The error that next returns is the handler's verdict on the task: nil, the verdicts that [Handle]
// lists, the error of a payload that could not be decoded, or a [*PanicError] if the handler
// panicked. The error that the outermost Handler returns decides. If a Handler of a Middleware
// panics, this is an error like the panic of a handler.
//
// The Handler calls next with ctx or a context derived from it, and with l; it may replace
// l.Payload and l.Headers before the call. It may skip next, or call it again: the result and
// follow-ups of the last call are stored, if that call returned nil. It must not return before next
// does.
type Middleware func(next Handler) Handler

// Use wraps the handlers of all queues in middleware, whether they are registered before or after
// Use. The first middleware of the first call of Use is the outermost.
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

// compose returns the handlers, wrapped in the middleware.
func (m *Mux) compose() (_ map[string]handler, err error) {
	switch {
	case m != nil && m.err != nil:
		return nil, m.err
	case m == nil || len(m.handlers) == 0:
		return nil, fmt.Errorf("%w: the Mux is empty: register some by Handle", ErrNoHandler)
	}
	composed := maps.Clone(m.handlers)
	if len(m.middleware) == 0 {
		return composed, nil
	}
	for queue := range m.batches {
		return nil, &InvalidError{"Use", "beside HandleBatch of queue " + strconv.Quote(queue), "a Mux of its own for batches, which middleware cannot wrap"}
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

// last returns the innermost Handler of a chain of middleware. It makes an error of a panic, so
// that middleware sees the error.
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

// Job is the task on which a handler works. [Handle] and [HandleBatch] make it; SetResult and
// FollowUp panic for any other Job, since nothing would store their arguments.
type Job[T any] struct {
	*Lease
	// Args is the decoded payload.
	Args     T
	taskCtx  *taskContext
	encoding *encoding
}

// SetResult keeps a copy of result with the completed task for its retention. The copy is dropped
// if the handler returns an error.
func (j *Job[T]) SetResult(result []byte) { j.output().setResult(result, j.limits()) }

func (j *Job[T]) limits() *Limits { return &j.taskCtx.runner.queue.opts.Limits }

// output returns the output of the handler. It panics if Handle has not made the job.
func (j *Job[T]) output() *output {
	if !j.isMade() {
		panic(errJobNotMade.Error())
	}
	return j.taskCtx.output()
}

// isMade reports whether Handle has made the job.
func (j *Job[T]) isMade() bool { return j != nil && j.taskCtx != nil }

var errJobNotMade = errors.New("codeq: this Job was not made by Handle")

// SetResultValue calls SetResult with v, encoded like the payloads of the queue; [ResultAs] decodes
// it. If v cannot be encoded, it returns an error that makes the task a dead letter when the
// handler returns it.
//
// Errors: that of the codec.
func (j *Job[T]) SetResultValue(v any) error {
	if !j.isMade() {
		return errJobNotMade
	}
	result, err := j.encoding.encode(v)
	if err != nil {
		return DeadLetter(base.Prefixed(fmt.Errorf("result of queue %s from %T: %w", j.Queue, v, err)))
	}
	j.SetResult(result)
	return nil
}

// FollowUp produces tasks in the same commit that completes this one. It copies them. They are
// dropped if the handler returns an error.
//
// A follow-up that has neither a traceparent nor a tracestate header inherits both from this task,
// so that a W3C trace context continues, unless its headers would then exceed [Limits.Headers]. It
// inherits no other header.
func (j *Job[T]) FollowUp(tasks ...Task) {
	j.output().followUp(tasks, j.Headers, j.limits())
}

// Handle registers the handler of a queue. The payload is decoded into Args, by JSON unless options
// set another codec. For T = []byte Args is the payload itself, and an empty payload leaves Args
// zero. A payload that cannot be decoded makes the task a dead letter.
//
// The result of the handler decides what happens to the task:
//
//	nil                  completed
//	Snooze(d)            given back for d; the attempt does not count
//	RetryAfter(d, err)   tried again after d
//	DeadLetter(err)      a dead letter at once
//	any other error      tried again by Options.Backoff
//
// A panic counts as an error, a [*PanicError] that contains the stack. A nil pointer that is
// returned as an error counts as an error too, whatever its method Error does. A result or
// follow-up tasks that exceed the limits make the task a dead letter.
//
// [LeaseFrom] and [LoggerFrom] get the task from the handler's context. The context has the values
// of the context of [Queue.Run], and a deadline if the task has a Timeout.
//
// A queue has one handler: Run returns an [InvalidError] for a second one, and for a nil one.
// [HandleBatch] registers one for many tasks at once.
func Handle[T any](m *Mux, queue string, h func(context.Context, *Job[T]) error, opts ...PayloadOption) {
	enc := m.check("Handle", queue, h == nil, opts)
	m.handlers[queue] = func(ctx context.Context, l *Lease, f *taskContext) error {
		job := &Job[T]{Lease: l, taskCtx: f, encoding: enc}
		if err := job.decode(); err != nil {
			return err
		}
		return h(ctx, job)
	}
}

// check refuses the arguments of a registration that are invalid.
func (m *Mux) check(verb, queue string, isNil bool, opts []PayloadOption) *encoding {
	if _, ok := m.handlers[queue]; ok {
		m.refuse(&InvalidError{verb + " queue", strconv.Quote(queue), "one handler for each queue"})
	}
	if isNil {
		m.refuse(&InvalidError{verb + " handler of queue " + strconv.Quote(queue), "nil", "a function"})
	}
	enc, err := encodingOf(opts)
	if err != nil {
		m.refuse(fmt.Errorf("handler of queue %q: %w", queue, err))
	}
	if m.handlers == nil {
		m.handlers = make(map[string]handler)
	}
	return enc
}

// decode decodes the payload.
func (j *Job[T]) decode() error {
	if err := j.encoding.decode(j.Payload, &j.Args); err != nil {
		return DeadLetter(base.Prefixed(fmt.Errorf("payload of queue %s into %T: %w", j.Queue, j.Args, err)))
	}
	return nil
}

// Codec encodes the values of producers and handlers as the bytes that tasks carry, and decodes
// them. Several goroutines call its methods at the same time.
type Codec interface {
	// Marshal returns bytes that no other code writes to.
	Marshal(v any) ([]byte, error)
	// Unmarshal decodes data into *v. It may keep data.
	Unmarshal(data []byte, v any) error
}

// JSON is the default codec, which uses encoding/json. As there, a number that is decoded into an
// any, also within a map[string]any or []any, becomes a float64, which rounds integers beyond 2^53.
// Fields of an integer type, json.Number or json.RawMessage keep them.
type JSON struct{}

// Marshal calls [json.Marshal].
func (JSON) Marshal(v any) ([]byte, error) { return json.Marshal(v) }

// Unmarshal calls [json.Unmarshal].
func (JSON) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

// PayloadOption sets how the payloads and results of a queue are encoded. [Handle], [NewTask] and
// [ResultAs] need the same options for the same queue.
type PayloadOption func(*encoding)

// WithCodec sets the codec. Default: [JSON].
//
// It is an option of each queue and not of the [Mux], because the producers and the handler of one
// queue agree on the encoding: queues of one program may differ in it, and change it one at a time.
func WithCodec(c Codec) PayloadOption { return func(e *encoding) { e.codec = c } }

// encoding is the result of PayloadOptions. With every codec []byte is encoded as itself, and no
// bytes are decoded as the zero value.
type encoding struct{ codec Codec }

// encodingOf refuses an encoding without a codec with an InvalidError.
func encodingOf(opts []PayloadOption) (*encoding, error) {
	e := &encoding{codec: JSON{}}
	for _, opt := range opts {
		if opt == nil {
			return nil, &InvalidError{"PayloadOption", "nil", "an option"}
		}
		opt(e)
	}
	if e.codec == nil {
		return nil, &InvalidError{"WithCodec codec", "nil", "a Codec"}
	}
	return e, nil
}

// encode returns v itself if it is a []byte.
func (e *encoding) encode(v any) ([]byte, error) {
	if raw, ok := v.([]byte); ok {
		return raw, nil
	}
	return e.codec.Marshal(v)
}

// decode decodes into *v. REQUIRES: *v is zero.
func (e *encoding) decode(data []byte, v any) error {
	if raw, ok := v.(*[]byte); ok {
		*raw = data
		return nil
	}
	if len(data) == 0 {
		return nil
	}
	return e.codec.Unmarshal(data, v)
}

// NewTask returns a task with args as its payload, encoded as [Handle] decodes it: by JSON unless
// options set another codec; a []byte is copied as it is. The caller sets the other fields of the
// task.
//
// Errors: that of the codec, and [ErrInvalid] if an option is nil.
func NewTask[T any](queue string, args T, opts ...PayloadOption) (_ Task, err error) {
	defer public(&err)
	e, err := encodingOf(opts)
	if err != nil {
		return Task{}, err
	}
	payload, err := e.encode(args)
	if err != nil {
		return Task{}, fmt.Errorf("codeq: payload of queue %s from %T: %w", queue, args, err)
	}
	if _, ok := any(args).([]byte); ok {
		payload = bytes.Clone(payload)
	}
	return Task{Queue: queue, Payload: payload}, nil
}

// ResultAs returns the result of a completed task, decoded as [Handle] decodes payloads; the result
// of a task that was completed without one is the zero T.
//
// Errors: that of the codec, and [ErrInvalid] if the task is not [Done] or an option is nil.
func ResultAs[T any](t *TaskInfo, opts ...PayloadOption) (_ T, err error) {
	defer public(&err)
	var result T
	e, err := encodingOf(opts)
	if err != nil {
		return result, err
	}
	if t.State != Done {
		return result, &InvalidError{"TaskInfo.State", t.State, Done.String()}
	}
	if err := e.decode(t.Result, &result); err != nil {
		return result, fmt.Errorf("codeq: result of queue %s into %T: %w", t.Queue, result, err)
	}
	return result, nil
}

// verdict is an error by which a handler decides about its task.
type verdict struct {
	how   engine.Failure
	after time.Duration
	err   error
}

func (v *verdict) Error() string {
	switch {
	case v.err != nil:
		return guard.ErrorText(v.err)
	case v.how == engine.FailRelease:
		return fmt.Sprintf("codeq: snoozed for %v", v.after)
	default:
		return "codeq: given up by the handler"
	}
}

func (v *verdict) Unwrap() error { return v.err }

// Snooze returns an error for handlers that give their task back for d; then the task is ready
// again. The attempt does not count.
func Snooze(d time.Duration) error { return &verdict{how: engine.FailRelease, after: max(d, 0)} }

// RetryAfter returns an error for handlers that ask for another attempt after d, in place of the
// backoff. The attempt counts; out of attempts, the task becomes a dead letter.
func RetryAfter(d time.Duration, err error) error {
	return &verdict{how: engine.FailRetry, after: max(d, 0), err: err}
}

// DeadLetter returns an error for handlers that make their task a dead letter.
func DeadLetter(err error) error { return &verdict{how: engine.FailDead, err: err} }

// PanicError is the error of a handler that panicked.
type PanicError struct {
	Value any    // the argument of panic
	Stack []byte // of the handler's goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.Value, e.Stack) }

// Unwrap returns the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// recovered is deferred, and turns a panic into an error.
func recovered(err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{Value: v, Stack: debug.Stack()}
	}
}

// failure is the error of a handler, and what its methods say.
type failure struct {
	err     error
	op      failOp
	verdict Verdict
}

// failureOf calls the methods of a handler's error, which may end the goroutine.
func failureOf(err error) *failure {
	f := &failure{err, failOp{Fail: call.Fail{How: engine.FailRetry, Wait: -1}}, VerdictOf(err)}
	v := verdictOf(err)
	if v != nil {
		f.op.How, f.op.Wait = v.how, int64(record.Millis(v.after))
	}
	if v == nil || v.err != nil {
		f.op.Cause = guard.ErrorText(err) // with the text of errors that wrap the verdict
	}
	return f
}

// verdictOf returns the verdict in a handler's error; nil if there is none. The methods As and
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

// Verdict is the meaning of a handler's end to [Queue.Run].
type Verdict uint8

// The verdicts.
const (
	VerdictCompleted  Verdict = iota + 1 // the task is completed
	VerdictRetry                         // the attempt has failed: tried again by Options.Backoff
	VerdictRetryAfter                    // the attempt has failed: tried again after a time that the handler has set
	VerdictReleased                      // given back; the attempt does not count
	VerdictDeadLetter                    // a dead letter at once, even if attempts are left
	VerdictCanceled                      // the task was canceled: nothing is stored
	VerdictLeaseLost                     // the lease was lost: nothing is stored
	VerdictSuspended                     // waits between two steps; the attempt does not count
)

var verdicts = newEnum[Verdict]("Verdict",
	"", "completed", "retry", "retry-after", "released", "dead-letter", "canceled", "lease-lost", "suspended",
)

// String returns the verdict in lower case, such as "retry-after".
func (v Verdict) String() string { return verdicts.Text(v) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (v Verdict) MarshalText() ([]byte, error) { return verdicts.Marshal(v) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (v *Verdict) UnmarshalText(b []byte) error { return verdicts.Unmarshal(v, b) }

// VerdictOf returns the meaning of a handler's error to [Queue.Run], so that a [Middleware] can
// tell a failure from a wish of the handler:
//
//	nil                       VerdictCompleted
//	Snooze(d)                 VerdictReleased
//	RetryAfter(d, err)        VerdictRetryAfter
//	DeadLetter(err)           VerdictDeadLetter
//	matches ErrCanceled       VerdictCanceled
//	matches ErrLeaseLost      VerdictLeaseLost
//	matches ErrSuspended      VerdictSuspended
//	any other error           VerdictRetry
//
// Errors that wrap one of these have the same verdict. The first rule that applies counts.
//
// If the task has no attempts left, [VerdictRetry] and [VerdictRetryAfter] make it a dead letter.
// If the result or follow-ups exceed the limits, so does [VerdictCompleted]. The end of the
// handler's context is not in err unless the handler returns it: VerdictOf(context.Cause(ctx))
// tells whether the task was canceled or its lease lost meanwhile; then the handler's error has no
// effect. A handler that uses receipts of other tasks may return an error that matches
// [ErrCanceled] or [ErrLeaseLost] because of them; its own task is tried again.
func VerdictOf(err error) Verdict {
	if err == nil {
		return VerdictCompleted
	}
	v := verdictOf(err)
	switch {
	case v == nil && guard.Is(err, ErrCanceled):
		return VerdictCanceled
	case v == nil && guard.Is(err, ErrLeaseLost):
		return VerdictLeaseLost
	case v == nil && guard.Is(err, ErrSuspended):
		return VerdictSuspended
	case v == nil:
		return VerdictRetry
	case v.how == engine.FailRelease:
		return VerdictReleased
	case v.how == engine.FailDead:
		return VerdictDeadLetter
	}
	return VerdictRetryAfter
}

// verdictOn is the verdict on a handler that has ended, failed or not. ours is whether Run still
// had its task, or else why it was lost; nil: Run has given it back.
func verdictOn(ours bool, lost error, failed *failure) Verdict {
	switch {
	case ours && failed == nil:
		return VerdictCompleted
	case ours:
		return failed.verdict
	case lost == nil:
		return VerdictReleased
	case errors.Is(lost, ErrCanceled):
		return VerdictCanceled
	}
	return VerdictLeaseLost
}
