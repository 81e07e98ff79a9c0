package codeq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
)

// ErrSuspended is matched by the error with which a step ends the run of its handler: see [Sleep].
var ErrSuspended = errors.New("codeq: the task is suspended")

// ErrStepsChanged is matched by the error of a step that differs from the step that an earlier run
// of the handler has finished in its place: see [Step].
var ErrStepsChanged = errors.New("codeq: the steps of the task have changed")

// Step runs do and stores its result with the task of ctx, which is a handler's context or derived
// from one. When the handler runs again, after an error, a crash, a new deployment or a [Sleep],
// Step returns the stored result, and does not call do. So a handler that does all its work in
// steps goes on where it has stopped:
//
//	charge, err := codeq.Step(ctx, "charge", func(ctx context.Context) (Charge, error) {
//		return bank.Charge(ctx, j.ID.String(), j.Args.Amount)
//	})
//	if err != nil {
//		return err
//	}
//
// do runs again if the process dies, or the lease is lost, after the work and before its result is
// stored: give the ID of the task and the name of the step to the other side as its idempotency
// key. The error of do is returned, and nothing is stored. Results are stored at the durability of
// the queue, in one commit with others.
//
// No step begins when ctx has ended; if it ends during do, the result is stored all the same. If a
// result could not be stored, or it is not known whether it is ([ErrUncertain]), all later steps of
// the run return that error: the next run finds what is stored. After a step that has panicked none
// begins, either.
//
// A task runs the same steps in the same order every time. A step that has another name or kind
// than the stored one returns an error that matches [ErrStepsChanged], and the task becomes a dead
// letter whatever the handler returns; redriven, it goes on after its last finished step. Two steps
// of a task at the same time, also from several goroutines, are refused with [ErrInvalid], so do
// must not call Step.
//
// A task has at most 1,000 steps, with 256 KiB of names and results together; a name has 1 to 128
// bytes of UTF-8. Results are encoded by JSON unless options set another codec; a []byte is stored
// as it is. [TaskInfo.Steps] shows them. They are deleted with the task, or kept with it
// ([Task.Retention]).
//
// Errors: that of do, that of the codec, [ErrStepsChanged], [ErrSuspended] (after a [Sleep]),
// [ErrInvalid], [ErrLeaseLost], [ErrFormat] (in a cluster that is being upgraded), [ErrDiskFull],
// [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrClosed], and that of ctx.
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
	defer func() { s.endStep(returned) }()
	result, err = runStep(ctx, s, stored, name, enc, do)
	returned = true
	return result, err
}

// runStep runs a step that has begun, or returns the result of the stored one.
func runStep[T any](ctx context.Context, s *stepLog, stored *record.Step, name string, enc *encoding, do func(context.Context) (T, error)) (result T, err error) {
	if stored != nil {
		if err := enc.decode(stored.Result, &result); err != nil {
			return result, s.fail(fmt.Errorf("%w: result of step %q into %T: %w", ErrStepsChanged, name, result, err))
		}
		return result, nil
	}
	step := record.Step{Kind: record.StepResult, Name: name}
	if err := s.check(&step); err != nil {
		return result, err
	}
	if result, err = do(ctx); err != nil {
		return result, err
	}
	if step.Result, err = enc.encode(result); err != nil {
		return result, fmt.Errorf("result of step %q from %T: %w", name, result, err)
	}
	return result, s.store(ctx, step)
}

// Sleep ends the run of the handler of ctx, which is a handler's context or derived from one, and
// makes it run again after d: it returns an error that matches [ErrSuspended], which the handler
// returns. In the run after that Sleep returns nil, as a finished step. If the handler returns
// anything else, the task is suspended all the same, and that is logged.
//
// A suspended task is [Scheduled]. It uses no worker, and no place of a limit; it keeps its turn in
// its group, and its idempotency key. The run does not count as an attempt, and [Task.Timeout]
// bounds each run. [Queue.SetRunAt] ends the sleep early. d has a resolution of a millisecond; for
// 0 or less Sleep only counts as a step.
//
// Sleep is a step, with the rules of [Step].
//
// Errors: [ErrSuspended], those of the other verbs of steps ([ErrStepsChanged], [ErrInvalid],
// [ErrLeaseLost], [ErrFormat], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed]), and that of ctx.
func Sleep(ctx context.Context, name string, d time.Duration) (err error) {
	defer public(&err)
	s, stored, err := beginStep(ctx, record.StepSleep, name)
	if err != nil {
		return err
	}
	defer s.endStep(true)
	if stored != nil {
		return nil
	}
	step := record.Step{Kind: record.StepSleep, Name: name}
	if d <= 0 {
		return s.store(ctx, step)
	}
	if err := s.check(&step); err != nil {
		return err
	}
	return s.suspend(step, d)
}

