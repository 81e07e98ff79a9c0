package store

import (
	"cmp"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// TaskWrites collects the new tasks of a group, and removals of tasks with keys that are never
// written again. They are written in the order of their keys.
type TaskWrites struct {
	ops       []taskOp
	bytes     int    // of the records
	lane      uint32 // of the last one
	scattered bool   // they are of several lanes
}

// TaskKey is the key of a task in a lane.
type TaskKey struct {
	Lane  uint32
	Since uint64
	ID    keys.ID
}

// compare is the order of the keys of tasks in their first places.
func (k *TaskKey) compare(o *TaskKey) int {
	if k.Lane != o.Lane {
		return cmp.Compare(k.Lane, o.Lane)
	}
	return cmp.Compare(k.Since, o.Since)
}

// taskOp writes a new task to its first place, or removes it from there for good.
type taskOp struct {
	TaskKey
	rec []byte // nil: it is removed
}

// Len returns how many tasks are written or removed.
func (t *TaskWrites) Len() int { return len(t.ops) }

// Bytes returns the size of the records.
func (t *TaskWrites) Bytes() int { return t.bytes }

// At returns a task and its record; nil: it is removed.
func (t *TaskWrites) At(i int) (id keys.ID, rec []byte) { return t.ops[i].ID, t.ops[i].rec }

// Add writes a new task.
func (t *TaskWrites) Add(lane uint32, since uint64, id keys.ID, rec []byte) {
	t.add(taskOp{TaskKey{lane, since, id}, rec})
	t.bytes += len(rec)
}

// Remove removes a task.
func (t *TaskWrites) Remove(lane uint32, since uint64, id keys.ID) {
	t.add(taskOp{TaskKey: TaskKey{lane, since, id}})
}

func (t *TaskWrites) add(op taskOp) {
	if op.Lane != t.lane {
		t.scattered = t.scattered || len(t.ops) > 0
		t.lane = op.Lane
	}
	t.ops = append(t.ops, op)
}

// Flush adds the tasks to the batch, before all later writes. In one lane, the new tasks and the
// removed ones were each collected in the order of their IDs.
func (t *TaskWrites) Flush(w *Writes) {
	if t.scattered {
		slices.SortFunc(t.ops, func(a, b taskOp) int { return a.compare(&b.TaskKey) })
		for i := range t.ops {
			if op := &t.ops[i]; op.rec != nil {
				w.SetTask(op.Lane, op.Since, op.ID, op.rec)
			} else {
				w.DeleteTask(op.Lane, op.Since, op.ID, true)
			}
		}
	} else {
		if base.Invariants {
			t.assertAscending()
		}
		for i := range t.ops {
			if op := &t.ops[i]; op.rec != nil {
				w.SetTask(op.Lane, op.Since, op.ID, op.rec)
			}
		}
		for i := range t.ops {
			if op := &t.ops[i]; op.rec == nil {
				w.DeleteTask(op.Lane, op.Since, op.ID, true)
			}
		}
	}
	t.Clear()
}

// Clear drops the tasks.
func (t *TaskWrites) Clear() {
	clear(t.ops)
	t.ops, t.bytes, t.scattered = t.ops[:0], 0, false
}

// assertAscending: the new tasks of a lane have ascending keys.
func (t *TaskWrites) assertAscending() {
	var last *TaskKey
	for i := range t.ops {
		op := &t.ops[i]
		if op.rec == nil {
			continue
		}
		if last != nil && !(last.compare(&op.TaskKey) < 0) {
			base.Violated("new task %x comes after task %x", op.ID, last.ID)
		}
		last = &op.TaskKey
	}
}
