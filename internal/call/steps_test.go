package call

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/record"
)

// stepShard is the shard of a task with steps.
type stepShard struct {
	stored []record.Step
	reads  int
	fails  error // of Store
}

func (h *stepShard) Takes() error { return nil }

func (h *stepShard) Finished(context.Context) ([]record.Step, record.Cursors, error) {
	h.reads++
	return h.stored, nil, nil
}

func (h *stepShard) Store(ctx context.Context, s NumberedStep) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if int(s.Number) != len(h.stored) {
		return fmt.Errorf("step %d after %d", s.Number, len(h.stored))
	}
	h.stored = append(h.stored, s.Step)
	return h.fails
}

// run runs steps with these names, and ends at the first error.
func (h *stepShard) run(ctx context.Context, s *Steps, names ...string) error {
	for _, name := range names {
		stored, err := s.Begin(ctx, record.StepResult, name)
		if err != nil {
			return err
		}
		if stored == nil {
			err = s.Store(ctx, record.Step{Kind: record.StepResult, Name: name, Result: []byte(name)})
		} else if string(stored.Result) != name {
			err = fmt.Errorf("step %q has the result %q", name, stored.Result)
		}
		if s.End(true); err != nil {
			return err
		}
	}
	return nil
}

// TestStepsGoOn: a later run finds the steps of the one before, which it reads once, and adds its
// own. If they differ, the task becomes a dead letter.
func TestStepsGoOn(t *testing.T) {
	t.Parallel()
	h := new(stepShard)
	require.NoError(t, h.run(t.Context(), &Steps{Host: h}, "a", "b"))
	require.Zero(t, h.reads)
	s := &Steps{Host: h, Unread: true}
	require.NoError(t, h.run(t.Context(), s, "a", "b", "c"))
	require.Equal(t, 1, h.reads)
	require.Len(t, h.stored, 3)
	end, err := s.Outcome()
	require.Nil(t, end)
	require.NoError(t, err)

	s = &Steps{Host: h, Unread: true}
	err = h.run(t.Context(), s, "a", "x")
	require.ErrorIs(t, err, base.ErrStepsChanged)
	require.Equal(t, engine.FailDead, WishIn(err).How)
	_, again := s.Begin(t.Context(), record.StepResult, "b")
	require.Equal(t, err, again, "no other step begins")
	end, reason := s.Outcome()
	require.Equal(t, err, reason)
	require.Equal(t, engine.FailDead, end.How)
	require.Equal(t, err.Error(), end.Cause)
}

// TestStepsRefuse: steps beside each other, after one that has not returned, and beyond the bounds.
func TestStepsRefuse(t *testing.T) {
	t.Parallel()
	h := new(stepShard)
	s := &Steps{Host: h}
	var invalid *base.Invalid
	for _, name := range []string{"", strings.Repeat("n", record.MaxStepName+1), "\xff"} {
		require.ErrorAs(t, h.run(t.Context(), s, name), &invalid)
	}
	_, err := s.Begin(t.Context(), record.StepResult, "a")
	require.NoError(t, err)
	require.ErrorAs(t, h.run(t.Context(), s, "b"), &invalid)
	require.NoError(t, s.Check(&record.Step{Result: make([]byte, record.MaxStepBytes)}))
	require.ErrorAs(t, s.Check(&record.Step{Name: "a", Result: make([]byte, record.MaxStepBytes)}), &invalid)
	s.End(false)
	require.ErrorIs(t, h.run(t.Context(), s, "b"), errStepNotReturned)

	s = &Steps{Host: h}
	for i := range record.MaxSteps {
		require.NoError(t, h.run(t.Context(), s, fmt.Sprint(i)))
	}
	require.ErrorAs(t, s.Check(new(record.Step)), &invalid)
	require.Equal(t, engine.FailDead, WishIn(s.Check(new(record.Step))).How)
}

