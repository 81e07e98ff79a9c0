package record

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"codeq/internal/wire"
)

// Step is a finished step of a task.
type Step struct {
	Kind   StepKind
	Name   string
	At     uint64 // when it was stored, ms since 1970
	Result []byte // of StepResult and StepChildFailed, the value of StepSignal, the ID of StepChild
}

// StepKind is the kind of a step.
type StepKind uint8

// The kinds of steps.
const (
	StepResult StepKind = iota + 1
	StepSleep
	StepSignal
	StepNoSignal // the task waits for the signal, or its time has passed
	StepChild    // the task has produced a child; the next step is the end of the child
	StepChildFailed
	endOfStepKinds
)

// The bounds of the steps of a task.
const (
	MaxSteps     = 1000
	MaxStepBytes = 256 << 10 // of names and results
	MaxStepName  = 128       // bytes
)

// Size returns the bytes that MaxStepBytes limits; MaxSignalBytes limits the values of signals.
func (s *Step) Size() int {
	if s.Kind == StepSignal {
		return len(s.Name)
	}
	return len(s.Name) + len(s.Result)
}

// Is reports whether a step is of a kind, and has a name; StepNoSignal stands for any wait for a
// signal.
func (s *Step) Is(kind StepKind, name string) bool {
	return s.Name == name && (s.Kind == kind || s.Kind == StepSignal && kind == StepNoSignal)
}

// Sound returns an error if no shard stores such a step.
func (s *Step) Sound() error {
	switch {
	case s.Kind == 0 || s.Kind >= endOfStepKinds:
		return fmt.Errorf("a step of kind %d", s.Kind)
	case s.Name == "" || len(s.Name) > MaxStepName || !utf8.ValidString(s.Name):
		return fmt.Errorf("a step with the name %q", Clip(s.Name, 2*MaxStepName))
	case (s.Kind == StepSleep || s.Kind == StepNoSignal) && len(s.Result) > 0, s.Kind == StepChild && len(s.Result) != IDLen:
		return fmt.Errorf("the step %q of kind %d has a result of %d bytes", s.Name, s.Kind, len(s.Result))
	}
	return nil
}

// Append appends the form that is stored, and sent between nodes.
func (s *Step) Append(b []byte) []byte {
	b = wire.AppendUint(append(b, byte(s.Kind)), s.At)
	return wire.AppendBytes(wire.AppendBytes(b, s.Name), s.Result)
}

func (s *Step) maxSize() int { return 1 + 30 + len(s.Name) + len(s.Result) }

// ReadStep reads the result of Append. The step does not alias the memory of r.
func ReadStep(r *wire.Reader) (s Step) {
	s.Kind, s.At, s.Name = StepKind(r.Byte()), r.Uint(), r.String()
	if result := r.Bytes(); len(result) > 0 {
		s.Result = append([]byte(nil), result...)
	}
	if s.Sound() != nil {
		r.Fail()
	}
	return s
}

// ParseStep reads a stored step.
func ParseStep(b []byte) (Step, error) {
	r := wire.NewReader(b)
	s := ReadStep(r)
	if r.Done() != nil {
		return Step{}, malformed(b)
	}
	return s, nil
}

// leastStep is how many bytes a step takes at least.
const leastStep = 5

func appendSteps(b []byte, steps []Step) []byte {
	b = wire.AppendUint(b, uint64(len(steps)))
	for i := range steps {
		b = steps[i].Append(b)
	}
	return b
}

func readSteps(r *wire.Reader) []Step {
	steps := make([]Step, r.Count(leastStep))
	for i := range steps {
		steps[i] = ReadStep(r)
	}
	if len(steps) == 0 {
		r.Fail()
	}
	return steps
}

// soundSteps returns an error if the record does not have such steps as a shard writes.
func (r *Record) soundSteps() error {
	size := 0
	for i := range r.Kept {
		if err := r.Kept[i].Sound(); err != nil {
			return err
		}
		size += r.Kept[i].Size()
	}
	switch n, taken := max(len(r.Kept), int(r.Steps)), TakenSignals(r.Kept); {
	case len(taken) > 0 && taken.Sound() != nil:
		return taken.Sound()
	case len(r.Cursors) > 0 && r.Cursors.Sound() != nil:
		return r.Cursors.Sound()
	case len(r.Kept)+len(r.Cursors) > 0 && r.Beside != 0:
		return errors.New("steps or cursors in the record, and others beside it")
	case n > MaxSteps || size > MaxStepBytes:
		return fmt.Errorf("%d steps of %d bytes", n, size)
	case len(r.Kept) > 0 && r.Steps > 0:
		return errors.New("steps in the record, and beside it")
	}
	return nil
}
