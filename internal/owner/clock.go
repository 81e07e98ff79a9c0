package owner

import (
	"codeq/internal/base"
	"codeq/internal/engine"
)

// Clock is a shard owner's time for the expiry of leases. No worker loses a lease because the owner
// was busy.
//
// For an operation on a lease the time counts at which it came, not the one at which the owner
// decides it. The owner knows between which two readings of its inbox the operation came, and uses
// the first. For the same reason it takes no lease back if an undecided operation may have come
// before the deadline of the lease.
//
// While the owner stalls, because its disk or its process does, no lease can be renewed, and no
// worker gets one that was granted: no more than stallAfter of such a time counts. While there is
// no room on the disk to end or renew a lease, no time counts at all.
//
// All times are of the shard's monotonic clock, in ms since its origin. All except due are reduced
// by the time that did not count.
type Clock struct {
	uptime  uint64 // of the last tick, with the time that did not count
	stalled uint64 // ms that did not count
	due     uint64 // when the owner planned to read the clock again; never: when it is woken

	taken    uint64 // earliest time at which the operations taken from the inbox may have come
	waiting  uint64 // likewise, for those in the inbox; not before taken
	deferred uint64 // likewise, for those deferred to the next group; never: there are none
}

// NewClock returns the clock of an owner that has not begun.
func NewClock() Clock { return Clock{deferred: engine.Never} }

// stallAfter is how much of a stall counts, in ms. Groups on a slow disk take less, so that the
// leases of dead workers still expire in time.
const stallAfter = 250

// Tick reads the monotonic clock, and returns the time that counts. full: there is no room on the
// disk to end or renew a lease, and there was none since the last tick.
func (c *Clock) Tick(at uint64, full bool) (now uint64) {
	switch {
	case full:
		c.stalled += at - c.uptime
	case c.due != engine.Never && at > c.due+stallAfter:
		c.stalled += at - c.due - stallAfter
	}
	if base.Invariants {
		if at < c.uptime {
			base.Violated("the owner's clock goes back from %d to %d", c.uptime, at)
		}
		if c.stalled > at {
			base.Violated("of %d ms, %d do not count", at, c.stalled)
		}
	}
	c.uptime, c.due = at, at
	now = at - c.stalled
	c.waiting = min(c.waiting, now)
	return now
}

// Look notes that the owner has emptied its inbox, not before now. The first operations on leases
// that wait for room came at the given times, by the monotonic clock: those taken now, and those
// left.
// REQUIRES: the operations that it took before are decided, or deferred.
func (c *Clock) Look(now, taken, left uint64) {
	c.taken = min(c.waiting, c.counted(taken))
	c.waiting = min(now, c.counted(left))
}

// counted returns a time reduced by the time that did not count, or an earlier time.
func (c *Clock) counted(at uint64) uint64 {
	if at == engine.Never {
		return engine.Never
	}
	return at - min(at, c.stalled)
}

// Sleep notes that the owner sleeps until ms after the last tick; engine.Never: until it is woken.
func (c *Clock) Sleep(ms uint64) {
	if ms == engine.Never {
		c.due = engine.Never
	} else {
		c.due += ms
	}
}

// Wake notes the end of the sleep; nothing has come before the time at, of the monotonic clock.
func (c *Clock) Wake(at uint64) { c.waiting = c.counted(at) }

// Defer notes that an operation, which may have come at the time came, is deferred to the next
// group.
func (c *Clock) Defer(came uint64) { c.deferred = min(c.deferred, came) }

// Retry returns the earliest time at which the deferred operations may have come, which are now
// decided again.
func (c *Clock) Retry() (came uint64) {
	came, c.deferred = min(c.deferred, c.taken), engine.Never
	return came
}

// Taken returns the earliest time at which the operations taken from the inbox may have come.
func (c *Clock) Taken() uint64 { return c.taken }

// Reapable returns the latest deadline of leases that may be taken back: no operation that came
// before it is undecided. taken: operations that were taken from the inbox are undecided.
func (c *Clock) Reapable(taken bool) uint64 {
	if taken {
		return min(c.taken, c.deferred)
	}
	return min(c.waiting, c.deferred)
}
