package engine

import (
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// The reads of memory for List, Get and Stats, so that they scan neither consumed nor leased tasks.

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

// CountsOf returns the number of a queue and its counts; 0 and none if it is not in memory.
func (ns *names) CountsOf(queue string) (number uint32, counts keys.Counts) {
	if q := ns.Queues[queue]; q != nil {
		return q.Number, q.Counts
	}
	return 0, keys.Counts{}
}

// LanesBefore appends the lanes before the left-th that may have ready tasks, of at most so many
// lanes, from the end, and returns how many are left. queue: "" for all. The last lane takes the
// place of one that leaves memory: so a walk from the end misses none.
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

// QueuesBefore is LanesBefore for the queues with counts that has accepts.
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

// FirstReady returns a position at or before the first ready task of a lane; ok: there is one.
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
		queues = &ns.settled.List
	}
	if p.Begun == 0 {
		p.Begun = 1 + ns.catalogue.seq
	}
	end := min(p.Next+most, queues.Len())
	for i := p.Next; i < end; i++ {
		if q := queues.At(i); q != nil && p.Unnumbered == (q.Number == 0 || q.since >= p.Begun) && (q.Counts != keys.Counts{} || q.hasSettings()) {
			dst = append(dst, QueueCounts{q.Name, q.Counts})
		}
	}
	p.Next, more = end, true
	if end == queues.Len() {
		more = !p.Unnumbered && ns.settled.Len() > 0
		p.Unnumbered, p.Next = true, 0
	}
	return dst, more
}

// QueueInfo is the information of a shard on a queue.
type QueueInfo struct {
	Queue    string
	Counts   keys.Counts
	Oldest   uint64 // since when the oldest ready task waits, ms; 0: none is ready
	Held     uint64 // handlers that go on without a lease, and that limits count
	Totals   keys.Totals
	Settings []byte // as stored; nil: there are none
}

// InfoCursor is a position in the list of a shard's queues, or in the lanes of one of them.
type InfoCursor struct {
	CountsCursor
	Queue  string // some of its lanes were visited; "": no such queue
	Lanes  int    // its lanes that are left: the last one takes the place of one that has gone
	Oldest uint64 // in those that were visited, by the wall clock, ms
}

// quietMillis is for how long a queue that is in memory is shown after it has become empty.
const quietMillis = 60 * 60 * 1000

// headsAtOnce is how many lanes without a known first ready task are looked up together.
const headsAtOnce = 64

// Info appends the information on the queues after a cursor, and advances the cursor. It visits at
// most so many queues and lanes. more says that more follow. The verdict is Again if nothing was
// done: the next group begins with the search for the first ready task of a lane.
func (ns *names) Info(p *InfoCursor, visits int, dst []QueueInfo) (_ []QueueInfo, more bool, _ Verdict) {
	began := *p
	if p.Begun == 0 {
		p.Begun = 1 + ns.catalogue.seq
	}
	for ns.Broken == nil {
		queues := &ns.numbers
		if p.Unnumbered {
			queues = &ns.settled.List
		}
		for ; p.Next < queues.Len(); p.Next++ {
			if visits--; visits < 0 {
				return dst, true, Decided
			}
			q := queues.At(p.Next)
			if q == nil || p.Unnumbered != (q.Number == 0 || q.since >= p.Begun) || !ns.isShown(q) {
				continue
			}
			if p.Queue != q.Name {
				p.Queue, p.Lanes, p.Oldest = q.Name, 0, 0
				if q.Counts.Ready > 0 {
					p.Lanes = q.lanes.Len()
				}
			}
			unknown := ns.visitLanes(p, q, &visits)
			if unknown && *p == began {
				return dst, true, Again
			}
			if unknown || p.Lanes > 0 {
				return dst, true, Decided
			}
			dst = append(dst, ns.infoOf(q, p.Oldest))
			p.Queue = ""
		}
		if p.Unnumbered || ns.settled.Len() == 0 {
			return dst, false, Decided
		}
		p.Unnumbered, p.Next = true, 0
	}
	return dst, false, Decided
}

// readsAtOnce is how many rows of totals are read for one call.
const readsAtOnce = 64

// TotalsOf appends the counts and the totals of queues by their names, whether Info shows them or
// not. It returns fewer than all if it has read many of them: the next call goes on.
func (ns *names) TotalsOf(names []string, dst []QueueInfo) []QueueInfo {
	reads := 0
	for _, name := range names {
		i := QueueInfo{Queue: name}
		if q := ns.Queues[name]; q != nil {
			i = ns.infoOf(q, 0)
		} else if ns.totals.daily.HasRows() {
			var known bool
			if i.Totals, known = ns.totals.absent[name]; !known {
				if reads++; reads > readsAtOnce || ns.Broken != nil {
					break
				}
				i.Totals = ns.readAbsent(name)
			}
		}
		i.Settings = nil
		dst = append(dst, i)
	}
	return dst
}

// isShown reports whether a queue has tasks, settings, or handlers that go on, or had some tasks a
// short while ago.
func (ns *names) isShown(q *Queue) bool {
	return q.Counts != keys.Counts{} || q.Orphans > 0 || q.changed > 0 && ns.periods.Now < q.changed+quietMillis || q.hasSettings()
}

func (ns *names) infoOf(q *Queue, oldest uint64) QueueInfo {
	if q.totals.Day == 0 {
		ns.recall(q)
	}
	i := QueueInfo{Queue: q.Name, Counts: q.Counts, Oldest: oldest, Held: uint64(q.Orphans), Settings: q.Value}
	if q.totals.Day != 0 {
		i.Totals = q.totals.All
	}
	return i
}

// visitLanes visits the lanes of a queue that are left, as far as visits go. unknown: it stopped
// before a lane without a known first ready task, and has asked for the first tasks of this lane
// and of some that follow.
func (ns *names) visitLanes(p *InfoCursor, q *Queue, visits *int) (unknown bool) {
	asked, clock := 0, ns.Clock()
	for i := min(p.Lanes, q.lanes.Len()); i > 0 && *visits > 0 && asked < headsAtOnce; i-- {
		*visits--
		l := q.lanes.At(i - 1)
		if pos, exact, ok := l.tasks.First(); ok {
			if !exact {
				asked++
				ns.ready.Ask(&l.tasks)
			} else if at, _ := clock.ByWall(keys.SinceMillis(pos.Since)); asked == 0 && (p.Oldest == 0 || at < p.Oldest) {
				p.Oldest = at
			}
		}
		if asked == 0 {
			p.Lanes = i - 1
		}
	}
	return asked > 0
}
