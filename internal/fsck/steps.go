package fsck

import (
	"errors"
	"fmt"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// foundSteps is what lies beside the record of an unended task.
type foundSteps struct {
	number uint32 // of steps that follow each other
	size   int    // of them, in bytes
	beside uint8  // as Head.Beside, without Awaits
}

// stepRow is an entry of the range Step.
type stepRow struct {
	id     taskID
	number uint32
	size   int   // of a step
	beside uint8 // it is no step: what the bit of Head.Beside is for
}

func parseStepRow(key, value []byte) (row stepRow, err error) {
	id, number, err := keys.ParseStep(key)
	if err != nil {
		return row, err
	}
	row = stepRow{id: taskID(id), number: uint32(number)}
	switch number {
	case keys.SignalsNumber:
		row.beside = record.HasSignals
		_, err = record.ParseSignals(value)
		return row, err
	case keys.CursorsNumber:
		row.beside = record.HasCursors
		_, err = record.ParseCursors(value)
		return row, err
	}
	step, err := record.ParseStep(value)
	row.size = step.Size()
	return row, err
}

// add adds a row. It returns an error, and does not add it, if no shard adds it to the others.
func (f *foundSteps) add(row *stepRow) error {
	switch {
	case row.beside != 0:
		f.beside |= row.beside
	case row.number != f.number:
		return fmt.Errorf("step %d of task %s follows %d others", row.number, row.id, f.number)
	case row.number >= record.MaxSteps || f.size+row.size > record.MaxStepBytes:
		return fmt.Errorf("step %d of task %s exceeds the bounds, with %d bytes after %d", row.number, row.id, row.size, f.size)
	default:
		f.number++
		f.size += row.size
	}
	return nil
}

func (c *checker) beside(key, value []byte) error {
	row, err := parseStepRow(key, value)
	if err != nil {
		c.report("key %x: %w", key, err)
		return nil
	}
	if st := c.seen[row.id]; st == nil || st.ended() {
		c.report("key %x belongs to task %s, which has ended: %+v", key, row.id, st)
	}
	found := c.steps[row.id]
	if err := found.add(&row); err != nil {
		c.report("%w", err)
	}
	c.steps[row.id] = found
	return nil
}

// finishSteps compares what lies beside the record of a task with the record.
func (c *checker) finishSteps(id taskID, st *checkedTask) {
	found := c.steps[id]
	if n := found.number; st.Steps > n || st.Steps < n && !st.leased {
		c.report("task %s at %+v has %d steps, its record says %d", id, st.Place, n, st.Steps)
	}
	if unsaid := found.beside &^ st.Beside; unsaid != 0 && !st.leased {
		c.report("task %s at %+v has signals or cursors (%x), its record says that it has none", id, st.Place, unsaid)
	}
}

// copySteps copies the steps of unended tasks, as far as none is missing, their signals and
// cursors: a task goes on after the last step. It waits for a signal only if none is missing.
func (b *rebuilder) copySteps() error {
	all := make(map[taskID]foundSteps)
	if err := b.old.scan(keys.Step, func(key, value []byte) {
		row, err := parseStepRow(key, value)
		t := b.tasks[row.id]
		if err != nil || t == nil || t.ended() {
			return
		}
		found := all[row.id]
		if found.add(&row) == nil {
			all[row.id] = found
			b.set(key, value)
		}
	}); err != nil {
		return err
	}
	var errs []error
	for id, t := range b.tasks {
		errs = append(errs, b.noteSteps(id, t, all[id]))
	}
	return errors.Join(errs...)
}

// noteSteps makes the record of a task say what lies beside it.
func (b *rebuilder) noteSteps(id taskID, t *rebuiltTask, found foundSteps) error {
	beside := found.beside
	if found.number == t.Steps {
		beside |= t.Beside & record.Awaits
	}
	if found.number == t.Steps && beside == t.Beside {
		return nil
	}
	t.Steps, t.Beside = found.number, beside
	return b.rewrite(id, t, func(rec *record.Record) {
		rec.Steps, rec.Beside, rec.Rewritten = t.Steps, beside, rec.Rewritten || t.Range == keys.Task
	})
}
