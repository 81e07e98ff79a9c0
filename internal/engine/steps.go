package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The finished steps of a task lie beside its record, so that a step costs one key and no rewrite
// of the record. They stay there from attempt to attempt, and go into the record of a task that is
// kept when it has ended.
//
// Invariant: an unended task has the steps 0 to n-1. Its record has n, or less while it is leased.

// StoreStep stores the result of a step. The same step of the same lease is stored once: its answer
// may have been lost.
func (le *leases) StoreStep(r Receipt, number uint32, step *record.Step) error {
	ls := le.held(r)
	if ls == nil {
		return le.leaseLost(r)
	}
	return le.addStep(ls, number, step)
}

func (le *leases) addStep(ls *lease, number uint32, step *record.Step) error {
	if le.Format < keys.FormatOfSteps {
		return fmt.Errorf("%w: the shard has format %d, and steps need %d", base.ErrFormat, le.Format, keys.FormatOfSteps)
	}
	n, err := le.countSteps(ls)
	if err != nil {
		le.Broken = err
		return nil
	}
	switch number {
	case n:
	case n - 1:
		return nil
	default:
		return &base.Invalid{Field: "step", Value: number, Limit: fmt.Sprint(n)}
	}
	if n == record.MaxSteps {
		return &base.Invalid{Field: "steps of a task", Value: n + 1, Limit: fmt.Sprint("at most ", record.MaxSteps)}
	}
	step.At = le.mint.Now()
	le.steps.Add(&le.Group.Writes, ls.id, n, step)
	le.stepsOf[ls.id] = int32(n + 1)
	return nil
}

// countSteps returns how many steps of a leased task are finished.
func (le *leases) countSteps(ls *lease) (uint32, error) {
	n := le.stepsOf[ls.id]
	if n < 0 {
		found, err := le.steps.Count(ls.id)
		if err != nil {
			return 0, err
		}
		n = int32(found)
		le.stepsOf[ls.id] = n
	}
	return uint32(n), nil
}

// dropSteps deletes the steps of a leased task that ends.
func (le *leases) dropSteps(ls *lease) error {
	if len(le.stepsOf) == 0 {
		return nil
	}
	n, err := le.countSteps(ls)
	le.steps.Delete(&le.Group.Writes, ls.id, n)
	return err
}

// keepSteps moves the steps of a task that ends, as many as its record says, to the record.
// REQUIRES: the group has not added any.
func (le *leases) keepSteps(id keys.ID, rec *record.Record) (err error) {
	if rec.Steps == 0 {
		return nil
	}
	if rec.Kept, err = le.steps.Of(id); err == nil && len(rec.Kept) != int(rec.Steps) {
		err = fmt.Errorf("%w: task %s has %d steps, and not %d", base.ErrCorrupt, keys.FormatID(id), len(rec.Kept), rec.Steps)
	}
	if err != nil {
		return err
	}
	le.steps.Delete(&le.Group.Writes, id, rec.Steps)
	rec.Steps = 0
	return nil
}

// restoreSteps moves the steps of a kept task back beside its record: it goes on.
func (le *leases) restoreSteps(id keys.ID, rec *record.Record) {
	for i := range rec.Kept {
		le.steps.Add(&le.Group.Writes, id, uint32(i), &rec.Kept[i])
	}
	rec.Steps, rec.Kept = uint32(len(rec.Kept)), nil
}
