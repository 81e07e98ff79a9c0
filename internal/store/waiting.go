package store

import (
	"bytes"
	"fmt"
	"unsafe"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Waiting reads the tasks that wait in scopes, in the order of their IDs. For some scopes it holds
// the first of them, so that a turn passes to the next task without reading disk, and a lower bound
// of the IDs, so that scans do not step over the tombstones of earlier tasks.
type Waiting struct {
	RangeReader
	byScope map[uint64]*scanCursor
	group   uint64 // counts groups
	bytes   int    // of everything in ahead
}

// NewWaiting returns the reader of the tasks that wait.
func NewWaiting(in *Reads) Waiting { return Waiting{RangeReader: in.Range(keys.Blocked), group: 1} }

// scanCursor is the cursor of a scope.
//
// Invariant: no task that waits in the scope has an ID before id; ahead has the first of them as
// the group leaves them.
type scanCursor struct {
	id keys.ID
	// low is the smallest ID of the tasks that began to wait in group, which disk does not have
	// yet.
	low   keys.ID
	group uint64
	ahead []Waiter
	all   bool // no other task waits
}

// Waiter is a task that waits in a scope, and the value of its entry.
type Waiter struct {
	ID    keys.ID
	Value []byte
}

func (w *Waiter) size() int { return int(unsafe.Sizeof(*w)) + cap(w.Value) }

// The limits of waiting tasks in memory.
const (
	cursorsCap   = 1 << 14 // scopes, between two groups
	WaitersAhead = 16      // tasks of a scope
	waitersCap   = 8 << 20 // bytes in all, and one task
)

// Visit visits the tasks that wait in a scope of a queue, until visit returns false or an error; n
// counts them. REQUIRES: if visit returns true, this group moves the task elsewhere; the group has
// changed nothing in the scope before.
func (t *Waiting) Visit(queue uint32, scope uint64, visit func(n int, w Waiter) (bool, error)) error {
	f := t.at(scope)
	n := 0
	for ; len(f.ahead) > 0; n++ {
		if more, err := visit(n, f.ahead[0]); err != nil || !more {
			return err
		}
		t.pop(f)
	}
	if f.all {
		return nil
	}
	lower := keys.AppendGrouped(nil, keys.Blocked, queue, scope, f.id)
	upper := keys.GroupEnd(keys.AppendGroup(nil, keys.Blocked, queue, scope))
	it, err := t.Open()
	if err != nil {
		return err
	}
	ahead := false // the following tasks are not visited, but held for later
	state := it.SeekGEWithLimit(lower, upper)
	for ; state == pebble.IterValid; state = it.NextWithLimit(upper) {
		_, _, id, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return err
		}
		value, err := t.value()
		if err != nil {
			return err
		}
		w := Waiter{id, value}
		if !ahead {
			more, err := visit(n, w)
			if err != nil {
				return err
			}
			if more {
				t.advance(f, after(w.ID))
				n++
				continue
			}
			t.advance(f, w.ID)
			ahead = true
		}
		// tasks that began to wait in this group may come before it
		if f.group == t.group || !t.hold(f, w) {
			return nil
		}
	}
	if err := it.Error(); err != nil {
		return Error(err)
	}
	f.all = f.group != t.group
	return nil
}

// Take removes the first task of a scope from memory, if memory has it.
// REQUIRES: the task is moved elsewhere in this group.
func (t *Waiting) Take(scope uint64) (w Waiter, ok bool) {
	f := t.byScope[scope]
	if f == nil || len(f.ahead) == 0 {
		return w, false
	}
	w = f.ahead[0]
	t.pop(f)
	return w, true
}

// at returns the cursor of a scope, and creates it if it is missing.
func (t *Waiting) at(scope uint64) *scanCursor {
	if t.byScope == nil {
		t.byScope = make(map[uint64]*scanCursor)
	}
	f := t.byScope[scope]
	if f == nil {
		f = new(scanCursor)
		t.byScope[scope] = f
	}
	return f
}

// Begin is called for a scope without waiting tasks.
func (t *Waiting) Begin(scope uint64) {
	f := t.at(scope)
	t.drop(f)
	f.all = true
}

// IsEmpty reports whether memory shows that no task waits in a scope.
func (t *Waiting) IsEmpty(scope uint64) bool {
	f := t.byScope[scope]
	return f != nil && f.all && len(f.ahead) == 0
}

// Add is called for a task that begins to wait.
func (t *Waiting) Add(scope uint64, id keys.ID, value []byte) {
	f := t.at(scope)
	if f.group != t.group || bytes.Compare(id[:], f.low[:]) < 0 {
		f.low, f.group = id, t.group
	}
	if bytes.Compare(id[:], f.id[:]) < 0 {
		f.id = id
	}
	last := len(f.ahead) - 1
	switch {
	case last >= 0 && bytes.Compare(id[:], f.ahead[last].ID[:]) < 0:
		t.drop(f)
	case f.all:
		f.all = t.hasRoom(f) && t.hold(f, Waiter{id, bytes.Clone(value)})
	}
}