// StepInfo is a finished step of a task.
type StepInfo struct {
	Name string   `json:",omitzero"`
	Kind StepKind `json:",omitzero"`
	// At is when it was stored: for [StepSleep], when the sleep began.
	At     time.Time `json:",omitzero"`
	Result []byte    `json:",omitempty"`
}

// StepKind is the kind of a step.
type StepKind uint8

// The kinds of steps.
const (
	StepResult StepKind = iota + 1 // by Step
	StepSleep                      // by Sleep
)

var stepKinds = newEnum[StepKind]("StepKind", "", "result", "sleep")

// String returns the kind in lower case.
func (k StepKind) String() string { return stepKinds.Text(k) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (k StepKind) MarshalText() ([]byte, error) { return stepKinds.Marshal(k) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (k *StepKind) UnmarshalText(b []byte) error { return stepKinds.Unmarshal(k, b) }

// stepLog is the steps of a task, as its running handler goes through them.
type stepLog struct {
	of *taskContext

	mu       sync.Mutex    // guards the fields below, which the running step uses without it
	running  bool          // a step runs
	loaded   bool          // finished has the steps of earlier runs
	finished []record.Step // by earlier runs
	next     int           // number of the next step, in finished or after it
	size     int           // of the finished steps, those of this run included
	end      *failOp       // how the run ends, whatever the handler returns; nil: as it returns
	endErr   error         // no other step begins; belongs to end, if there is one
}

var errNoHandlerContext = &InvalidError{"Step ctx", "another one", "the context of a handler of Run"}

// beginStep begins the next step of the task of ctx. If err is nil, the caller ends it. stored is
// the step if an earlier run has finished it; otherwise it is nil.
func beginStep(ctx context.Context, kind record.StepKind, name string) (_ *stepLog, stored *record.Step, err error) {
	c := taskContextOf(ctx)
	if c == nil {
		return nil, nil, errNoHandlerContext
	}
	if name == "" || len(name) > record.MaxStepName || !utf8.ValidString(name) {
		return nil, nil, &InvalidError{"Step name", base.Shortly(name), fmt.Sprintf("1 to %d bytes of UTF-8", record.MaxStepName)}
	}
	s := &c.rareParts().steps
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.endErr != nil:
		return nil, nil, s.endErr
	case s.running:
		return nil, nil, &InvalidError{"Step " + name, "a step beside another one of its task", "one at a time"}
	}
	if err := s.load(ctx); err != nil {
		return nil, nil, err
	}
	if s.next >= len(s.finished) && ctx.Err() != nil {
		return nil, nil, base.EndOf(ctx)
	}
	if s.next < len(s.finished) {
		stored = &s.finished[s.next]
		if stored.Kind != kind || stored.Name != name {
			return nil, nil, s.failLocked(fmt.Errorf("%w: step %d is %q, and was %q", ErrStepsChanged, s.next+1, name, stored.Name))
		}
		s.next++
	}
	s.running = true
	return s, stored, nil
}

// endStep ends the running step. If it has not returned, but panicked or ended its goroutine, no
// other step begins: a deferred one would be stored in its place.
func (s *stepLog) endStep(returned bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	if !returned {
		s.endErr = errStepNotReturned
	}
}

var errStepNotReturned = errors.New("codeq: a step of the run has panicked, or ended its goroutine")

// load reads the steps that earlier runs have finished. REQUIRES: mu is held.
func (s *stepLog) load(ctx context.Context) error {
	q, l := s.of.runner.queue, &s.of.lease
	shard := q.shardOf(l.ID)
	if q.node != nil {
		if f := q.replicas[shard].group.Format(); f < keys.FormatOfSteps {
			return fmt.Errorf("%w: shard %d has format %d, and steps need %d", ErrFormat, shard, f, keys.FormatOfSteps)
		}
	}
	if s.loaded {
		return nil
	}
	one := listing.NewOne(false, taskInfo)
	one.ID = keys.ID(l.ID)
	if err := q.read(ctx, shard, callRead, one); err != nil {
		return fmt.Errorf("steps of task %s: %w", l.ID, err)
	}
	for _, of := range one.Task.Steps {
		step := record.Step{Kind: record.StepKind(of.Kind), Name: of.Name, Result: of.Result}
		s.finished = append(s.finished, step)
		s.size += step.Size()
	}
	s.loaded = true
	return nil
}

// check refuses a step more that exceeds the bounds.
func (s *stepLog) check(step *record.Step) error {
	if n := s.next + 1; n > record.MaxSteps {
		return DeadLetter(&InvalidError{"steps of a task", n, atMost(record.MaxSteps)})
	}
	if n := s.size + step.Size(); n > record.MaxStepBytes {
		return DeadLetter(&InvalidError{"results of the steps of a task", bytesOf(n), atMost(record.MaxStepBytes)})
	}
	return nil
}

// storeLate is how long a step whose context has ended meanwhile waits until it is stored.
const storeLate = time.Second

// store stores the running step, also if ctx has ended: the work of the step is done.
func (s *stepLog) store(ctx context.Context, step record.Step) error {
	if err := s.check(&step); err != nil {
		return err
	}
	if ctx.Err() != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLate)
		defer cancel()
		ctx = late
	}
	step.Result = bytes.Clone(step.Result) // the shard may read it after the end of ctx
	r := s.of.runner
	op := &stepOp{completion: newCompletion(callStep), Step: call.Step{
		Receipt: s.of.lease.Receipt.inner(), RoomWait: call.RoomWait{Gone: r.storing.Done()},
		Of: call.NumberedStep{Number: uint32(s.next), Step: step},
	}}
	_, err := r.queue.do(ctx, r.queue.shardOf(s.of.lease.ID), op)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil { // perhaps it is stored: another step could be taken for it
		s.endErr = fmt.Errorf("result of step %q: %w", step.Name, err)
		return s.endErr
	}
	s.size += step.Size()
	s.next++
	return nil
}

