package engine

import "codeq/internal/keys"

// groupView is what the current group has done to the tasks that it moves or rewrites, off the hot
// path: disk shows it only once the group has persisted. An operation on a task whose place the
// view knows uses it; one on a task that has changed in an unknown way is resolved in the next
// group.
//
// Tasks that are produced or leased in the group are not in it, unless an idempotency key names
// them: nobody else knows them yet.
type groupView struct {
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
func (v *groupView) change(id keys.ID) {
	if v.changed == nil {
		v.changed = make(map[keys.ID]int)
	}
	v.changed[id] = 0
}

// put notes where the group has put a task. The view keeps rec.
func (v *groupView) put(id keys.ID, l *Lane, p keys.Place, rec []byte) {
	v.change(id)
	v.placed = append(v.placed, placedTask{l, p, rec})
	v.changed[id] = len(v.placed)
}

// find returns where the group has put a task; nil if it has not put it anywhere, or the place is
// not known.
func (v *groupView) find(id keys.ID) *placedTask {
	if n := v.changed[id]; n > 0 {
		return &v.placed[n-1]
	}
	return nil
}

// addChild notes that a task has begun to wait for another one.
func (v *groupView) addChild(parent keys.ID) {
	if v.parents == nil {
		v.parents = make(map[keys.ID]struct{})
	}
	v.parents[parent] = struct{}{}
}

// hasChildren reports whether children of a task are not on disk yet.
func (v *groupView) hasChildren(id keys.ID) bool {
	_, ok := v.parents[id]
	return ok
}

func (v *groupView) clear() {
	clear(v.changed)
	clear(v.placed)
	clear(v.parents)
	v.placed = v.placed[:0]
}
