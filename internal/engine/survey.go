package engine

import (
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// What List, Get and Stats ask of memory, so that they scan neither consumed nor leased tasks.

// LaneRef names a lane.
type LaneRef struct {
	Number uint32
	LaneKey
}

// LeasedTask is a task that a worker holds.
type LeasedTask struct {
	Lane  LaneRef
	Since uint64
	ID    keys.ID
}

// LeaseOf returns the lease of a task.
func (le *leases) LeaseOf(id keys.ID) (_ store.Lease, leased bool) {
	ls := le.byID[id]
	if ls == nil {
		return store.Lease{}, false
	}
	e := keys.LeaseEntry{Since: ls.since, Leases: ls.leases, Attempts: ls.attempts, Token: ls.token, Worker: ls.worker}
	return store.Lease{LeaseEntry: e, Deadline: le.deadlineOf(ls), Notes: ls.notes}, true
}

// sameDeadline is by how much a deadline by the wall clock may differ from the stored one, ms: the
// clocks do not go exactly alike, and a stall of the owner does not count.
const sameDeadline = 2000

// deadlineOf returns when a lease expires by the wall clock, ms: the stored deadline, unless that
// cannot be, as the wall clock was set since, or is older, as renewals are not stored.
func (le *leases) deadlineOf(ls *lease) uint64 {
	stored := ls.record.deadline
	if ls.over || le.Now == 0 { // the shard is only read, or was loaded right now
		return min(stored, le.Wall+ls.duration)
	}
	at := le.Wall + uint64(ls.expiry.Deadline()) - min(le.Now, uint64(ls.expiry.Deadline()))
	same := max(at, stored)-min(at, stored) < sameDeadline
	if can := le.Wall < stored && stored <= le.Wall+ls.duration+sameDeadline; same || can && (!ls.local || le.config.Replicated) {
		return stored
	}
	return at
}

// CountsOf returns the number of a queue and its counts; ok: the queue is in memory.
func (ns *names) CountsOf(queue string) (number uint32, counts keys.Counts, ok bool) {
	q := ns.Queues[queue]
	if q == nil {
		return 0, counts, false
	}
	return q.Number, q.Counts, true
}

// LanesBefore appends the lanes before the left-th that may have ready tasks, of at most so many
// lanes, from the end, and returns how many are left. queue: "" for all. The last lane takes the
// place of one that leaves memory: whoever goes from the end misses none.
func (ns *names) LanesBefore(queue string, left, most int, dst []LaneRef) ([]LaneRef, int) {
	lanes := &ns.lanes
	if queue != "" {
		q := ns.Queues[queue]
		if q == nil {
			return dst, 0
		}
		lanes = &q.lanes
	}
	left = min(left, lanes.Len())
	first := max(0, left-most)
	for i := first; i < left; i++ {
		if l := lanes.At(i); l != nil {
			if _, _, ok := l.tasks.First(); ok {
				dst = append(dst, LaneRef{l.number, l.LaneKey})
			}
		}
	}
	return dst, first
}

// QueueRef names a queue.
type QueueRef struct {
	Name   string
	Number uint32
}

// QueuesBefore is LanesBefore for the queues whose counts are as has says.
func (ns *names) QueuesBefore(has func(*keys.Counts) bool, left, most int, dst []QueueRef) ([]QueueRef, int) {
	left = min(left, ns.numbers.Len())
	first := max(0, left-most)
	for i := first; i < left; i++ {
		if q := ns.numbers.At(i); q != nil && has(&q.Counts) {
			dst = append(dst, QueueRef{q.Name, q.Number})
		}
	}
	return dst, first
}

// LeasedBefore is LanesBefore for leased tasks.
func (le *leases) LeasedBefore(queue string, left, most int, dst []LeasedTask) ([]LeasedTask, int) {
	left = min(left, le.all.Len())
	first := max(0, left-most)
	for i := first; i < left; i++ {
		if ls := le.all.At(i); queue == "" || ls.lane.queue.Name == queue {
			dst = append(dst, LeasedTask{LaneRef{ls.lane.number, ls.lane.LaneKey}, ls.since, ls.id})
		}
	}
	return dst, first
}

// FirstReady returns a position at or before the first ready task of a lane; ok is false if no task
// is ready.
func (ns *names) FirstReady(lane uint32) (pos ready.Pos, ok bool) {
	if l := ns.lanes.At(int(lane)); l != nil {
		pos, _, ok = l.tasks.First()
	}
	return pos, ok
}

// CountsCursor is a position in the list of a shard's queues: first those that have a number, then
// those that have only settings. A queue that has got its number since the beginning had no tasks
// then, or was seen under another number.
type CountsCursor struct {
	Unnumbered bool
	Next       int
	Begun      uint64 // 1 + the largest Seq of the catalogue at the beginning
}

type QueueCounts struct {
	Queue  string
	Counts keys.Counts
}

// Counts appends the counts of the queues after a cursor, at most so many, and advances it.
// more says that more queues follow.
func (ns *names) Counts(p *CountsCursor, most int, dst []QueueCounts) (_ []QueueCounts, more bool) {
	queues := &ns.numbers
	if p.Unnumbered {
		queues = &ns.settled.queues
	}
	if p.Begun == 0 {
		p.Begun = 1 + ns.catalogue.seq
	}
	end := min(p.Next+most, queues.Len())
	for i := p.Next; i < end; i++ {
		if q := queues.At(i); q != nil && p.Unnumbered == (q.Number == 0 || q.since >= p.Begun) && (q.Counts != keys.Counts{} || q.Version > 0) {
			dst = append(dst, QueueCounts{q.Name, q.Counts})
		}
	}
	p.Next, more = end, true
	if end == queues.Len() {
		more = !p.Unnumbered && ns.settled.queues.Len() > 0
		p.Unnumbered, p.Next = true, 0
	}
	return dst, more
}
