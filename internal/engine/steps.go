package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The finished steps of a task lie beside its record, so that a step costs one key and no rewrite
// of the record. They stay there from attempt to attempt, and go into the record of a task that is
// kept when it has ended. Its signals lie there too, as one value, and its cursors, which are kept.
//
// Invariant: an unended task has the steps 0 to n-1. Its record has n, or less while it is leased.
// If it is not leased and has signals or cursors, its record says so.

// leaseSteps is what lies beside the record of a leased task.
type leaseSteps struct {
	steps  int32 // how many are finished; negative: not known
	beside uint8 // as Head.Beside, without Awaits
}

// StoreStep stores the result of a step or, in its place, encoded cursors, which replace those
// before. The same step of the same lease is stored once: its answer may have been lost.
func (le *leases) StoreStep(r Receipt, number uint32, step *record.Step, cursors []byte) error {
	ls := le.held(r)
	if ls == nil {
		return le.leaseLost(r)
	}
	if cursors != nil {
		return le.setCursors(ls, cursors)
	}
	if n, err := le.countSteps(ls); err == nil && number+1 == n {
		return nil
	}
	return le.addStep(ls, number, step)
}

func (le *leases) setCursors(ls *lease, cursors []byte) error {
	if le.Format < keys.FormatOfSteps {
		return le.noSteps()
	}
	of := le.stepsOf[ls.id]
	of.beside |= record.HasCursors
	le.stepsOf[ls.id] = of
	le.steps.SetCursors(&le.Group.Writes, ls.id, cursors)
	return nil
}

// addStep adds a step. One that waits for a signal becomes one with its value if it has come.
func (le *leases) addStep(ls *lease, number uint32, step *record.Step) error {
	if le.Format < keys.FormatOfSteps {
		return le.noSteps()
	}
	n, err := le.countSteps(ls)
	switch {
	case le.fails(err):
		return nil
	case number != n:
		return &base.Invalid{Field: "step", Value: number, Limit: fmt.Sprint(n)}
	case n == record.MaxSteps:
		return &base.Invalid{Field: "steps of a task", Value: n + 1, Limit: fmt.Sprint("at most ", record.MaxSteps)}
	}
	beside := le.stepsOf[ls.id].beside
	if step.Kind == record.StepNoSignal && beside&record.HasSignals != 0 {
		signals, err := le.steps.Signals(ls.id)
		if le.fails(err) {
			return nil
		}
		if value, ok := signals.Take(step.Name); ok {
			step.Kind, step.Result = record.StepSignal, value
			le.steps.SetSignals(&le.Group.Writes, ls.id, signals)
		}
	}
	step.At = le.mint.Now()
	le.steps.Add(&le.Group.Writes, ls.id, n, step)
	le.stepsOf[ls.id] = leaseSteps{int32(n + 1), beside}
	return nil
}

func (le *leases) noSteps() error {
	return fmt.Errorf("%w: the shard has format %d, and steps need %d", base.ErrFormat, le.Format, keys.FormatOfSteps)
}

// countSteps returns how many steps of a leased task are finished.
func (le *leases) countSteps(ls *lease) (uint32, error) {
	of := le.stepsOf[ls.id]
	if of.steps < 0 {
		found, err := le.steps.Count(ls.id)
		if err != nil {
			return 0, err
		}
		of.steps = int32(found)
		le.stepsOf[ls.id] = of
	}
	return uint32(of.steps), nil
}

// noteSteps sets, in the head of a leased task, what lies beside its record.
func (le *leases) noteSteps(ls *lease, h *record.Head) (err error) {
	h.Beside = le.stepsOf[ls.id].beside
	h.Steps, err = le.countSteps(ls)
	return err
}

// dropSteps deletes the steps of a leased task that ends.
func (le *leases) dropSteps(ls *lease) error {
	if len(le.stepsOf) == 0 {
		return nil
	}
	var h record.Head
	err := le.noteSteps(ls, &h)
	le.steps.Delete(&le.Group.Writes, ls.id, &h)
	return err
}

// keepSteps moves the steps and cursors of a task that ends, as its record says, to the record, and
// deletes its signals. REQUIRES: the group has not added any.
func (le *leases) keepSteps(id keys.ID, rec *record.Record) (err error) {
	if rec.Steps > 0 {
		if rec.Kept, err = le.steps.Of(id); err == nil && len(rec.Kept) != int(rec.Steps) {
			err = fmt.Errorf("%w: task %s has %d steps, and not %d", base.ErrCorrupt, keys.FormatID(id), len(rec.Kept), rec.Steps)
		}
	}
	if err == nil && rec.Beside&record.HasCursors != 0 {
		rec.Cursors, err = le.steps.Cursors(id)
	}
	le.steps.Delete(&le.Group.Writes, id, &rec.Head)
	return err
}

// restoreSteps moves the steps and cursors of a kept task back beside its record: it goes on.
func (le *leases) restoreSteps(id keys.ID, rec *record.Record) {
	for i := range rec.Kept {
		le.steps.Add(&le.Group.Writes, id, uint32(i), &rec.Kept[i])
	}
	if taken := record.TakenSignals(rec.Kept); len(taken) > 0 {
		le.steps.SetSignals(&le.Group.Writes, id, taken)
		rec.Beside |= record.HasSignals
	}
	if len(rec.Cursors) > 0 {
		le.steps.SetCursors(&le.Group.Writes, id, rec.Cursors.Append(nil))
		rec.Beside |= record.HasCursors
	}
	rec.Steps, rec.Kept, rec.Cursors = uint32(len(rec.Kept)), nil, nil
}

// signalsOf returns the signals of a task and, if it is suspended until something comes, the step
// that it waits in. It sets what the head of a leased task says.
func (le *leases) signalsOf(at *located) (signals record.Signals, last record.Step, err error) {
	h := &at.rec.Head
	if at.lease != nil {
		err = le.noteSteps(at.lease, h)
	}
	if err == nil && h.Beside&record.HasSignals != 0 {
		signals, err = le.steps.Signals(at.id)
	}
	if err == nil && h.Beside&record.Awaits != 0 {
		last, err = le.steps.Step(at.id, h.Steps-1)
	}
	return signals, last, err
}
