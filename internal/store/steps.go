package store

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Steps reads, adds and deletes the finished steps of unended tasks.
type Steps struct {
	reader RangeReader
	any    bool                 // the store may have some
	added  map[keys.ID]struct{} // tasks that have got steps in the group: reader does not see them
}

// NewSteps returns the steps of a store, which are not loaded.
func NewSteps(in *Reads) Steps {
	return Steps{reader: in.Range(keys.Step), added: make(map[keys.ID]struct{})}
}

// Load reads whether there are steps.
func (st *Steps) Load() error {
	lower, upper := keys.Range(keys.Step)
	return st.reader.in.Walk(lower, upper, func(*pebble.Iterator, int) (bool, error) {
		st.any = true
		return false, nil
	})
}

// HasAny reports whether the store may have steps.
func (st *Steps) HasAny() bool { return st.any }

// HasAdded reports whether the group adds steps of a task, which are not read before it has
// persisted.
func (st *Steps) HasAdded(id keys.ID) bool { return len(st.added) > 0 && st.hasAdded(id) }

func (st *Steps) hasAdded(id keys.ID) bool {
	_, ok := st.added[id]
	return ok
}

// Add writes a step.
func (st *Steps) Add(w *Writes, id keys.ID, number uint32, step *record.Step) {
	w.Set(keys.AppendStep(nil, id, uint16(number)), step.Append(nil))
	st.any = true
	st.added[id] = struct{}{}
}

// Delete deletes the first n steps of a task.
func (st *Steps) Delete(w *Writes, id keys.ID, n uint32) {
	var key [keys.StepLen]byte
	for i := range n {
		w.Delete(keys.AppendStep(key[:0], id, uint16(i)))
	}
}

// Count returns how many steps a task has. REQUIRES: the group has not added any.
func (st *Steps) Count(id keys.ID) (uint32, error) {
	if !st.any {
		return 0, nil
	}
	it, err := st.reader.Open()
	if err != nil {
		return 0, err
	}
	first, end := keys.AppendStep(nil, id, 0), keys.AppendStep(nil, id, record.MaxSteps)
	st.reader.in.NoteRead(0)
	if it.SeekLTWithLimit(end, first) != pebble.IterValid {
		return 0, Error(it.Error())
	}
	_, number, err := keys.ParseStep(it.Key())
	if err != nil {
		return 0, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return uint32(number) + 1, nil
}

// Of returns the steps of a task, in order. REQUIRES: as for Count.
func (st *Steps) Of(id keys.ID) ([]record.Step, error) {
	it, err := st.reader.Open()
	if err != nil {
		return nil, err
	}
	return readSteps(it, id, st.reader.in.NoteRead)
}

// StepsOf returns the finished steps of an unended task, in order.
func StepsOf(r pebble.Reader, id keys.ID) ([]record.Step, error) {
	lower, upper := keys.AppendStep(nil, id, 0), keys.AppendStep(nil, id, record.MaxSteps)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return nil, Error(err)
	}
	steps, err := readSteps(it, id, func(int) {})
	if closeErr := it.Close(); err == nil {
		err = Error(closeErr)
	}
	return steps, err
}

func readSteps(it *pebble.Iterator, id keys.ID, note func(bytes int)) (steps []record.Step, err error) {
	end := keys.AppendStep(nil, id, record.MaxSteps)
	at := it.SeekGEWithLimit(keys.AppendStep(nil, id, 0), end)
	for ; at == pebble.IterValid; at = it.NextWithLimit(end) {
		value, err := it.ValueAndErr()
		if err != nil {
			return nil, Error(err)
		}
		note(len(value))
		_, number, err := keys.ParseStep(it.Key())
		if err == nil && int(number) != len(steps) {
			err = fmt.Errorf("step %d of task %s follows %d others", number, keys.FormatID(id), len(steps))
		}
		var step record.Step
		if err == nil {
			step, err = record.ParseStep(value)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		steps = append(steps, step)
	}
	return steps, Error(it.Error())
}

// Close ends the use of the store for this group.
func (st *Steps) Close() {
	st.reader.Close()
	if len(st.added) > 0 {
		clear(st.added)
	}
}
