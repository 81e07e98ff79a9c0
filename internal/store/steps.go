package store

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Steps reads, adds and deletes the finished steps of unended tasks, their signals and cursors.
type Steps struct {
	reader RangeReader
	any    bool                 // the store may have some
	added  map[keys.ID]struct{} // tasks that have got some in the group: reader does not see them
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

// HasAny reports whether the store may have any.
func (st *Steps) HasAny() bool { return st.any }

// HasAdded reports whether the group adds some of a task, which are not read before it has
// persisted.
func (st *Steps) HasAdded(id keys.ID) bool { return len(st.added) > 0 && st.hasAdded(id) }

func (st *Steps) hasAdded(id keys.ID) bool {
	_, ok := st.added[id]
	return ok
}

// Add writes a step.
func (st *Steps) Add(w *Writes, id keys.ID, number uint32, step *record.Step) {
	st.set(w, id, uint16(number), step.Append(nil))
}

// SetSignals writes the signals of a task.
func (st *Steps) SetSignals(w *Writes, id keys.ID, signals record.Signals) {
	st.set(w, id, keys.SignalsNumber, signals.Append(nil))
}

// SetCursors writes the encoded cursors of a task.
func (st *Steps) SetCursors(w *Writes, id keys.ID, cursors []byte) {
	st.set(w, id, keys.CursorsNumber, cursors)
}

func (st *Steps) set(w *Writes, id keys.ID, number uint16, value []byte) {
	w.Set(keys.AppendStep(nil, id, number), value)
	st.any = true
	st.added[id] = struct{}{}
}

// Delete deletes what lies beside the record of a task, as the record says.
func (st *Steps) Delete(w *Writes, id keys.ID, h *record.Head) {
	var key [keys.StepLen]byte
	for i := range h.Steps {
		w.Delete(keys.AppendStep(key[:0], id, uint16(i)))
	}
	if h.Beside&record.HasSignals != 0 {
		w.Delete(keys.AppendStep(key[:0], id, keys.SignalsNumber))
	}
	if h.Beside&record.HasCursors != 0 {
		w.Delete(keys.AppendStep(key[:0], id, keys.CursorsNumber))
	}
	h.Steps, h.Beside = 0, 0
}

// Signals returns the signals of a task. REQUIRES: as for Count.
func (st *Steps) Signals(id keys.ID) (record.Signals, error) {
	b, err := st.reader.Lookup(keys.AppendStep(nil, id, keys.SignalsNumber))
	return signalsIn(id, b, err)
}

// Cursors returns the cursors of a task. REQUIRES: as for Count.
func (st *Steps) Cursors(id keys.ID) (record.Cursors, error) {
	b, err := st.reader.Lookup(keys.AppendStep(nil, id, keys.CursorsNumber))
	return cursorsIn(id, b, err)
}

// Step returns a step of a task; zero: there is no such step. REQUIRES: as for Count.
func (st *Steps) Step(id keys.ID, number uint32) (step record.Step, err error) {
	b, err := st.reader.Lookup(keys.AppendStep(nil, id, uint16(number)))
	if b == nil || err != nil {
		return step, err
	}
	if step, err = record.ParseStep(b); err != nil {
		err = fmt.Errorf("%w: step %d of task %s: %w", base.ErrCorrupt, number, keys.FormatID(id), err)
	}
	return step, err
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

// SignalsOf returns the signals of an unended task.
func SignalsOf(r pebble.Reader, id keys.ID) (record.Signals, error) {
	b, err := Lookup(r, keys.AppendStep(nil, id, keys.SignalsNumber))
	return signalsIn(id, b, err)
}

func signalsIn(id keys.ID, b []byte, err error) (s record.Signals, _ error) {
	if b == nil || err != nil {
		return nil, err
	}
	if s, err = record.ParseSignals(b); err != nil {
		err = fmt.Errorf("%w: signals of task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
	}
	return s, err
}

// CursorsOf returns the cursors of an unended task.
func CursorsOf(r pebble.Reader, id keys.ID) (record.Cursors, error) {
	b, err := Lookup(r, keys.AppendStep(nil, id, keys.CursorsNumber))
	return cursorsIn(id, b, err)
}

func cursorsIn(id keys.ID, b []byte, err error) (c record.Cursors, _ error) {
	if b == nil || err != nil {
		return nil, err
	}
	if c, err = record.ParseCursors(b); err != nil {
		err = fmt.Errorf("%w: cursors of task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
	}
	return c, err
}

// Close ends the use of the store for this group.
func (st *Steps) Close() {
	st.reader.Close()
	if len(st.added) > 0 {
		clear(st.added)
	}
}