// TestStepsAtTheEnd: what is done is stored though its context has ended, no other step begins
// then, nor after one of which it is not known whether it is stored, nor after a suspension.
func TestStepsAtTheEnd(t *testing.T) {
	t.Parallel()
	h := new(stepShard)
	s := &Steps{Host: h}
	ctx, end := context.WithCancel(t.Context())
	_, err := s.Begin(ctx, record.StepResult, "a")
	require.NoError(t, err)
	end()
	require.NoError(t, s.Store(ctx, record.Step{Kind: record.StepResult, Name: "a", Result: []byte("a")}))
	s.End(true)
	require.ErrorIs(t, h.run(ctx, s, "b"), context.Canceled)
	require.Len(t, h.stored, 1)

	h.fails = base.ErrUncertain
	require.ErrorIs(t, h.run(t.Context(), s, "b"), base.ErrUncertain)
	h.fails = nil
	require.ErrorIs(t, h.run(t.Context(), s, "b"), base.ErrUncertain)
	require.Len(t, h.stored, 2)

	s = &Steps{Host: h, Unread: true}
	require.NoError(t, h.run(t.Context(), s, "a", "b"))
	_, err = s.Begin(t.Context(), record.StepSleep, "nap")
	require.NoError(t, err)
	err = s.Suspend(record.Step{Kind: record.StepSleep, Name: "nap"}, time.Minute)
	s.End(true)
	require.ErrorIs(t, err, base.ErrSuspended)
	require.Equal(t, err, h.run(t.Context(), s, "c"))
	how, reason := s.Outcome()
	require.Equal(t, err, reason)
	require.Equal(t, engine.FailSuspend, how.How)
	require.EqualValues(t, 2, how.Step.Number)
	require.EqualValues(t, time.Minute/time.Millisecond, how.Wait)
}

// rude is an error with methods that panic.
type rude struct{}

func (*rude) Error() string { panic("no text") }
func (*rude) As(any) bool   { panic("no type") }

// TestFailBy: a wish decides, also in an error that wraps it; any other error is tried again.
func TestFailBy(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	for _, c := range []struct {
		err  error
		want Fail
	}{
		{cause, Fail{How: engine.FailRetry, Wait: -1, Cause: "cause"}},
		{&Wish{How: engine.FailRelease, After: time.Second}, Fail{How: engine.FailRelease, Wait: 1000}},
		{fmt.Errorf("more: %w", &Wish{How: engine.FailDead, Err: cause}), Fail{How: engine.FailDead, Cause: "more: cause"}},
	} {
		require.Equal(t, c.want, FailBy(c.err))
	}
	require.Contains(t, FailBy(new(rude)).Cause, "panics")
}

// family is a host of children: those that have ended have a step.
type family struct {
	made int
	end  *record.Step
}

func (f *family) Produce(context.Context, int) (id [record.IDLen]byte, err error) {
	f.made++
	return [record.IDLen]byte{1}, nil
}

func (f *family) Look(context.Context, [record.IDLen]byte) (*record.Step, error) { return f.end, nil }

// TestStepsOfChildren: a child is produced once, and its end is the step after it. A step whose
// work has begun is begun again, and no other one in its place.
func TestStepsOfChildren(t *testing.T) {
	t.Parallel()
	h, f := new(stepShard), new(family)
	child := func(s *Steps) (*record.Step, error) {
		stored, err := s.Begin(t.Context(), record.StepChild, "child")
		require.NoError(t, err)
		defer s.End(true)
		return s.Child(t.Context(), stored, "child", f)
	}
	s := &Steps{Host: h}
	_, err := child(s)
	require.ErrorIs(t, err, base.ErrSuspended)
	how, _ := s.Outcome()
	h.stored = append(h.stored, how.Step.Step)
	s = &Steps{Host: h, Unread: true}
	_, err = child(s)
	require.ErrorIs(t, err, base.ErrSuspended, "it has not ended")
	how, _ = s.Outcome()
	require.Zero(t, how.Step.Number)
	f.end = &record.Step{Kind: record.StepResult, Result: []byte("end")}
	for range 2 {
		end, err := child(&Steps{Host: h, Unread: true})
		require.NoError(t, err)
		require.Equal(t, "end", string(end.Result))
	}
	require.Equal(t, 1, f.made)
	require.Len(t, h.stored, 2)
	h.stored[1].Name = "other"
	_, err = child(&Steps{Host: h, Unread: true})
	require.ErrorIs(t, err, base.ErrStepsChanged)

	h.stored[1] = record.Step{Kind: record.StepSignal, Name: "go"}
	s = &Steps{Host: h, Unread: true}
	require.NoError(t, h.run(t.Context(), &Steps{Host: new(stepShard)}, "x"))
	stored, err := s.Begin(t.Context(), record.StepChild, "child")
	require.NoError(t, err)
	require.NotNil(t, stored)
	s.End(true)
	require.True(t, s.HasTaken("go"))
	require.False(t, s.HasTaken("child"))
	s = &Steps{Host: new(stepShard)}
	_, err = s.Begin(t.Context(), record.StepResult, "failing")
	require.NoError(t, err)
	s.Work(&record.Step{Kind: record.StepResult, Name: "failing"})
	s.End(true)
	var invalid *base.Invalid
	_, err = s.Begin(t.Context(), record.StepResult, "other")
	require.ErrorAs(t, err, &invalid)
	_, err = s.Begin(t.Context(), record.StepSleep, "failing")
	require.ErrorAs(t, err, &invalid)
	_, err = s.Begin(t.Context(), record.StepResult, "failing")
	require.NoError(t, err)
}
