package engine

import (
	"bytes"
	"unsafe"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// The tasks that wait in a scope are on disk, in the order of IDs. Memory has the first of them, so
// that a turn passes to the next task without reading disk.

// waiting visits the tasks that wait in a scope, in the order of their IDs, until visit returns
// false. REQUIRES: if visit returns true, this group moves the task elsewhere; the group has
// changed nothing in the scope before.
func (ti *ties) waiting(q *Queue, scope uint64, visit func(n int, at *located) bool) error {
	f := ti.cursors.at(scope)
	n := 0
	for ; len(f.ahead) > 0; n++ {
		at, err := ti.names.waiter(q, scope, f.ahead[0])
		if err != nil {
			return err
		}
		if !visit(n, at) {
			return nil
		}
		ti.cursors.pop(f)
	}
	if f.all {
		return nil
	}
	lower := keys.AppendGrouped(nil, keys.Blocked, q.Number, scope, f.id)
	upper := keys.GroupEnd(keys.AppendGroup(nil, keys.Blocked, q.Number, scope))
	it, err := ti.blocked.open(ti.round)
	if err != nil {
		return err
	}
	ahead := false // the following tasks are not visited, but held for later
	state := it.SeekGEWithLimit(lower, upper)
	for ; state == pebble.IterValid; state = it.NextWithLimit(upper) {
		w, err := ti.blocked.waiter(ti.round)
		if err != nil {
			return err
		}
		if !ahead {
			at, err := ti.names.waiter(q, scope, w)
			if err != nil {
				return err
			}
			if visit(n, at) {
				ti.cursors.advance(f, after(w.id))
				n++
				continue
			}
			ti.cursors.advance(f, w.id)
			ahead = true
		}
		if !ti.cursors.holdStored(f, w) {
			return nil
		}
	}
	if err := it.Error(); err != nil {
		return store.Error(err)
	}
	ti.cursors.end(f)
	return nil
}

// firstWaiter removes the first task that waits in a scope from memory's list; nil: the list is
// empty.
// REQUIRES: the task is moved elsewhere in this group.
func (ti *ties) firstWaiter(q *Queue, scope uint64) *located {
	f := ti.cursors.byScope[scope]
	if f == nil || len(f.ahead) == 0 {
		return nil
	}
	at, err := ti.names.waiter(q, scope, f.ahead[0])
	if err != nil {
		ti.Broken = err
		return nil
	}
	ti.cursors.pop(f)
	return at
}

func (ns *names) waiter(q *Queue, scope uint64, w waiter) (*located, error) {
	at := &located{id: w.id, place: keys.Place{Range: keys.Blocked, Group: q.Number, At: scope}, indexed: true}
	return at, ns.decode(at, w.value)
}

// scanCursors holds, for some scopes, a lower bound of the IDs of waiting tasks, and the first
// tasks: scans do not step over the tombstones of earlier ones.
type scanCursors struct {
	byScope map[uint64]*scanCursor
	group   uint64 // counts groups
	bytes   int    // of everything in ahead
}

// scanCursor is the cursor of a scope.
//
// Invariant: no task that waits in the scope has an ID before id; ahead has the first of them as
// the group leaves them, each with the value of its entry.
type scanCursor struct {
	id keys.ID
	// low is the smallest ID of the tasks that began to wait in group, which disk does not have
	// yet.
	low   keys.ID
	group uint64
	ahead []waiter
	all   bool // no other task waits
}

// waiter is a task that waits in a scope.
type waiter struct {
	id    keys.ID
	value []byte
}

func (w *waiter) size() int { return int(unsafe.Sizeof(*w)) + cap(w.value) }

// The limits of waiting tasks in memory.
const (
	cursorsCap   = 1 << 14 // scopes, between two groups
	WaitersAhead = 16      // tasks of a scope
	waitersCap   = 8 << 20 // bytes in all, and one task
)

// at returns the cursor of a scope, and creates it if it is missing.
func (t *scanCursors) at(scope uint64) *scanCursor {
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

// begin is called for a scope without waiting tasks.
func (t *scanCursors) begin(scope uint64) {
	f := t.at(scope)
	t.drop(f)
	f.all = true
}

// isEmpty reports whether memory shows that no task waits in a scope.
func (t *scanCursors) isEmpty(scope uint64) bool {
	f := t.byScope[scope]
	return f != nil && f.all && len(f.ahead) == 0
}

// add is called for a task that begins to wait.
func (t *scanCursors) add(scope uint64, id keys.ID, value []byte) {
	f := t.at(scope)
	if f.group != t.group || bytes.Compare(id[:], f.low[:]) < 0 {
		f.low, f.group = id, t.group
	}
	if bytes.Compare(id[:], f.id[:]) < 0 {
		f.id = id
	}
	last := len(f.ahead) - 1
	switch {
	case last >= 0 && bytes.Compare(id[:], f.ahead[last].id[:]) < 0:
		t.drop(f)
	case f.all:
		f.all = t.hasRoom(f) && t.hold(f, waiter{id, bytes.Clone(value)})
	}
}

func (t *scanCursors) hasRoom(f *scanCursor) bool {
	return len(f.ahead) < WaitersAhead && t.bytes < waitersCap
}

// hold appends the task that waits behind those that are held. It returns false if memory has no
// room for it.
func (t *scanCursors) hold(f *scanCursor, w waiter) bool {
	if !t.hasRoom(f) {
		return false
	}
	f.ahead = append(f.ahead, w)
	t.bytes += w.size()
	return true
}

// holdStored is hold for a task that disk has. Tasks that began to wait in this group may come
// before it.
func (t *scanCursors) holdStored(f *scanCursor, w waiter) bool {
	return f.group != t.group && t.hold(f, w)
}

// pop removes the first task that is held, and moves the cursor behind it.
func (t *scanCursors) pop(f *scanCursor) {
	w := &f.ahead[0]
	t.advance(f, after(w.id))
	t.bytes -= w.size()
	*w = waiter{}
	if f.ahead = f.ahead[1:]; len(f.ahead) == 0 {
		f.ahead = nil
	}
}

// advance moves the cursor of a scope: among the tasks on disk, none waits before id.
func (t *scanCursors) advance(f *scanCursor, id keys.ID) {
	if f.id = id; f.group == t.group && bytes.Compare(f.low[:], id[:]) < 0 {
		f.id = f.low
	}
}

// end is called when disk has no more tasks of a scope than those that are held.
func (t *scanCursors) end(f *scanCursor) { f.all = f.group != t.group }

// forget is called when a waiting task of a scope changes, or leaves without being the first.
func (t *scanCursors) forget(scope uint64) {
	if f := t.byScope[scope]; f != nil {
		t.drop(f)
	}
}

func (t *scanCursors) drop(f *scanCursor) {
	for i := range f.ahead {
		t.bytes -= f.ahead[i].size()
	}
	f.ahead, f.all = nil, false
}

// next begins a group, and limits the memory.
func (t *scanCursors) next() {
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
