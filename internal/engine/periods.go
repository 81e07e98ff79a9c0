package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Idempotency keys, waits between attempts and retention are given as lengths. Their deadlines are
// by a clock of the shard's own, the clock of periods. It is the wall clock, but never goes back:
// while the wall clock is behind it, it goes on by the monotonic clock. So after the wall clock was
// ahead, even by years and in an earlier process, a period ends at the latest when its length has
// passed since the shard was loaded; and a wall clock that is behind ends nothing early. If the
// wall clock is set forward, periods end as much earlier.
//
// In a cluster it follows the wall clock of the leader less Instant.Ahead.
//
// Times of day (the RunAt of a task, ticks) are by the wall clock itself.
//
// Invariant: now is not behind the minter's time. Both are the wall clock, unless that was set
// back: then the minter's time goes on at half speed. So the clock has its own entry only as long
// as it differs; otherwise it equals the minter's time, which is stored with every group, or with
// the times when the wall clock was set.
//
// Invariant: a deadline is persisted with a clock. So the next process begins at the time at which
// the deadline was made, or later.
type periodClock struct {
	now    uint64 // ms since 1970
	read   uint64 // Uptime at which it showed that
	stored uint64 // in the store, or in the group; 0: not there
	waits  uint64 // by then, all waits that are due before it were over when the shard was loaded
	made   bool   // the group has made a deadline, or has acted on one that cannot pass twice
}

// periodsEvery is how far the clock of periods goes until it is stored again if no deadline is
// made, ms.
const periodsEvery = 1000

// The wall clock goes as the monotonic one, except for the rounding of both, in ms, and a part of
// the time that has passed, 2^-10.
const (
	clockJitter = 2
	clockDrift  = 10
)

// tick sets the clock from the wall clock and the monotonic clock, both in ms.
func (c *periodClock) tick(wall, uptime uint64) {
	passed := uptime - c.read
	c.read = uptime
	if now := c.now + passed; wall < c.now || wall+clockJitter+passed>>clockDrift < now {
		c.now = now
	} else {
		c.now = wall
	}
}

// after returns the deadline of a period of some ms that begins now.
func (r *round) after(ms uint64) uint64 {
	r.periods.made = true
	return keys.Later(r.periods.now, ms)
}

// retainedUntil returns the bucket of a task that ends now and is kept for some ms; negative: for
// ever.
func (r *round) retainedUntil(retention int64) uint64 {
	r.periods.made = true
	return keys.BucketOf(r.periods.now, retention)
}

// past reports whether a deadline has passed.
func (r *round) past(deadline uint64) bool { return deadline <= r.periods.now }

// wallOf returns the wall clock's time at a deadline if that clock is not set; not before now.
func (r *round) wallOf(deadline uint64) uint64 {
	if deadline == Never {
		return Never
	}
	return r.Wall + deadline - min(deadline, r.periods.now)
}

// agrees reports whether the minter's clock equals the clock of periods.
func (r *round) agrees() bool { return r.periods.now == r.mint.time }

// loadPeriodClock continues the clock of periods.
// REQUIRES: the minter's clock is loaded.
func (r *round) loadPeriodClock() error {
	c := &r.periods
	*c = periodClock{now: r.mint.loaded(), read: r.Uptime}
	b, err := store.Lookup(r.Store.DB(), []byte{keys.PeriodTime})
	if err != nil || b == nil {
		return err
	}
	v, err := keys.ParsePeriodTime(b)
	if err != nil {
		return fmt.Errorf("%w: clock of periods: %w", base.ErrCorrupt, err)
	}
	c.now, c.stored, c.waits = v.Clock, v.Clock, v.Waits
	return nil
}

// sealPeriodClock makes the group store the clock of periods.
func (tm *times) sealPeriodClock() {
	c := &tm.periods
	made := c.made
	c.made = false
	if tm.agrees() {
		if made { // the minter may not have made a number for long
			tm.mint.clock = max(tm.mint.clock, tm.mint.time<<clockShift)
			tm.Group.unclocked = tm.Group.unclocked || len(tm.Group.Touched) == 0
		}
		if c.stored != 0 {
			c.stored = 0
			tm.Group.Delete([]byte{keys.PeriodTime})
		}
		return
	}
	if c.stored != 0 && !made && c.now-c.stored < periodsEvery || tm.Group.isEmpty() {
		return
	}
	c.stored = c.now
	v := keys.PeriodTimeValue{Clock: c.now, Waits: min(tm.nextWait.at, c.now)}
	tm.Group.Set([]byte{keys.PeriodTime}, v.Append(tm.value[:0]))
}

// loadClockSets continues the list of how the wall clock was set.
func (r *round) loadClockSets() error {
	b, err := store.Lookup(r.Store.DB(), []byte{keys.ClockSets})
	if err != nil || b == nil {
		return err
	}
	if r.mint.sets, err = keys.ParseClockSets(b); err != nil {
		return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return nil
}

// sealClockSets makes the group store the list, if there is something else to store.
func (r *round) sealClockSets() {
	if m := &r.mint; m.unset && !r.Group.isEmpty() {
		m.unset = false
		r.Group.Set([]byte{keys.ClockSets}, keys.AppendClockSets(r.value[:0], m.sets))
	}
}
