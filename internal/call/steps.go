package call

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/record"
)

// Steps goes through the steps of a task with its running handler: those that earlier runs have
// finished, and then new ones. They are numbered from 0.
type Steps struct {
	Host StepHost

	mu sync.Mutex // guards the fields below, which the running step uses without it
	// Unread: the steps of earlier runs are not in finished. The owner of the Steps may set it
	// before the handler runs.
	Unread   bool
	running  bool           // a step runs
	finished []record.Step  // by earlier runs
	cursors  record.Cursors // of earlier runs
	next     int            // number of the next step, in finished or after it
	work     record.Step    // the next step, if its work has begun in this run
	size     int            // of the finished steps, those of this run included
	end      *Fail          // how the run ends, whatever the handler returns; nil: as it returns
	err      error          // no other step begins; belongs to end, if there is one
}

// StepHost is the shard of a task, for its Steps.
type StepHost interface {
	// Takes returns an error if the shard cannot store steps.
	Takes() error
	// Finished reads the steps that earlier runs have finished, and the cursors that they have set.
	Finished(context.Context) ([]record.Step, record.Cursors, error)
	// Store stores a finished step.
	Store(context.Context, NumberedStep) error
}

// Begin begins the next step. If err is nil, the caller ends it. stored is the step if an earlier
// run has finished it; otherwise it is nil.
func (s *Steps) Begin(ctx context.Context, kind record.StepKind, name string) (stored *record.Step, err error) {
	if err := CheckName("Step name", name); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return nil, s.err
	case s.running:
		return nil, &base.Invalid{Field: "Step " + name, Value: "a step beside another one of its task", Limit: "one at a time"}
	case s.work.Name != "" && !s.work.Is(kind, name):
		return nil, &base.Invalid{Field: "Step " + name, Value: "a step in place of " + s.work.Name + ", which has failed", Limit: "the same one"}
	}
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	if s.next >= len(s.finished) && ctx.Err() != nil {
		return nil, base.EndOf(ctx)
	}
	if s.next < len(s.finished) {
		stored = &s.finished[s.next]
		if !stored.Is(kind, name) {
			return nil, s.refuse(fmt.Errorf("%w: step %d is %q, and was %q", base.ErrStepsChanged, s.next+1, name, stored.Name))
		}
		s.next++
	}
	s.running = true
	return stored, nil
}

// CheckName refuses what cannot be the name of a step or a signal.
func CheckName(field, name string) error {
	if name == "" || len(name) > record.MaxStepName || !utf8.ValidString(name) {
		return &base.Invalid{Field: field, Value: base.Shortly(name), Limit: fmt.Sprintf("1 to %d bytes of UTF-8", record.MaxStepName)}
	}
	return nil
}

// HasTaken reports whether the task has got the signal of a name. REQUIRES: a step has begun.
func (s *Steps) HasTaken(name string) bool {
	return slices.ContainsFunc(s.finished, func(of record.Step) bool { return of.Kind == record.StepSignal && of.Name == name })
}

// Cursors returns the cursors that earlier runs have set.
func (s *Steps) Cursors(ctx context.Context) (record.Cursors, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.load(ctx)
	return s.cursors, err
}

// load reads the steps and cursors of earlier runs. REQUIRES: mu is held.
func (s *Steps) load(ctx context.Context) (err error) {
	if err = s.Host.Takes(); err != nil || !s.Unread {
		return err
	}
	if s.finished, s.cursors, err = s.Host.Finished(ctx); err != nil {
		return err
	}
	for i := range s.finished {
		s.size += s.finished[i].Size()
	}
	s.Unread = false
	return nil
}

// End ends the running step. If it has not returned, but panicked or ended its goroutine, no other
// step begins: a deferred one would be stored in its place.
func (s *Steps) End(returned bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	if !returned {
		s.err = errStepNotReturned
	}
}

var errStepNotReturned = errors.New("codeq: a step of the run has panicked, or ended its goroutine")

