package recurrence

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"codeq/internal/container/timeheap"
	"codeq/internal/keys"
)

// Table holds the schedules of a shard. Only its owner uses it.
//
// Invariant: each schedule in list is in exactly one of waiting and late. Those in late were due
// when their last turn ended.
type Table struct {
	list    []*Schedule              // by name
	waiting timeheap.Heap[*Schedule] // those that wait for their next tick
	late    []*Schedule              // by the times of their last turns; some are gone
	Turns   uint64                   // how often a schedule got one
}

func (t *Table) search(name string) (int, bool) {
	return slices.BinarySearchFunc(t.list, name, func(r *Schedule, name string) int { return cmp.Compare(r.Name, name) })
}

// Find returns the schedule with a name; nil if there is none.
func (t *Table) Find(name string) *Schedule {
	if i, ok := t.search(name); ok {
		return t.list[i]
	}
	return nil
}

// Put adds a schedule, in place of the one with its name.
func (t *Table) Put(r *Schedule) {
	r.place = -1
	i, ok := t.search(r.Name)
	if ok {
		t.drop(t.list[i])
		t.list[i] = r
	} else {
		t.list = slices.Insert(t.list, i, r)
	}
	t.waiting.Push(r)
}

// Remove removes a schedule. REQUIRES: it exists.
func (t *Table) Remove(name string) {
	i, _ := t.search(name)
	t.drop(t.list[i])
	t.list = slices.Delete(t.list, i, i+1)
}

// After returns the schedules after a name, in the order of their names.
func (t *Table) After(name string) []*Schedule {
	from, found := t.search(name)
	if found {
		from++
	}
	return t.list[from:]
}

// drop excludes a schedule from further turns.
func (t *Table) drop(r *Schedule) {
	r.gone = true
	t.waiting.Remove(r)
}

// Due returns when the next schedule gets a turn; 0: now, Never: none does. Wall clock, ms.
func (t *Table) Due() uint64 {
	if len(t.late) > 0 {
		return 0
	}
	return t.waiting.Next()
}

// NextTick returns the next tick of all schedules, which may be past; Never: there is none. Wall
// clock, ms.
func (t *Table) NextTick() uint64 {
	next := t.waiting.Next()
	for _, r := range t.late {
		if !r.gone {
			next = min(next, r.Next)
		}
	}
	return next
}

// Take returns the schedule with the turn, and removes it from waiting or late; nil: none is due.
// The schedule that has waited longest for its turn gets it: one with a year of missed ticks does
// not delay the others.
func (t *Table) Take(wall uint64) *Schedule {
	for len(t.late) > 0 {
		if t.waiting.Next() <= min(wall, t.late[0].turned) {
			break
		}
		r := t.late[0]
		t.late[0] = nil
		t.late = t.late[1:]
		if !r.gone {
			return r
		}
	}
	if t.waiting.Next() > wall {
		return nil
	}
	return t.waiting.Pop()
}

// Turn puts back a schedule from Take, after its turn.
func (t *Table) Turn(r *Schedule, wall uint64) {
	t.Turns++
	if r.Next > wall {
		t.waiting.Push(r)
		return
	}
	r.turned = wall
	t.late = append(t.late, r)
}

// Check compares the table with disk, for tests, and returns the differences: it has exactly the
// stored schedules, and none ticks before the time of the next turn. scan visits the range.
func (t *Table) Check(scan func(visit func(key, value []byte) error) error) (errs []error) {
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	onDisk := 0
	if err := scan(func(key, value []byte) error {
		name, err := keys.ParseSchedule(key)
		if err != nil {
			return err
		}
		onDisk++
		r := t.Find(name)
		if r == nil || !bytes.Equal(value, r.Value.Append(nil)) {
			report("schedule %q in memory is %+v, on disk %x", name, r, value)
			return nil
		}
		if r.Err == nil && !r.Value.Paused && r.Next != r.Times.Next(r.Value.After) || r.Value.Paused && r.Next != Never || t.Due() > r.Next {
			report("schedule %q ticks at %d, is looked at when it is %d", name, r.Next, t.Due())
		}
		if late := slices.Contains(t.late, r); late == (r.place >= 0) || !late && t.waiting.Items()[r.place] != r {
			report("schedule %q is at %d of those that wait, late: %v", name, r.place, late)
		}
		return nil
	}); err != nil {
		report("schedules: %w", err)
	}
	if onDisk != len(t.list) {
		report("%d schedules in memory, %d on disk", len(t.list), onDisk)
	}
	return errs
}
