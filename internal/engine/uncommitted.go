package engine

import "codeq/internal/keys"

// uncommitted is what the current group has done to the tasks that it moves or rewrites, off the
// hot path: disk shows it only once the group has persisted. An operation on a task uses the place
// that is known here; one on a task that has changed in an unknown way is resolved in the next
// group.
//
// Tasks that are produced or leased in the group are not in it, unless an idempotency key names
// them: nobody else knows them yet.
type uncommitted struct {
	changed map[keys.ID]int      // a task's index in placed, plus 1; 0: its place is not known
	placed  []placedTask         // each as of some moment of the group
	parents map[keys.ID]struct{} // tasks that others have begun to wait for
}

// placedTask is where an unended task lies, and its record.
type placedTask struct {
	lane  *Lane
	place keys.Place
	rec   []byte
}

// change notes that the group moves or rewrites a task.
func (u *uncommitted) change(id keys.ID) {
	if u.changed == nil {
		u.changed = make(map[keys.ID]int)
	}
	u.changed[id] = 0
}

// put notes where the group has put a task. It keeps rec.
func (u *uncommitted) put(id keys.ID, l *Lane, p keys.Place, rec []byte) {
	u.change(id)
	u.placed = append(u.placed, placedTask{l, p, rec})
	u.changed[id] = len(u.placed)
}

// find returns where the group has put a task; nil if it has not put it anywhere, or the place is
// not known.
func (u *uncommitted) find(id keys.ID) *placedTask {
	if n := u.changed[id]; n > 0 {
		return &u.placed[n-1]
	}
	return nil
}

// addChild notes that a task has begun to wait for another one.
func (u *uncommitted) addChild(parent keys.ID) {
	if u.parents == nil {
		u.parents = make(map[keys.ID]struct{})
	}
	u.parents[parent] = struct{}{}
}

// hasChildren reports whether children of a task are not on disk yet.
func (u *uncommitted) hasChildren(id keys.ID) bool {
	_, ok := u.parents[id]
	return ok
}

func (u *uncommitted) clear() {
	clear(u.changed)
	clear(u.placed)
	clear(u.parents)
	u.placed = u.placed[:0]
}
