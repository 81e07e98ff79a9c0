package codeq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
)

// ErrSuspended is matched by the error of a step that ends the run of its handler: see [Sleep].
var ErrSuspended = base.ErrSuspended

// ErrStepsChanged is matched by the error of a step that differs from the stored one: see [Step].
var ErrStepsChanged = base.ErrStepsChanged

// ErrNoSignal is matched by the error of a [WaitSignal] after its timeout.
var ErrNoSignal = errors.New("codeq: no signal has come in time")

// Step runs do and stores its result with the task of ctx, a handler's context or derived from one.
// When the handler runs again, after an error, a crash, a new deployment or a [Sleep], Step returns
// the stored result without do: a handler with all its work in steps goes on where it has stopped.
//
// do runs again if the process dies, or the lease is lost, before its result is stored: give the ID
// of the task and the name of the step to the other side as its idempotency key. The error of do is
// returned, and nothing is stored. Results are stored at the durability of the queue, in one commit
// with others. No step begins when ctx has ended; if it ends during do, the result is stored all
// the same. If a result is not stored, or perhaps not ([ErrUncertain]), all later steps of the run
// return that error. After a step that has panicked none begins, either.
//
// A task runs the same steps in the same order every time. A step with another name or kind than
// the stored one returns an error that matches [ErrStepsChanged], and the task becomes a dead
// letter whatever the handler returns; redriven, it goes on after its last finished step.
// [ErrInvalid] refuses another step after a failed one in the same run, and two of a task at the
// same time, also from several goroutines: do must not call Step.
//
// A task has at most 1,000 steps, with 256 KiB of names and results together; a name has 1 to 128
// bytes of UTF-8. Results are encoded by JSON unless options set another codec; a []byte is stored
// as it is. They are deleted, or kept ([Task.Retention]), with the task: see [TaskInfo.Steps].
//
// Errors: those of do and of the codec, [ErrStepsChanged], [ErrSuspended] (after [Sleep]),
// [ErrLeaseLost], [ErrFormat] (in an upgrade), those of changes (see [Queue]), and that of ctx.
func Step[T any](ctx context.Context, name string, do func(context.Context) (T, error), opts ...PayloadOption) (_ T, err error) {
	defer public(&err)
	var result T
	enc, err := encodingOf(opts)
	if err != nil {
		return result, err
	}
	if do == nil {
		return result, &InvalidError{"Step do", "nil", "a function"}
	}
	s, stored, err := beginStep(ctx, record.StepResult, name)
	if err != nil {
		return result, err
	}
	returned := false
	defer func() { s.End(returned) }()
	result, err = runStep(ctx, s, stored, name, enc, do)
	returned = true
	return result, err
}

// runStep runs a step that has begun, or returns the result of the stored one.
func runStep[T any](ctx context.Context, s *call.Steps, stored *record.Step, name string, enc *encoding, do func(context.Context) (T, error)) (result T, err error) {
	if stored != nil {
		if err := enc.decode(stored.Result, &result); err != nil {
			return result, s.Refuse(fmt.Errorf("%w: result of step %q into %T: %w", ErrStepsChanged, name, result, err))
		}
		return result, nil
	}
	step := record.Step{Kind: record.StepResult, Name: name}
	if err := s.Check(&step); err != nil {
		return result, stepError(err)
	}
	s.Work(&step)
	if result, err = do(ctx); err != nil {
		return result, err
	}
	if step.Result, err = enc.encode(result); err != nil {
		return result, fmt.Errorf("result of step %q from %T: %w", name, result, err)
	}
	return result, stepError(s.Store(ctx, step))
}

// Sleep ends the run of the handler of ctx, as of [Step], and makes it run again after d: it
// returns an error that matches [ErrSuspended], for the handler to return; in that run it returns
// nil. If the handler returns anything else, the task is suspended all the same, with a warning.
//
// A suspended task is [Scheduled]. It uses no worker, and no place of a limit; it keeps its turn in
// its group, and its idempotency key. The run is no attempt, and [Task.Timeout] bounds each run.
// [Queue.SetRunAt] ends the sleep early. d has a resolution of a millisecond; for 0 or less Sleep
// is only a step, with the rules of Step.
//
// Errors: [ErrSuspended], those of [Step] such as [ErrStepsChanged], and that of ctx.
func Sleep(ctx context.Context, name string, d time.Duration) (err error) {
	defer public(&err)
	s, stored, err := beginStep(ctx, record.StepSleep, name)
	if err != nil {
		return err
	}
	defer s.End(true)
	if stored != nil {
		return nil
	}
	step := record.Step{Kind: record.StepSleep, Name: name}
	if d <= 0 {
		return stepError(s.Store(ctx, step))
	}
	return stepError(s.Suspend(step, d))
}