// suspend makes the run end with the suspension of the task.
func (s *stepLog) suspend(step record.Step, d time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end = &failOp{Fail: call.Fail{
		How: engine.FailSuspend, Wait: int64(record.Millis(d)), Step: call.NumberedStep{Number: uint32(s.next), Step: step},
	}}
	s.endErr = fmt.Errorf("%w: step %q sleeps for %v", ErrSuspended, step.Name, d)
	return s.endErr
}

// fail makes the task a dead letter at the end of the run.
func (s *stepLog) fail(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failLocked(err)
}

func (s *stepLog) failLocked(err error) error {
	s.endErr = DeadLetter(err)
	s.end = &failureOf(s.endErr).op
	return s.endErr
}

// verdict returns how the run of the handler ends that has failed, or not; failed is nil if it has
// not. It calls methods of the handler's error, which may end the goroutine.
func (c *taskContext) verdict(failed *failure) *failure {
	rare := c.rare.Load()
	if rare == nil {
		return failed
	}
	return rare.steps.verdict(failed, c.runner.queue.opts.log)
}

func (s *stepLog) verdict(failed *failure, log *slog.Logger) *failure {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil {
		return failed
	}
	if failed == nil || !isError(failed.err, s.endErr) {
		l := &s.of.lease
		log.Warn("handler has not returned the error of its step, which decides", "task", l.ID, "queue", l.Queue, "err", s.endErr)
	}
	return &failure{s.endErr, *s.end, VerdictOf(s.endErr)}
}

// isError is errors.Is for a handler's error, whose methods may panic.
func isError(err, target error) (is bool) {
	defer func() {
		if recover() != nil {
			is = false
		}
	}()
	return errors.Is(err, target)
}

// stepOp stores the result of a step.
type stepOp struct {
	completion
	call.Step
}

func (op *stepOp) abandon(*shard) { op.Leave() }

func (op *stepOp) resolve(s *shard) {
	err := s.rules.Leases.StoreStep(op.Receipt, op.Of.Number, &op.Of.Step)
	s.conclude(op, &op.completion, engine.Decided, err)
}