// Check refuses a step more that exceeds the bounds: the task dies.
func (s *Steps) Check(step *record.Step) error {
	var over *base.Invalid
	if n := s.next + 1; n > record.MaxSteps {
		over = &base.Invalid{Field: "steps of a task", Value: n, Limit: fmt.Sprint("at most ", record.MaxSteps)}
	} else if n := s.size + step.Size(); n > record.MaxStepBytes {
		over = &base.Invalid{Field: "results of the steps of a task", Value: fmt.Sprintf("%d bytes", n), Limit: fmt.Sprintf("at most %d bytes", record.MaxStepBytes)}
	} else {
		return nil
	}
	return &Wish{How: engine.FailDead, Err: over}
}

// storeLate bounds the storing of a step after the end of its context.
const storeLate = time.Second

// Store stores the running step, also if ctx has ended: the work of the step is done.
func (s *Steps) Store(ctx context.Context, step record.Step) error {
	if err := s.Check(&step); err != nil {
		return err
	}
	if ctx.Err() != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLate)
		defer cancel()
		ctx = late
	}
	step.Result = bytes.Clone(step.Result) // the shard may read it after the end of ctx
	err := s.Host.Store(ctx, NumberedStep{Number: uint32(s.next), Step: step})
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil { // perhaps it is stored: another step could be taken for it
		s.err = fmt.Errorf("result of step %q: %w", step.Name, err)
		return s.err
	}
	s.size += step.Size()
	s.next++
	s.work = record.Step{}
	return nil
}

// Work notes that the work of the running step begins. If it fails, no other step takes its place
// in this run, as the next run would find it there.
func (s *Steps) Work(step *record.Step) { s.work = *step }

// ChildHost produces the child of a step, and looks how it has ended.
type ChildHost interface {
	// Produce produces it, unless an earlier run has done so. number is that of its step, from 1.
	Produce(ctx context.Context, number int) (id [record.IDLen]byte, err error)
	// Look returns the step of its end, without a name; nil: it has not ended.
	Look(ctx context.Context, id [record.IDLen]byte) (*record.Step, error)
}

// childEvery is how often a parent looks at a child, beside being told of its end.
const childEvery = 24 * time.Hour

// Child goes on with a running step that produces a child, in stored if an earlier run has. It
// returns the step after it, with the end of the child, or suspends the task until then.
func (s *Steps) Child(ctx context.Context, stored *record.Step, name string, host ChildHost) (end *record.Step, err error) {
	if stored == nil {
		return nil, s.produceChild(ctx, name, host)
	}
	if s.next < len(s.finished) {
		s.next++
		end = &s.finished[s.next-1]
		if !end.Is(record.StepResult, name) && !end.Is(record.StepChildFailed, name) {
			return nil, s.Refuse(fmt.Errorf("%w: after child %q comes its end, and %q has come", base.ErrStepsChanged, name, end.Name))
		}
		return end, nil
	}
	end, err = host.Look(ctx, [record.IDLen]byte(stored.Result))
	switch {
	case err != nil:
		return nil, err
	case end == nil:
		s.next--
		return nil, s.Suspend(*stored, childEvery)
	}
	end.Name = name
	return end, s.Store(ctx, *end)
}

func (s *Steps) produceChild(ctx context.Context, name string, host ChildHost) error {
	step := record.Step{Kind: record.StepChild, Name: name, Result: make([]byte, record.IDLen)}
	if err := s.Check(&step); err != nil {
		return err
	}
	s.Work(&step)
	id, err := host.Produce(ctx, s.next+1)
	if err != nil {
		return err
	}
	copy(step.Result, id[:])
	return s.Suspend(step, childEvery)
}

// Suspend makes the run end with the suspension of the task, in which the running step is stored.
func (s *Steps) Suspend(step record.Step, d time.Duration) error {
	if err := s.Check(&step); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end = &Fail{How: engine.FailSuspend, Wait: int64(record.Millis(max(d, 0))), Step: NumberedStep{Number: uint32(s.next), Step: step}}
	s.err = fmt.Errorf("%w: step %q waits for %v", base.ErrSuspended, step.Name, d)
	return s.err
}

// Refuse makes the task a dead letter at the end of the run, and returns the error for the handler.
func (s *Steps) Refuse(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refuse(err)
}

func (s *Steps) refuse(err error) error {
	s.err = &Wish{How: engine.FailDead, Err: err}
	end := FailBy(s.err)
	s.end = &end
	return s.err
}

// Outcome returns how the run ends, whatever the handler returns, and the error for it; nil: it
// ends as the handler returns.
func (s *Steps) Outcome() (*Fail, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end, s.err
}
