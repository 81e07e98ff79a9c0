package engine

import (
	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// commitGroup is what one commit persists. The order of its keys suits Pebble's memtable, where a
// run of ascending keys of one range costs a fraction of scattered keys: first the direct writes of
// the rules, then new tasks, then the removals of keys that are never written again. New tasks and
// removals are in the order of their keys.
type commitGroup struct {
	store.Writes
	tasks     store.TaskWrites
	granted   []*leaseRecord // lease records to be written
	finished  []uint64       // sequence numbers of lease records that have no lease left
	Touched   []*Queue       // queues with changed counts
	buckets   []*bucket      // buckets with changed sizes
	Trimmed   bool           // consumed parts of lanes are deleted
	unclocked bool           // counters are deleted: store the clock under queue 0

	uncommitted
	checked int // so many of tasks were checked: the removals among them are in uncommitted
}

// GroupBytes limits what operations of callers add to a group: a larger batch gains nothing.
const GroupBytes = 1 << 20

// Size returns about how many bytes have been collected.
func (g *commitGroup) Size() int { return g.Batch.Len() + g.tasks.Bytes() }

// isEmpty reports whether nothing has been collected.
func (g *commitGroup) isEmpty() bool {
	return g.Batch.Empty() && len(g.granted)+g.tasks.Len()+len(g.finished)+len(g.Touched) == 0
}

// Entries returns how many keys have been collected.
func (g *commitGroup) Entries() int { return int(g.Batch.Count()) + g.tasks.Len() }

// hasChanged reports whether disk does not have the latest state of a task yet.
func (g *commitGroup) hasChanged(id keys.ID) bool {
	g.noteRemoved()
	_, ok := g.changed[id]
	return ok
}

// noteRemoved adds the tasks that are removed to those that have changed.
func (g *commitGroup) noteRemoved() {
	for ; g.checked < g.tasks.Len(); g.checked++ {
		if id, rec := g.tasks.At(g.checked); rec == nil {
			g.change(id)
		}
	}
}

// flushTasks adds the tasks to the batch, before all later writes.
func (g *commitGroup) flushTasks() {
	g.tasks.Flush(&g.Writes)
	g.checked = 0
}

// removeTask removes a task from its place. once says that its key has been written once in the
// life of the store and will not be written again, which makes SINGLEDEL legal for it. Any other
// key is deleted in the order of the group.
func (g *commitGroup) removeTask(lane uint32, since uint64, id keys.ID, once bool) {
	if once {
		g.tasks.Remove(lane, since, id)
		return
	}
	g.noteRemoved()
	g.flushTasks() // the task may be among them
	g.DeleteTask(lane, since, id, false)
}

// sortFrom is from how many entries beside tasks, leases and counters on a batch is sorted.
const sortFrom = 16

// seal adds to the batch everything that was collected beside it, and sorts the batch.
func (g *commitGroup) seal(clock uint64) {
	unordered := g.Batch.Count() >= sortFrom
	g.flushTasks()
	for _, r := range g.granted {
		if r.live == 0 { // all its leases were replaced within the group
			continue
		}
		if base.Invariants && r.live < 0 {
			base.Violated("lease record %x has %d leases", r.seq, r.live)
		}
		g.SetLeases(r.seq, r.value)
		r.written = true
	}
	for _, seq := range g.finished {
		g.DeleteLeases(seq)
	}
	for _, q := range g.Touched {
		if base.Invariants {
			q.assertCounts()
		}
		g.SetCounters(q.Number, &keys.CountersValue{Counts: q.Counts, Clock: clock, Totals: q.totals})
		q.touched = false
	}
	if g.unclocked {
		g.SetCounters(0, &keys.CountersValue{Clock: clock})
		g.unclocked = false
	}
	for _, b := range g.buckets {
		b.seal(g)
	}
	if unordered {
		g.Sort()
	}
}

// Clear empties the group.
func (g *commitGroup) Clear() {
	clear(g.granted)
	g.tasks.Clear()
	g.granted = g.granted[:0]
	g.finished, g.Touched, g.buckets = g.finished[:0], g.Touched[:0], g.buckets[:0]
	g.uncommitted.clear()
	g.checked, g.Ranged, g.Trimmed = 0, false, false
	g.Batch.Reset()
}

// uncommitted has the changes of the current group to the tasks that it moves or rewrites, off the
// hot path: disk shows them only after the group has persisted. An operation on such a task uses
// the place that is known here. If none is known, the operation is resolved in the next group.
//
// Tasks that the group produces or leases are not in it, unless an idempotency key names them: no
// other operation knows them yet.
type uncommitted struct {
	changed map[keys.ID]int      // a task's index in placed, plus 1; 0: its place is not known
	placed  []placedTask         // each as of some moment of the group
	parents map[keys.ID]struct{} // tasks that others have begun to wait for
}

// placedTask is the place of an unended task, and its record.
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
