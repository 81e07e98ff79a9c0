package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// periodsEvery is how far the clock of periods goes until it is stored again if no deadline is
// made, ms.
const periodsEvery = 1000

// after returns the deadline of a period of some ms that begins now.
func (r *round) after(ms uint64) uint64 {
	r.periods.Made = true
	return keys.Later(r.periods.Now, ms)
}

// retainedUntil returns the bucket of a task that ends now and is kept for ms; negative: always.
func (r *round) retainedUntil(retention int64) uint64 {
	r.periods.Made = true
	return keys.BucketOf(r.periods.Now, retention)
}

// past reports whether a deadline has passed.
func (r *round) past(deadline uint64) bool { return deadline <= r.periods.Now }

// wallOf returns the wall clock's time at a deadline if that clock is not set; not before now.
func (r *round) wallOf(deadline uint64) uint64 {
	if deadline == Never {
		return Never
	}
	return r.Wall + deadline - min(deadline, r.periods.Now)
}

// loadPeriodClock continues the clock of periods.
// REQUIRES: the minter's clock is loaded.
func (r *round) loadPeriodClock() error {
	r.periods = store.NewPeriodClock(r.mint.Loaded(), r.Uptime)
	v, ok, err := store.Value(r.Store.DB(), []byte{keys.PeriodTime}, "clock of periods", keys.ParsePeriodTime)
	if ok {
		r.periods.Now, r.periods.Stored, r.periods.Waits = v.Clock, v.Clock, v.Waits
	}
	return err
}

// sealPeriodClock makes the group store the clock of periods.
func (tm *times) sealPeriodClock() {
	c := &tm.periods
	made := c.Made
	c.Made = false
	if c.Now == tm.mint.Time {
		if made { // the minter may not have made a number for long
			tm.mint.Stamp()
			tm.Group.unclocked = tm.Group.unclocked || len(tm.Group.Touched) == 0
		}
		if c.Stored != 0 {
			c.Stored = 0
			tm.Group.Delete([]byte{keys.PeriodTime})
		}
		return
	}
	if c.Stored != 0 && !made && c.Now-c.Stored < periodsEvery || tm.Group.isEmpty() {
		return
	}
	c.Stored = c.Now
	v := keys.PeriodTimeValue{Clock: c.Now, Waits: min(tm.nextWait.At, c.Now)}
	tm.Group.Set([]byte{keys.PeriodTime}, v.Append(tm.value[:0]))
}

// loadClockSets continues the list of how the wall clock was set.
func (r *round) loadClockSets() error {
	sets, _, err := store.Value(r.Store.DB(), []byte{keys.ClockSets}, "set clocks", keys.ParseClockSets)
	r.mint.Sets = sets
	return err
}

// sealClockSets makes the group store the list, if there is something else to store.
func (r *round) sealClockSets() {
	if m := &r.mint; m.Unset && !r.Group.isEmpty() {
		m.Unset = false
		r.Group.Set([]byte{keys.ClockSets}, keys.AppendClockSets(r.value[:0], m.Sets))
	}
}