// WaitSignal returns the value that [Queue.Signal] gives to the task of ctx under a name. It is a
// step, with the rules of [Step], and ends the run of the handler as [Sleep] does: the task goes on
// when it has the signal, which may have come before, or timeout has passed ([Queue.SetRunAt] sets
// another time). Then it returns the value, or an error that matches [ErrNoSignal], and the task
// may wait for the name again. [ErrInvalid] refuses a name after its signal. With a timeout of 0 or
// less the handler runs again at once, with a signal only if it has come.
//
// Errors: [ErrNoSignal], that of the codec, those of Sleep such as [ErrSuspended], and that of ctx.
func WaitSignal[T any](ctx context.Context, name string, timeout time.Duration, opts ...PayloadOption) (_ T, err error) {
	defer public(&err)
	var value T
	enc, err := encodingOf(opts)
	if err != nil {
		return value, err
	}
	s, stored, err := beginStep(ctx, record.StepNoSignal, name)
	if err != nil {
		return value, err
	}
	defer s.End(true)
	switch {
	case stored == nil && s.HasTaken(name):
		return value, &InvalidError{"WaitSignal name", name, "one whose signal the task has not got"}
	case stored == nil:
		return value, stepError(s.Suspend(record.Step{Kind: record.StepNoSignal, Name: name}, timeout))
	case stored.Kind == record.StepNoSignal:
		return value, fmt.Errorf("%w: %q", ErrNoSignal, name)
	}
	if err := enc.decode(stored.Result, &value); err != nil {
		return value, fmt.Errorf("value of signal %q into %T: %w", name, value, err)
	}
	return value, nil
}

// Signal gives a value to a task under a name, for a [WaitSignal] of its handler; the task keeps it
// until that, or its end. v is encoded by JSON unless options set another codec; a []byte is stored
// as it is. A task gets one signal of each name: a [*DuplicateError] ([ErrDuplicate]) refuses
// another, so a call can be repeated after [ErrUncertain]. A task has at most 64 signals, with 64
// KiB of names and values together; a name has 1 to 128 bytes of UTF-8.
//
// Errors: that of the codec, [ErrNotFound] (it has ended, too), [ErrDuplicate], [ErrFormat] (in an
// upgrade), those of changes (see [Queue]), and that of ctx.
func (q *Queue) Signal(ctx context.Context, id ID, name string, v any, opts ...PayloadOption) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	enc, err := encodingOf(opts)
	if err != nil {
		return err
	}
	if err := call.CheckName("Signal name", name); err != nil {
		return translated(err)
	}
	value, err := enc.encode(v)
	if err != nil {
		return fmt.Errorf("value of signal %q from %T: %w", name, v, err)
	}
	if n := len(name) + len(value); n > record.MaxSignalBytes {
		return &InvalidError{"value of signal " + name, bytesOf(n), atMost(record.MaxSignalBytes)}
	}
	return q.doFor(ctx, id, rule(callSignal, &call.Signal{ID: keys.ID(id), Name: name, Value: bytes.Clone(value)}))
}

