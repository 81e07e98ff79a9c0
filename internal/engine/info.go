package engine

import (
	"codeq/internal/keys"
)

// QueueInfo is what a shard knows of a queue.
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
	Queue  string // of which some lanes were visited; "": of none
	Lanes  int    // of it that are left: the last lane takes the place of one that leaves memory
	Oldest uint64 // in those that were visited, by the wall clock, ms
}

// quietMillis is for how long a queue that is in memory is shown after it has become empty.
const quietMillis = 60 * 60 * 1000

// headsAtOnce is how many lanes of which memory does not know the first ready task are looked for
// together.
const headsAtOnce = 64

// Info appends what is known of the queues after a cursor, and advances it. It visits at most so
// many queues and lanes. more says that more follow. The verdict is Again if nothing was done: the
// first ready task of a lane has to be found before, which the next group begins with.
func (ns *names) Info(p *InfoCursor, visits int, dst []QueueInfo) (_ []QueueInfo, more bool, _ Verdict) {
	began := *p
	if p.Begun == 0 {
		p.Begun = 1 + ns.catalogue.seq
	}
	for ns.Broken == nil {
		queues := &ns.numbers
		if p.Unnumbered {
			queues = &ns.settled.queues
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
		if p.Unnumbered || ns.settled.queues.Len() == 0 {
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
		} else if ns.totals.rows {
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
	return q.Counts != keys.Counts{} || q.Version > 0 || q.Orphans > 0 || q.changed > 0 && ns.periods.now < q.changed+quietMillis
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
// before a lane of which memory does not know the first ready task; that one, and some that follow,
// are asked for.
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
