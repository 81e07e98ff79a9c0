package codeq

import (
	"time"

	"codeq/internal/engine"
)

// ownerClock is the time by which a shard's owner judges leases, such that nobody
// loses one because the owner had other things to do.
//
// An operation on a lease counts from when it came, not from when the owner gets to
// it. The owner knows between which two looks at its inbox it came, and goes by the
// first. For the same reason it takes no lease back whose deadline is later than
// what an operation that it has not decided yet may have come at.
//
// And while the owner stalls, because its disk or its process does, no lease can be
// renewed, and nobody hears of one that was granted: of such a time no more than
// stallAfter counts. While there is no room on the disk for what ends or renews a
// lease, no time counts at all.
//
// All times are of the shard's monotonic clock, in ms since its origin. But for due, they are
// less what did not count.
type ownerClock struct {
	stalled uint64 // ms that did not count
	due     uint64 // when the owner was to read the clock again; never: when somebody wakes it

	taken    uint64 // when what was taken from the inbox may have come
	waiting  uint64 // likewise, what is in the inbox; not before taken
	deferred uint64 // likewise, what is put off to the next group; never: nothing is
}

// stallAfter is how much of a stall counts, in ms. Groups of a slow disk take less,
// so that the leases of those who have died still end in time.
const stallAfter = 250

// look is when the owner has taken what is in its inbox, no sooner than now.
// REQUIRES: what it took before is decided, or put off.
func (c *ownerClock) look(now uint64, late lateness) {
	c.taken = min(c.waiting, c.counted(late.taken))
	c.waiting = min(now, c.counted(late.left))
}

// counted is a time less what does not count, or a time before it.
func (c *ownerClock) counted(at uint64) uint64 {
	if at == engine.Never {
		return engine.Never
	}
	return at - min(at, c.stalled)
}

// sleep is before the owner sleeps for so many ms after the last tick; never: until
// somebody wakes it.
func (c *ownerClock) sleep(ms uint64) {
	if ms == engine.Never {
		c.due = engine.Never
	} else {
		c.due += ms
	}
}

// wake is the end of the sleep; nothing has come before the time at, which is with
// what does not count.
func (c *ownerClock) wake(at uint64) { c.waiting = c.counted(at) }

// putOff is for an operation that is decided in the next group, and may have come at a time.
func (c *ownerClock) putOff(came uint64) { c.deferred = min(c.deferred, came) }

func millisSince(origin time.Time) uint64 { return uint64(time.Since(origin) / time.Millisecond) }

func wallMillis(o *Options) uint64 { return uint64(max(o.wall().UnixMilli(), 0)) }
