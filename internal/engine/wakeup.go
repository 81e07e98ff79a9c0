package engine

import (
	"bytes"
	"cmp"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Blocked tasks wait, each in a scope: scope 0 is for tasks that wait for their parents, the scope
// of a group for tasks that wait for their turn in it, the scope of a limit for tasks that found no
// room in it when a claim reached them, and some for the suspects of a queue. The change that
// allows them to go on adds a wakeup in the range Wake, in the same commit; the next group reads
// which tasks wait, and moves them.

// block makes a task wait in a scope.
func (ti *ties) block(l *Lane, scope uint64, id keys.ID, rec []byte) {
	q := l.queue
	value := ti.withLane(l, rec)
	if scope != 0 {
		ti.blocked.Add(scope, id, value)
	}
	ti.scratch = keys.AppendGrouped(ti.scratch[:0], keys.Blocked, q.Number, scope, id)
	ti.Group.Set(ti.scratch, value)
	ti.setIndex(id, l, keys.Place{Range: keys.Blocked, Group: q.Number, At: scope}, rec)
	q.Counts.Blocked++
	ti.names.touch(q)
}

// wakeup says which tasks may go on: an entry of the range Wake.
type wakeup struct {
	queue *Queue
	scope uint64
	id    keys.ID // the task in scope 0
}

// compare is the order of the keys.
func (m wakeup) compare(other wakeup) int {
	return cmp.Or(cmp.Compare(m.queue.Number, other.queue.Number), cmp.Compare(m.scope, other.scope), bytes.Compare(m.id[:], other.id[:]))
}

// wakeupList holds the wakeups of earlier groups: some in memory, the others on disk. A scan of the
// range from a cursor finds these, without the tombstones of all earlier ones.
//
// Invariant: a wakeup is in memory, or at or after the cursor if onDisk is set, or waits for the
// orphans of its group.
type wakeupList struct {
	how    map[wakeup]byte
	order  []wakeup
	onDisk bool
	from   []byte // the cursor; nil: the beginning of the range
	busy   bool   // wakeups are being applied: new ones are held in memory
}

// wakeupsSorted is how many wakeups are sorted together by their keys.
const wakeupsSorted = 512

// wakeupsCap is how many wakeups memory holds at most between two groups, except for those that
// result from applying others.
const wakeupsCap = 1 << 12

func (ti *ties) wakeupKey(m wakeup) []byte {
	ti.scratch = keys.AppendGrouped(ti.scratch[:0], keys.Wake, m.queue.Number, m.scope, m.id)
	return ti.scratch
}

// wake allows tasks that wait in a scope to go on; id is the task in scope 0.
func (ti *ties) wake(q *Queue, scope uint64, id keys.ID, how byte) {
	m := wakeup{q, scope, id}
	key := ti.wakeupKey(m)
	ti.Group.Set(key, []byte{how})
	q.hasWakeups = true
	ti.wakeups.note(m, key, how)
}

// note adds a wakeup.
func (l *wakeupList) note(m wakeup, key []byte, how byte) {
	if _, ok := l.how[m]; !ok {
		beyond := l.onDisk && bytes.Compare(key, l.from) >= 0
		if !l.busy && (beyond || len(l.order) >= wakeupsCap) {
			if !beyond {
				l.onDisk, l.from = true, bytes.Clone(key)
			}
			return
		}
		l.order = append(l.order, m)
	}
	if l.how == nil {
		l.how = make(map[wakeup]byte)
	}
	l.how[m] = how
}

// queues returns the queues that have wakeups in memory.
func (l *wakeupList) queues() map[*Queue]bool {
	awakened := make(map[*Queue]bool)
	for _, m := range l.order {
		awakened[m.queue] = true
	}
	return awakened
}

func (ti *ties) wakeIsDue() bool { return ti.wakeups.onDisk || len(ti.wakeups.order) > 0 }

// blockedIn returns a task that waits in a scope; nil: it does not.
// REQUIRES: the group has not changed the task.
func (ti *ties) blockedIn(q *Queue, scope uint64, id keys.ID) (*located, error) {
	if base.Invariants && ti.Group.hasChanged(id) {
		base.Violated("the group has changed task %s, which is read from disk", keys.FormatID(id))
	}
	value, err := ti.blocked.Lookup(keys.AppendGrouped(nil, keys.Blocked, q.Number, scope, id))
	if value == nil || err != nil {
		return nil, err
	}
	return ti.names.waiter(q, scope, store.Waiter{ID: id, Value: value})
}

// waiting visits the tasks that wait in a scope, in the order of their IDs, until visit returns
// false. REQUIRES: as store.Waiting.Visit.
func (ti *ties) waiting(q *Queue, scope uint64, visit func(n int, at *located) bool) error {
	return ti.blocked.Visit(q.Number, scope, func(n int, w store.Waiter) (bool, error) {
		at, err := ti.names.waiter(q, scope, w)
		return err == nil && visit(n, at), err
	})
}

// firstWaiter removes the first task that waits in a scope from memory's list; nil: the list is
// empty.
// REQUIRES: the task is moved elsewhere in this group.
func (ti *ties) firstWaiter(q *Queue, scope uint64) *located {
	w, ok := ti.blocked.Take(scope)
	if !ok {
		return nil
	}
	at, err := ti.names.waiter(q, scope, w)
	if ti.fails(err) {
		return nil
	}
	return at
}

func (ns *names) waiter(q *Queue, scope uint64, w store.Waiter) (*located, error) {
	at := &located{id: w.ID, place: keys.Place{Range: keys.Blocked, Group: q.Number, At: scope}, indexed: true}
	return at, ns.decode(at, w.Value)
}

// unblock removes a task from its scope, to move it elsewhere.
func (ns *names) unblock(at *located) {
	ns.Group.Delete(at.place.AppendKey(nil, at.id))
	at.lane.queue.Counts.Blocked--
	ns.touch(at.lane.queue)
}
