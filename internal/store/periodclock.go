package store

// PeriodClock is the clock of periods.
//
// Idempotency keys, waits between attempts and retention are given as lengths. Their deadlines are
// by a clock of the shard's own, the clock of periods. It is the wall clock, but never goes back:
// while the wall clock is behind it, it goes on by the monotonic clock. So after the wall clock was
// ahead, even by years and in an earlier process, a period ends at the latest when its length has
// passed since the shard was loaded; and a wall clock that is behind ends nothing early. If the
// wall clock is set forward, periods end as much earlier.
//
// In a cluster it follows the wall clock of the leader less its lead over those of other nodes.
//
// Times of day (the RunAt of a task, ticks) are by the wall clock itself.
//
// Invariant: Now is not behind the minter's time. Both are the wall clock, unless that was set
// back: then the minter's time goes on at half speed. So the clock has its own entry only as long
// as it differs; otherwise it equals the minter's time, which is stored with every group, or with
// the times when the wall clock was set.
//
// Invariant: a deadline is persisted with a clock. So the next process begins at the time at which
// the deadline was made, or later.
type PeriodClock struct {
	Now    uint64 // ms since 1970
	read   uint64 // Uptime at which it showed that
	Stored uint64 // in the store, or in the group; 0: not there
	Waits  uint64 // by then, all waits that are due before it were over when the shard was loaded
	Made   bool   // the group has made a deadline, or has acted on one that cannot pass twice
}

// The wall clock goes as the monotonic one, except for the rounding of both, in ms, and a part of
// the time that has passed, 2^-10.
const (
	ClockJitter = 2
	ClockDrift  = 10
)

// NewPeriodClock returns a clock that shows a time, as the monotonic clock shows uptime.
func NewPeriodClock(now, uptime uint64) PeriodClock { return PeriodClock{Now: now, read: uptime} }

// Tick sets the clock from the wall clock and the monotonic clock, both in ms.
func (c *PeriodClock) Tick(wall, uptime uint64) {
	passed := uptime - c.read
	c.read = uptime
	if now := c.Now + passed; wall < c.Now || wall+ClockJitter+passed>>ClockDrift < now {
		c.Now = now
	} else {
		c.Now = wall
	}
}
