package engine

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
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
	today   uint32                 // by the minter's time, which does not go back
	rows    bool                   // the store may have rows
	written bool                   // the group adds rows: reader does not see them
	reader  store.RangeReader      // of rows
	leaving []*Queue               // to be filed
	absent  map[string]keys.Totals // some of the queues that are not in memory, by name
	swept   uint32                 // the day of the last sweep
	from    []byte                 // where the current sweep goes on; nil: none has begun
	stay    bool                   // the current sweep has found rows that stay, or some were added meanwhile
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
	if ns.totals.rows {
		q.totals = ns.lastRow(q.Name)
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
	v := ns.lastRow(queue)
	t.absent[strings.Clone(queue)] = v.All
	return v.All
}

// lastRow reads the last row of a queue; zero: it has none.
func (ns *names) lastRow(queue string) (v keys.TotalsValue) {
	it, err := ns.totals.reader.Open()
	if err != nil {
		ns.Broken = err
		return v
	}
	lower, upper := keys.AppendTotals(nil, queue, 0), keys.AppendTotals(nil, queue, 1<<32-1)
	if it.SeekLTWithLimit(upper, lower) != pebble.IterValid { // not beyond, where many may be deleted
		ns.NoteRead(0)
		if err := it.Error(); err != nil {
			ns.Broken = store.Error(err)
		}
		return v
	}
	if v, err = ns.row(it); err != nil {
		ns.Broken = err
	}
	return v
}

// row reads the row at which an iterator is.
func (ns *names) row(it *pebble.Iterator) (v keys.TotalsValue, err error) {
	value, err := it.ValueAndErr()
	if err != nil {
		return v, store.Error(err)
	}
	ns.NoteRead(len(value))
	_, day, err := keys.ParseTotalsKey(it.Key())
	if err == nil {
		v, err = keys.ParseTotals(value)
	}
	if err == nil && v.Day != day {
		err = fmt.Errorf("row %x is of day %d", it.Key(), v.Day)
	}
	if err != nil {
		return v, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return v, nil
}

// file writes the row of a queue's current day.
func (ns *names) file(q *Queue) {
	ns.Group.Set(keys.AppendTotals(nil, q.Name, q.totals.Day), q.totals.Append(nil))
	ns.totals.rows, ns.totals.written, ns.totals.stay = true, true, true
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
	return ns.totals.rows && ns.totals.swept < ns.totals.today && !ns.config.Untimed
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
		ns.Broken = ns.sweepTotals()
	}
}

// sweepTotals deletes rows that are too old, as far as the budget goes. Once a day it reads all.
func (ns *names) sweepTotals() error {
	t := &ns.totals
	it, err := t.reader.Open()
	if err != nil {
		return err
	}
	if t.from == nil {
		t.from, _ = keys.TotalsRows()
		t.stay = t.written
	}
	for valid := it.SeekGE(t.from); valid; valid = it.Next() {
		if ns.Spent() {
			t.from = bytes.Clone(it.Key())
			return nil
		}
		_, day, err := keys.ParseTotalsKey(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		ns.NoteRead(0)
		if day+TotalsDays <= t.today {
			ns.Group.Delete(it.Key())
		} else {
			t.stay = true
		}
	}
	if err := it.Error(); err != nil {
		return store.Error(err)
	}
	t.from, t.swept, t.rows, t.absent = nil, t.today, t.stay || t.written, nil
	ns.Group.Set([]byte{keys.Daily}, keys.AppendNumber(nil, uint64(t.today)))
	return nil
}

// loadTotals reads whether there are rows, and when they were swept.
func (ns *names) loadTotals() error {
	t := &ns.totals
	value, err := store.Lookup(ns.Store.DB(), []byte{keys.Daily})
	if err != nil {
		return err
	}
	if value != nil {
		day, err := keys.ParseNumber(value)
		if err != nil {
			return fmt.Errorf("%w: sweep of totals: %w", base.ErrCorrupt, err)
		}
		t.swept = uint32(day)
	}
	lower, upper := keys.TotalsRows()
	return ns.Walk(lower, upper, func(*pebble.Iterator, int) (bool, error) {
		t.rows = true
		return false, nil
	})
}

// DaysOf appends the totals of a queue by day, in order: of the last TotalsDays days, those on
// which something happened.
func (ns *names) DaysOf(queue string, dst []keys.TotalsValue) ([]keys.TotalsValue, Verdict) {
	t := &ns.totals
	if t.written {
		return dst, Again
	}
	first := max(t.today, TotalsDays) - TotalsDays + 1
	if t.rows {
		it, err := t.reader.Open()
		if err != nil {
			ns.Broken = err
			return dst, Decided
		}
		upper := keys.AppendTotals(nil, queue, 1<<32-1)
		at := it.SeekGEWithLimit(keys.AppendTotals(nil, queue, first), upper)
		for ; at == pebble.IterValid; at = it.NextWithLimit(upper) {
			v, err := ns.row(it)
			if err != nil {
				ns.Broken = err
				return dst, Decided
			}
			dst = append(dst, v)
		}
		if err := it.Error(); err != nil {
			ns.Broken = store.Error(err)
			return dst, Decided
		}
	}
	if q := ns.Queues[queue]; q != nil && q.totals.Day >= first {
		if n := len(dst); n > 0 && dst[n-1].Day == q.totals.Day { // it has come back on the same day
			dst = dst[:n-1]
		}
		dst = append(dst, q.totals)
	}
	return dst, Decided
}
