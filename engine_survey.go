package codeq

import (
	"codeq/internal/keys"
	"codeq/internal/schema"
	"codeq/internal/window"
)

// What a list asks of memory, so that nobody walks what was consumed, or is leased.

// laneRef names a lane.
type laneRef struct {
	number uint32
	laneKey
}

// leasedTask is a task in the hands of a worker.
type leasedTask struct {
	lane  laneRef
	since uint64
	id    keys.ID
}

// leaseOf returns the lease of a task.
func (s *state) leaseOf(id keys.ID) (_ schema.Lease, leased bool) {
	ls := s.leases.byID[id]
	if ls == nil {
		return schema.Lease{}, false
	}
	e := keys.LeaseEntry{Since: ls.since, Leases: ls.leases, Attempts: ls.attempts}
	return schema.Lease{LeaseEntry: e, Deadline: ls.record.deadline}, true
}

// countsOf returns the number of a queue and its counts; ok: it has tasks, or had.
func (s *state) countsOf(queue string) (number uint32, counts keys.Counts, ok bool) {
	q := s.queues[queue]
	if q == nil {
		return 0, counts, false
	}
	return q.number, q.counts, true
}

// lanesBefore appends the last lanes before the left-th, so many at the most, and returns how many are left.
// queue: "" for all. A lane that leaves memory is replaced by the last: who goes from the end misses none.
func (s *state) lanesBefore(queue string, left, most int, dst []laneRef) ([]laneRef, int) {
	lanes := &s.lanes
	if queue != "" {
		q := s.queues[queue]
		if q == nil {
			return dst, 0
		}
		lanes = &q.lanes
	}
	left = min(left, lanes.Len())
	first := max(0, left-most)
	for i := first; i < left; i++ {
		if l := lanes.At(i); l != nil {
			dst = append(dst, laneRef{l.number, l.key()})
		}
	}
	return dst, first
}

// leasedBefore is lanesBefore for leased tasks.
func (s *state) leasedBefore(queue string, left, most int, dst []leasedTask) ([]leasedTask, int) {
	left = min(left, s.leases.all.Len())
	first := max(0, left-most)
	for i := first; i < left; i++ {
		if ls := s.leases.all.At(i); queue == "" || ls.lane.queue.name == queue {
			dst = append(dst, leasedTask{laneRef{ls.lane.number, ls.lane.key()}, ls.since, ls.id})
		}
	}
	return dst, first
}

// firstReady returns a position at or before that of the first task of a lane that is ready; ok is false if
// none is.
func (s *state) firstReady(lane uint32) (pos window.Pos, ok bool) {
	if l := s.lanes.At(int(lane)); l != nil {
		return l.first()
	}
	return pos, false
}
