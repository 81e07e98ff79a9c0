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
// change it afterwards; several Runs may share it. Run claims only tasks of queues that have a
// handler. It refuses an invalid Mux, with an [InvalidError] for each mistake, before it claims.
type Mux struct {
	handlers   map[string]handler       // by queue
	kinds      map[taskKind]handler     // those of HandleKind
	batches    map[string]*batchHandler // of those of handlers that HandleBatch has registered
	policies   map[taskKind]*record.Policy
	middleware []Middleware
	err        error // if not nil, Run returns it and claims nothing
}

// handler works on a task; f's output is stored if it returns nil. l: f.lease, or a middleware's.
type handler func(ctx context.Context, l *Lease, f *taskContext) error

// Handler is the handler of a queue as middleware sees it: the payload is decoded inside it.
type Handler func(ctx context.Context, l *Lease) error

// Middleware wraps handlers. It is called once for each handler when [Queue.Run] begins, and the
// [Handler] that it returns is called for each task, by several goroutines at a time.
//
// The error of next is the handler's verdict on the task: nil, those that [Handle] lists, that of a
// payload that could not be decoded, or a [*PanicError]. The error of the outermost Handler
// decides; a panic of a Handler of a Middleware is an error as well.
//
// The Handler calls next with ctx or a context derived from it, and with l; it may replace
// l.Payload and l.Headers before. It may skip next, or call it again: the result and follow-ups of
// the last call are stored, if that returned nil. It must not return before next does.
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
func (m *Mux) Queues() []string {
	names := slices.Collect(maps.Keys(m.handlers))
	for k := range m.kinds {
		names = append(names, k.queue)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (m *Mux) refuse(err error) { m.err = errors.Join(m.err, err) }

// compose returns the handlers in their middleware: one for each queue, and those of kinds.
func (m *Mux) compose() (byQueue map[string]handler, kinds map[taskKind]handler, err error) {
	switch {
	case m != nil && m.err != nil:
		return nil, nil, m.err
	case m == nil || len(m.handlers)+len(m.kinds) == 0:
		return nil, nil, fmt.Errorf("%w: the Mux is empty: register some by Handle", ErrNoHandler)
	}
	if len(m.middleware) > 0 {
		for queue := range m.batches {
			return nil, nil, &InvalidError{"Use", "beside HandleBatch of queue " + strconv.Quote(queue), "a Mux of its own for batches, which middleware cannot wrap"}
		}
	}
	defer recovered(&err)
	if byQueue, err = composeAll(m.handlers, m.middleware); err == nil {
		kinds, err = composeAll(m.kinds, m.middleware)
	}
	for k := range kinds {
		if byQueue[k.queue] == nil {
			byQueue[k.queue] = func(_ context.Context, l *Lease, f *taskContext) error { return f.runner.unhandled(l) }
		}
	}
	return byQueue, kinds, err
}

// composeAll returns handlers, wrapped in middleware.
func composeAll[K comparable](handlers map[K]handler, middleware []Middleware) (map[K]handler, error) {
	composed := make(map[K]handler, len(handlers))
	for k, h := range handlers {
		if composed[k] = h; len(middleware) == 0 {
			continue
		}
		chain := h.last()
		for i, mw := range slices.Backward(middleware) {
			if chain = mw(chain); chain == nil {
				return nil, &InvalidError{fmt.Sprintf("Use middleware %d", i), "returned nil", "a Handler"}
			}
		}
		composed[k] = func(ctx context.Context, l *Lease, _ *taskContext) error { return chain(ctx, l) }
	}
	return composed, nil
}

var errForeignContext = errors.New("codeq: a middleware passed on a context that is not derived from the task's")

// last returns the innermost Handler of a chain of middleware, with an error in place of a panic.
func (h handler) last() Handler {
	return func(ctx context.Context, l *Lease) (err error) {
		f := taskContextOf(ctx)
		if f == nil {
			return errForeignContext
		}
		f.dropOutput()
		defer func() {
			if err != nil {
				f.dropOutput()
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

// SetResult keeps a copy of result with the completed task, for its retention; not after an error.
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
// it. If the handler returns its error, the task becomes a dead letter.
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

// FollowUp produces copies of tasks in the commit that completes this one; not after an error. One
// that has neither a traceparent nor a tracestate header inherits both from this task (W3C trace
// context), unless its headers would then exceed [Limits.Headers]. It inherits no other header.
func (j *Job[T]) FollowUp(tasks ...Task) {
	j.output().followUp(j.taskCtx, tasks, j.Headers)
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
//	any other error      tried again by Policy.Backoff
//
// A panic is an error, a [*PanicError] with the stack; so is a nil pointer that is returned as an
// error. A result or follow-ups that exceed the limits make the task a dead letter.
//
// The handler's context has the values of that of [Queue.Run], its task ([LeaseFrom],
// [LoggerFrom]), and a deadline if the task has a Timeout. It gets the tasks without a [Task.Kind];
// [HandleKind] registers handlers of others, and [HandleBatch] one for many tasks at once. A queue
// has one handler, and one for each kind: Run returns an [InvalidError] for a second or nil one.
func Handle[T any](m *Mux, queue string, h func(context.Context, *Job[T]) error, opts ...HandlerOption) {
	enc := m.check("Handle", queue, h == nil, opts)
	m.handlers[queue] = handlerOf(enc, h)
}

// handlerOf returns the handler that decodes the payload for h.
func handlerOf[T any](enc *encoding, h func(context.Context, *Job[T]) error) handler {
	return func(ctx context.Context, l *Lease, f *taskContext) error {
		job := &Job[T]{Lease: l, taskCtx: f, encoding: enc}
		if err := job.decode(); err != nil {
			return err
		}
		return h(ctx, job)
	}
}

// check refuses the arguments of a registration that are invalid.
func (m *Mux) check(verb, queue string, isNil bool, opts []HandlerOption) *encoding {
	if _, ok := m.handlers[queue]; ok {
		m.refuse(&InvalidError{verb + " queue", strconv.Quote(queue), "one handler for each queue"})
	}
	if m.handlers == nil {
		m.handlers = make(map[string]handler)
	}
	return m.encoding(verb, taskKind{queue: queue}, strconv.Quote(queue), isNil, opts)
}

// encoding returns the encoding of a handler of tasks, notes its policy, and refuses a nil one.
func (m *Mux) encoding(verb string, k taskKind, of string, isNil bool, opts []HandlerOption) *encoding {
	if isNil {
		m.refuse(&InvalidError{verb + " handler of queue " + of, "nil", "a function"})
	}
	var o handlerOptions
	for _, opt := range opts {
		if opt == nil {
			opt = PayloadOption(nil) // which is refused
		}
		opt.set(&o)
	}
	enc, err := encodingOf(o.payload)
	if o.policy != nil {
		err = errors.Join(err, translated(o.policy.Check("Policy")))
		if m.policies == nil {
			m.policies = make(map[taskKind]*record.Policy)
		}
		m.policies[k] = o.policy
	}
	if err != nil {
		m.refuse(fmt.Errorf("handler of queue %s: %w", of, err))
	}
	return enc
}

// HandlerOption is an option of [Handle], [HandleKind] and [HandleBatch]: a [PayloadOption], or the
// [Policy] of the handler, which counts when the handler ends an attempt. In a cluster of format 7
// that has no effect yet, and [Queue.Apply] returns [ErrFormat].
type HandlerOption interface{ set(*handlerOptions) }

type handlerOptions struct {
	payload []PayloadOption
	policy  *record.Policy // nil: there is none
}

func (opt PayloadOption) set(o *handlerOptions) { o.payload = append(o.payload, opt) }
func (p Policy) set(o *handlerOptions)          { o.policy = p.inner() }

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

// WithCodec sets the codec, the same for producers and handler of a queue. Default: [JSON].
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
// options set another codec; a []byte is copied as it is. The caller sets the other fields.
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

// Snooze makes an error for handlers that give their task back for d; the attempt does not count.
func Snooze(d time.Duration) error { return &call.Wish{How: engine.FailRelease, After: max(d, 0)} }

// RetryAfter returns an error for handlers that ask for another attempt after d, in place of the
// backoff. The attempt counts; out of attempts, the task becomes a dead letter.
func RetryAfter(d time.Duration, err error) error {
	return &call.Wish{How: engine.FailRetry, After: max(d, 0), Err: err}
}

// DeadLetter returns an error for handlers that make their task a dead letter.
func DeadLetter(err error) error { return &call.Wish{How: engine.FailDead, Err: err} }

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
	return &failure{err, failOp{Fail: call.FailBy(err)}, VerdictOf(err)}
}

// Verdict is the meaning of a handler's end to [Queue.Run].
type Verdict uint8

// The verdicts.
const (
	VerdictCompleted  Verdict = iota + 1 // the task is completed
	VerdictRetry                         // the attempt has failed: tried again by Policy.Backoff
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
// tell a failure from a wish of the handler: that of [Snooze], [RetryAfter] or [DeadLetter] in it,
// else that of [ErrCanceled], [ErrLeaseLost] or [ErrSuspended], if it matches one, in this order;
// nil is [VerdictCompleted], any other error [VerdictRetry].
//
// If the task has no attempts left, VerdictRetry and [VerdictRetryAfter] make it a dead letter, as
// does VerdictCompleted if the result or follow-ups exceed the limits. The end of the handler's
// context is not in err unless the handler returns it: VerdictOf(context.Cause(ctx)) tells whether
// the task was canceled or its lease lost meanwhile; then the handler's error has no effect. If
// such an error comes from a receipt of another task, the handler's own is tried again.
func VerdictOf(err error) Verdict {
	if err == nil {
		return VerdictCompleted
	}
	w := call.WishIn(err)
	switch {
	case w == nil && guard.Is(err, ErrCanceled):
		return VerdictCanceled
	case w == nil && guard.Is(err, ErrLeaseLost):
		return VerdictLeaseLost
	case w == nil && guard.Is(err, ErrSuspended):
		return VerdictSuspended
	case w == nil:
		return VerdictRetry
	case w.How == engine.FailRelease || w.How == engine.FailUnhandled:
		return VerdictReleased
	case w.How == engine.FailDead:
		return VerdictDeadLetter
	}
	return VerdictRetryAfter
}

// verdictOn is the verdict on an ended handler. lost is why its task was lost; nil: given back.
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
