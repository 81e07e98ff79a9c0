package store

import "codeq/internal/keys"

// Uncommitted has the changes of the current group to the tasks that it moves or rewrites, off the
// hot path: disk shows them only after the group has persisted. An operation on such a task uses
// the place that is known here. If none is known, the operation is resolved in the next group.
//
// Tasks that the group produces or leases are not in it, unless an idempotency key names them: no
// other operation knows them yet. L is a lane. The zero Uncommitted is empty.
type Uncommitted[L any] struct {
	changed map[keys.ID]int      // a task's index in placed, plus 1; 0: its place is not known
	placed  []Placed[L]          // each as of some moment of the group
	parents map[keys.ID]struct{} // tasks that others have begun to wait for
}

// Placed is the place of an unended task, and its record.
type Placed[L any] struct {
	Lane  L
	Place keys.Place
	Rec   []byte
}

// Change notes that the group moves or rewrites a task.
func (u *Uncommitted[L]) Change(id keys.ID) {
	if u.changed == nil {
		u.changed = make(map[keys.ID]int)
	}
	u.changed[id] = 0
}

// Put notes where the group has put a task. It keeps rec.
func (u *Uncommitted[L]) Put(id keys.ID, l L, p keys.Place, rec []byte) {
	u.Change(id)
	u.placed = append(u.placed, Placed[L]{l, p, rec})
	u.changed[id] = len(u.placed)
}

// Find returns where the group has put a task; nil if it has not put it anywhere, or the place is
// not known.
func (u *Uncommitted[L]) Find(id keys.ID) *Placed[L] {
	if n := u.changed[id]; n > 0 {
		return &u.placed[n-1]
	}
	return nil
}

// AddChild notes that a task has begun to wait for another one.
func (u *Uncommitted[L]) AddChild(parent keys.ID) {
	if u.parents == nil {
		u.parents = make(map[keys.ID]struct{})
	}
	u.parents[parent] = struct{}{}
}

// HasChildren reports whether children of a task are not on disk yet.
func (u *Uncommitted[L]) HasChildren(id keys.ID) bool {
	_, ok := u.parents[id]
	return ok
}

// IsChanged reports whether the group moves or rewrites a task.
func (u *Uncommitted[L]) IsChanged(id keys.ID) bool {
	_, ok := u.changed[id]
	return ok
}

// HasAny reports whether there are any changes.
func (u *Uncommitted[L]) HasAny() bool { return len(u.changed)+len(u.parents) > 0 }

// Forget empties it.
func (u *Uncommitted[L]) Forget() {
	clear(u.changed)
	clear(u.placed)
	clear(u.parents)
	u.placed = u.placed[:0]
}
