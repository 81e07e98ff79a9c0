package engine

import "codeq/internal/record"

// What a claim of a queue would get.

// Next returns the lane whose first task a claim of the queue gets, if the claim takes no rank
// below rank; nil: there is none. pending is as in head, or says that the budget was spent on
// parking tasks; the queue is then fed again.
func (s *State) Next(q *Queue, rank uint64) (l *Lane, pending bool) {
	if q.Settings.Paused {
		return nil, false
	}
	for {
		l, pending = s.Names.head(q)
		if l != nil && Rank(l.Priority) < rank {
			return nil, false
		}
		if l == nil || q.Settings.ConcurrencyPerKey == 0 && len(s.Leases.heldTurns) == 0 {
			return l, pending
		}
		head, err := record.DecodeHead(l.tasks.FirstRecord())
		if err != nil || s.Ties.mayLease(q, &head) { // Grant reports err
			return l, pending
		}
		if s.Spent() {
			s.feed(q)
			return nil, true
		}
		s.Ties.park(l)
		if s.Broken != nil {
			return nil, false
		}
	}
}

// head returns the lane whose first task is next in a queue: see ready.Tasks.Head.
func (ns *names) head(q *Queue) (l *Lane, pending bool) {
	first, pending, left := ns.ready.Head(&q.Queue)
	if left {
		ns.show(q)
	}
	if first != nil {
		l = ns.laneOf(first)
	}
	return l, pending
}

// FirstTask is what a claim of a queue would get here, as far as memory shows.
type FirstTask struct {
	Priority uint8
	Tenant   string
	Alone    bool   // no other tenant has a task of the priority
	Since    uint64 // if Alone; the task is not older
	Share    uint64 // of the tenants that have; see Share
}

func (ns *names) First(q *Queue) (f FirstTask, ok bool) {
	if q.Settings.Paused {
		return f, false
	}
	first := ns.ready.First(&q.Queue)
	if first.Lane == nil {
		return f, false
	}
	l := ns.laneOf(first.Lane)
	f = FirstTask{Priority: l.Priority, Tenant: l.Tenant, Alone: first.Alone, Share: first.Share}
	if f.Alone {
		pos, _, _ := first.Lane.First()
		f.Since = pos.Since
	}
	return f, true
}