func (t *Waiting) hasRoom(f *scanCursor) bool {
	return len(f.ahead) < WaitersAhead && t.bytes < waitersCap
}

// hold appends the task that waits behind those that are held. It returns false if memory has no
// room for it.
func (t *Waiting) hold(f *scanCursor, w Waiter) bool {
	if !t.hasRoom(f) {
		return false
	}
	f.ahead = append(f.ahead, w)
	t.bytes += w.size()
	return true
}

// pop removes the first task that is held, and moves the cursor behind it.
func (t *Waiting) pop(f *scanCursor) {
	w := &f.ahead[0]
	t.advance(f, after(w.ID))
	t.bytes -= w.size()
	*w = Waiter{}
	if f.ahead = f.ahead[1:]; len(f.ahead) == 0 {
		f.ahead = nil
	}
}

// advance moves the cursor of a scope: among the tasks on disk, none waits before id.
func (t *Waiting) advance(f *scanCursor, id keys.ID) {
	if f.id = id; f.group == t.group && bytes.Compare(f.low[:], id[:]) < 0 {
		f.id = f.low
	}
}

// Forget is called when a waiting task of a scope changes, or leaves without being the first.
func (t *Waiting) Forget(scope uint64) {
	if f := t.byScope[scope]; f != nil {
		t.drop(f)
	}
}

func (t *Waiting) drop(f *scanCursor) {
	for i := range f.ahead {
		t.bytes -= f.ahead[i].size()
	}
	f.ahead, f.all = nil, false
}

// Next begins a group, and limits the memory.
func (t *Waiting) Next() {
	t.group++
	for scope, f := range t.byScope {
		switch {
		case len(t.byScope) > cursorsCap:
			t.drop(f)
			delete(t.byScope, scope)
		// perhaps of an inactive scope
		case t.bytes >= waitersCap && len(f.ahead) > 0:
			t.drop(f)
			return
		case t.bytes < waitersCap:
			return
		}
	}
}

// after returns the ID that follows another one.
func after(id keys.ID) keys.ID {
	for i := len(id) - 1; i >= 0; i-- {
		if id[i]++; id[i] != 0 {
			break
		}
	}
	return id
}

// Check compares memory with disk, for tests, and returns the differences.
func (t *Waiting) Check(disk pebble.Reader) (errs []error) {
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	waiting := make(map[uint64]int)
	if err := Scan(disk, keys.Blocked, func(key, value []byte) error {
		_, scope, id, err := keys.ParseGrouped(key)
		if f, n := t.byScope[scope], waiting[scope]; f != nil {
			switch {
			case n < len(f.ahead) && (f.ahead[n].ID != id || !bytes.Equal(f.ahead[n].Value, value)):
				report("task %s waits in scope %x at %d, where memory has %s", keys.FormatID(id), scope, n, keys.FormatID(f.ahead[n].ID))
			case n >= len(f.ahead) && f.all:
				report("task %s waits in scope %x behind the last that memory has", keys.FormatID(id), scope)
			}
		}
		waiting[scope]++
		if cursor := t.cursorOf(scope); bytes.Compare(id[:], cursor[:]) < 0 {
			report("task %s waits in scope %x before its cursor %s", keys.FormatID(id), scope, keys.FormatID(cursor))
		}
		return err
	}); err != nil {
		report("waiting tasks: %w", err)
	}
	held := 0
	for scope, f := range t.byScope {
		if n := waiting[scope]; n < len(f.ahead) {
			report("%d tasks wait in scope %x, memory has %d", n, scope, len(f.ahead))
		}
		for i := range f.ahead {
			held += f.ahead[i].size()
		}
	}
	if held != t.bytes {
		report("tasks that wait take %d bytes of memory, counted are %d", held, t.bytes)
	}
	return errs
}

// cursorOf is the cursor of a scope: no task with a smaller ID waits there.
func (t *Waiting) cursorOf(scope uint64) keys.ID {
	if f := t.byScope[scope]; f != nil {
		return f.id
	}
	return keys.ID{}
}

// Scopes visits the scopes of a queue in which tasks wait, as stored, from the first one to the
// last one.
func (r *Reads) Scopes(queue uint32, first, last uint64, visit func(scope uint64)) error {
	keyOf := func(scope uint64) []byte { return keys.AppendGroup(nil, keys.Blocked, queue, scope) }
	it, err := r.Store.DB().NewIter(&pebble.IterOptions{LowerBound: keyOf(first), UpperBound: keys.GroupEnd(keyOf(last))})
	if err != nil {
		return Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	r.NoteRead(0)
	for valid := it.First(); valid; {
		r.NoteRead(0)
		_, scope, _, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		visit(scope)
		valid = it.SeekGE(keys.GroupEnd(keyOf(scope)))
	}
	return Error(it.Error())
}
