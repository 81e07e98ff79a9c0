package engine

import (
	"math/bits"

	"codeq/internal/record"
)

// What a claim of a queue would get.

// Next returns the lane whose first task a claim of the queue gets, if the claim takes no rank
// below rank; nil: there is none. pending is as in head, or says that the budget was spent on
// parking tasks; the queue is then fed again.
func (s *State) Next(q *Queue, rank uint64) (l *Lane, pending bool) {
	if q.Settings.Paused {
		return nil, false
	}
	for {
		l, pending = s.head(q)
		if l != nil && Rank(l.Priority) < rank {
			return nil, false
		}
		if l == nil || q.Settings.ConcurrencyPerKey == 0 && len(s.leases.turns) == 0 {
			return l, pending
		}
		head, err := record.DecodeHead(l.window.FirstRecord())
		if err != nil || s.mayLease(q, &head) { // Grant reports err
			return l, pending
		}
		if s.Spent() {
			s.feed(q)
			return nil, true
		}
		s.park(l)
		if s.Broken != nil {
			return nil, false
		}
	}
}

// FirstTask is what a claim of a queue would get here, as far as memory shows.
type FirstTask struct {
	Priority uint8
	Tenant   string
	Alone    bool   // no other tenant has a task of the priority
	Since    uint64 // if Alone; the task is not older
	Share    uint64 // of the tenants that have; see Share
}

func (s *State) First(q *Queue) (f FirstTask, ok bool) {
	if q.Settings.Paused {
		return f, false
	}
	for mask := q.Mask; mask != 0; {
		p := bits.Len16(mask) - 1
		mask &^= 1 << p
		r := q.rings[p]
		first := r.first
		for l := first; ; {
			if !l.drained() {
				f = FirstTask{Priority: l.Priority, Tenant: l.Tenant, Alone: l.ringNext == l, Share: r.shareOf()}
				if f.Alone {
					pos, _ := l.first()
					f.Since = pos.Since
				}
				return f, true
			}
			if l = l.ringNext; l == first {
				break
			}
		}
	}
	return f, false
}
