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

	store.Uncommitted[*Lane]
	checked int // so many of tasks were checked: the removals among them are in Uncommitted
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
	return g.IsChanged(id)
}

// noteRemoved adds the tasks that are removed to those that have changed.
func (g *commitGroup) noteRemoved() {
	for ; g.checked < g.tasks.Len(); g.checked++ {
		if id, rec := g.tasks.At(g.checked); rec == nil {
			g.Change(id)
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
	g.Forget()
	g.checked, g.Ranged, g.Trimmed = 0, false, false
	g.Batch.Reset()
}