// Child produces a task, once, for the task of ctx, and ends the run of the handler as [Sleep]
// does. When the child has ended, the task goes on, and Child returns its result in that run and
// all later ones; or a [*CallError], which matches [ErrCanceled] or, if the child is gone,
// [ErrNotFound], or has the [Outcome] of a dead letter. For the parent, a child is kept for a week
// after its end, or longer by its [Task.Retention].
//
// The parent keeps its turn in its group: a child in the same one (queue, tenant, LimitKey and
// Group), or After its parent, is refused with [ErrInvalid], as neither would go on. The child's
// [Unique] belongs to Child: for 30 days, the step finds the child that it has produced, also after
// [Queue.RedriveDeadFrom], and [Queue.DeleteQueue] refuses its queue. The child goes on if the
// parent ends. Once a day, and by [Queue.SetRunAt], the parent looks whether it has ended. Child
// counts as two steps, with the rules of [Step].
//
// Errors: [*CallError], that of the codec, those of [Sleep] such as [ErrSuspended], those of
// [Queue.Produce], and that of ctx.
func Child[R any](ctx context.Context, name string, task Task, opts ...PayloadOption) (_ R, err error) {
	defer public(&err)
	var result R
	enc, err := encodingOf(opts)
	if err != nil {
		return result, err
	}
	s, stored, err := beginStep(ctx, record.StepChild, name)
	if err != nil {
		return result, err
	}
	returned := false
	defer func() { s.End(returned) }()
	end, err := s.Child(ctx, stored, name, &childHost{taskContextOf(ctx), task})
	switch returned = true; {
	case err != nil:
		return result, stepError(err)
	case end.Kind == record.StepChildFailed:
		return result, callErrorOf(ID(stored.Result), end.Result)
	}
	if err := enc.decode(end.Result, &result); err != nil {
		return result, fmt.Errorf("result of child %q into %T: %w", name, result, err)
	}
	return result, nil
}

// childHost produces a child, and looks how it has ended.
type childHost struct {
	of   *taskContext
	task Task
}

// A child is kept so long at least, and its key is taken so long.
const (
	childRetention = 7 * 24 * time.Hour
	childKeyFor    = 30 * 24 * time.Hour
)

// Produce produces the child, unless an earlier run has done so.
func (h *childHost) Produce(ctx context.Context, number int) ([record.IDLen]byte, error) {
	q, l, t := h.of.runner.queue, &h.of.lease, h.task
	switch {
	case t.Unique != Unique{}:
		return ID{}, &InvalidError{"Unique of a child", t.Unique.Key, "none"}
	case t.Group != "" && t.Queue == l.Queue && t.Tenant == l.Tenant && t.Group == l.Group && t.LimitKey == l.LimitKey:
		return ID{}, &InvalidError{"Group of a child", t.Group, "another one than that of its parent"}
	case slices.Contains(t.After, l.ID):
		return ID{}, &InvalidError{"After of a child", l.ID, "other tasks than its parent"}
	}
	t.Unique = Unique{Key: fmt.Sprintf("child %d of %s", number, l.ID), For: childKeyFor}
	t.Headers = record.InheritTrace(t.Headers, l.Headers, q.opts.Limits.Headers)
	if t.Retention >= 0 {
		t.Retention = max(t.Retention, childRetention)
	}
	id, err := q.Produce(ctx, t)
	if errors.Is(err, ErrDuplicate) && !errors.Is(err, ErrUncertain) {
		err = nil
	}
	return id, err
}

func (h *childHost) Look(ctx context.Context, id [record.IDLen]byte) (*record.Step, error) {
	t, err := h.of.runner.queue.Get(ctx, id)
	var o Outcome
	switch {
	case errors.Is(err, ErrNotFound):
	case err != nil:
		return nil, err
	case t.State == Done:
		return &record.Step{Kind: record.StepResult, Result: t.Result}, nil
	case t.State == Dead || t.State == Canceled:
		o = Outcome{State: t.State, LastError: t.LastError, Attempts: t.Attempts}
	default:
		return nil, nil
	}
	result, err := json.Marshal(&o)
	return &record.Step{Kind: record.StepChildFailed, Result: result}, err
}

// callErrorOf is the error for the stored Outcome of a child; without a State, it was gone.
func callErrorOf(id ID, outcome []byte) error {
	e := &CallError{ID: id}
	if err := json.Unmarshal(outcome, &e.Outcome); err != nil {
		return fmt.Errorf("%w: end of child %s: %w", ErrCorrupt, id, err)
	}
	e.Err = map[State]error{0: ErrNotFound, Canceled: ErrCanceled}[e.Outcome.State]
	return e
}

// StepInfo is a finished step of a task.
type StepInfo struct {
	Name string   `json:",omitzero"`
	Kind StepKind `json:",omitzero"`
	// At is when it was stored: for [StepSleep] and [StepNoSignal], when the wait began; for
	// [StepSignal], when the signal came, or the wait began.
	At     time.Time `json:",omitzero"`
	Result []byte    `json:",omitempty"`
}

