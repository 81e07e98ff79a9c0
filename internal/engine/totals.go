package engine

import (
	"strings"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// The shard counts the events of each queue, in all and by day. The totals of a queue in memory are
// stored with its counts: the commit that changes a task counts the change. Their value at the end
// of a day is a row of the range Daily, which is written with the first change of a later day. A
// queue that is about to leave memory is filed before: a row takes the place of its counters. When
// its name comes back, its totals go on from its last row.
//
// Rows are deleted when they are TotalsDays old. So the name of a queue that is not in memory
// then loses its totals.

// TotalsDays is for how many days there are totals by day.
const TotalsDays = 90

const dayMillis = 24 * 60 * 60 * 1000

// totals is the memory of a shard for the totals of all queues.
type totals struct {
	today   uint32 // by the minter's time, which does not go back
	daily   store.Daily
	leaving []*Queue               // to be filed
	absent  map[string]keys.Totals // some of the queues that are not in memory, by name
}

// count counts an event of a task in the totals of its queue.
func (ns *names) count(q *Queue, kind EventKind) {
	ns.touch(q)
	q.totals.All[kind-1]++
	q.totals.OfDay[kind-1]++
}

// beginDay is called before the first change of a queue in a group if its totals are not those of
// today: they may not be known yet.
func (ns *names) beginDay(q *Queue) {
	t := &q.totals
	if t.Day == 0 {
		ns.recall(q)
	}
	if t.Day >= ns.totals.today {
		return
	}
	if !q.filed && t.OfDay != (keys.Totals{}) {
		ns.file(q)
	}
	t.Day, t.OfDay = ns.totals.today, keys.Totals{}
}

// recall continues the totals of a queue that has come to memory, with those of its last row.
func (ns *names) recall(q *Queue) {
	q.totals = keys.TotalsValue{}
	if ns.totals.daily.HasRows() {
		q.totals = ns.totals.daily.Last(q.Name)
		q.filed = q.totals.Day != 0
	}
	delete(ns.totals.absent, q.Name)
}

// absentCap is how many queues that are not in memory have totals in absent, at most.
const absentCap = 1 << 14

// readAbsent reads the totals of a queue that is not in memory, and remembers them.
func (ns *names) readAbsent(queue string) keys.Totals {
	t := &ns.totals
	if t.absent == nil || len(t.absent) >= absentCap {
		t.absent = make(map[string]keys.Totals)
	}
	v := t.daily.Last(queue)
	t.absent[strings.Clone(queue)] = v.All
	return v.All
}

// file writes the row of a queue's current day.
func (ns *names) file(q *Queue) {
	ns.totals.daily.Add(&ns.Group.Writes, q.Name, &q.totals)
}

// isFiled reports whether a queue may leave memory: nothing is counted, or a row has all of it.
// Otherwise the queue is filed soon.
func (ns *names) isFiled(q *Queue) bool {
	if q.filed || q.totals.Day == 0 {
		return true
	}
	q.resting = true
	ns.totals.leaving = append(ns.totals.leaving, q)
	return false
}

func (ns *names) keepTotalsIsDue() bool {
	t := &ns.totals
	return len(t.leaving) > 0 || ns.totalsAge()
}

// totalsAge reports whether rows may be too old.
func (ns *names) totalsAge() bool {
	return ns.totals.daily.SweepIsDue(ns.totals.today) && !ns.config.Untimed
}

// keepTotals files the queues that are about to leave memory, and deletes rows that are too old.
func (ns *names) keepTotals() {
	t := &ns.totals
	for len(t.leaving) > 0 && !ns.Spent() {
		q := t.leaving[len(t.leaving)-1]
		t.leaving = t.leaving[:len(t.leaving)-1]
		if q.resting = false; ns.isUnknown(q) {
			ns.file(q)
			q.filed = true
			ns.Group.Delete(keys.AppendNumbered(nil, keys.Counters, q.Number))
			ns.Group.unclocked = true
		}
		ns.Rest(q)
	}
	if ns.Broken == nil && ns.totalsAge() && !ns.Spent() {
		var all bool
		if all, ns.Broken = t.daily.Sweep(&ns.Group.Writes, t.today, TotalsDays, ns.Spent); all {
			t.absent = nil
		}
	}
}

// DaysOf appends the totals of a queue by day, in order: of the last TotalsDays days, those on
// which something happened.
func (ns *names) DaysOf(queue string, dst []keys.TotalsValue) ([]keys.TotalsValue, Verdict) {
	t := &ns.totals
	if t.daily.HasAdded() {
		return dst, Again
	}
	first := max(t.today, TotalsDays) - TotalsDays + 1
	dst, err := t.daily.From(queue, first, dst)
	if ns.fails(err) {
		return dst, Decided
	}
	if q := ns.Queues[queue]; q != nil && q.totals.Day >= first {
		if n := len(dst); n > 0 && dst[n-1].Day == q.totals.Day { // it has come back on the same day
			dst = dst[:n-1]
		}
		dst = append(dst, q.totals)
	}
	return dst, Decided
}