// StepKind is the kind of a step.
type StepKind uint8

// The kinds of steps.
const (
	StepResult      StepKind = iota + 1 // by Step
	StepSleep                           // by Sleep
	StepSignal                          // by WaitSignal, with the value
	StepNoSignal                        // by WaitSignal: the task waits, or its time has passed
	StepChild                           // by Child, with the ID of the task that it has produced
	StepChildFailed                     // by Child, with the Outcome in JSON; else a StepResult follows
)

var stepKinds = newEnum[StepKind]("StepKind", "", "result", "sleep", "signal", "no-signal", "child", "child-failed")

// String returns the kind in lower case.
func (k StepKind) String() string { return stepKinds.Text(k) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (k StepKind) MarshalText() ([]byte, error) { return stepKinds.Marshal(k) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (k *StepKind) UnmarshalText(b []byte) error { return stepKinds.Unmarshal(k, b) }

var errNoHandlerContext = &InvalidError{"Step ctx", "another one", "the context of a handler of Run"}

// beginStep is call.Steps.Begin for the task of ctx.
func beginStep(ctx context.Context, kind record.StepKind, name string) (*call.Steps, *record.Step, error) {
	c := taskContextOf(ctx)
	if c == nil {
		return nil, nil, errNoHandlerContext
	}
	s := c.steps()
	stored, err := s.Begin(ctx, kind, name)
	return s, stored, translated(err)
}

// stepError is an error of call.Steps for a handler.
func stepError(err error) error {
	var over *base.Invalid
	if w := call.WishIn(err); w != nil && errors.As(err, &over) {
		return DeadLetter(translated(over))
	}
	return translated(err)
}

// stepHost is the shard of a running task.
type stepHost taskContext

func (h *stepHost) Takes() error {
	q := h.runner.queue
	return q.needsFormat(q.shardOf(h.lease.ID), "steps", keys.FormatOfSteps)
}

func (h *stepHost) Finished(ctx context.Context) (steps []record.Step, _ record.Cursors, err error) {
	q, id := h.runner.queue, h.lease.ID
	one := listing.NewOne(false, taskInfo)
	one.ID = keys.ID(id)
	if err := q.read(ctx, q.shardOf(id), callRead, one); err != nil {
		return nil, nil, fmt.Errorf("steps of task %s: %w", id, err)
	}
	for _, of := range one.Task.Steps {
		step := record.Step{Kind: record.StepKind(of.Kind), Name: of.Name, Result: of.Result}
		if id, err := ParseID(string(of.Result)); err == nil && of.Kind == StepChild {
			step.Result = id[:]
		}
		steps = append(steps, step)
	}
	return steps, one.Task.Cursors, nil
}

func (h *stepHost) Store(ctx context.Context, step call.NumberedStep) error {
	r := h.runner
	op := &stepOp{completion: newCompletion(callStep), Step: call.Step{
		Receipt: h.lease.Receipt.inner(), RoomWait: call.RoomWait{Gone: r.storing.Done()}, Of: step,
	}}
	_, err := r.queue.do(ctx, r.queue.shardOf(h.lease.ID), op)
	return err
}

// verdict returns how the run of the handler ends that has failed, or not; failed is nil if it has
// not. It calls methods of the handler's error, which may end the goroutine.
func (c *taskContext) verdict(failed *failure) *failure {
	rare := c.rare.Load()
	if rare == nil {
		return failed
	}
	steps := rare.steps.Load()
	if steps == nil {
		return failed
	}
	end, err := steps.Outcome()
	if end == nil {
		return failed
	}
	if failed == nil || !guard.Is(failed.err, err) {
		l := &c.lease
		c.runner.queue.opts.log.Warn("handler has not returned the error of its step, which decides", "task", l.ID, "queue", l.Queue, "err", err)
	}
	return &failure{err, failOp{Fail: *end}, VerdictOf(err)}
}

// stepOp stores the result of a step, or cursors.
type stepOp struct {
	completion
	call.Step
}

func (op *stepOp) abandon(*shard) { op.Leave() }

func (op *stepOp) resolve(s *shard) {
	err := s.rules.Leases.StoreStep(op.Receipt, op.Of.Number, &op.Of.Step, op.Cursors)
	s.conclude(op, &op.completion, engine.Decided, err)
}
