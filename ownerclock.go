package codeq

import (
	"time"

	"codeq/internal/engine"
)

// ownerClock is the time by which a shard's owner decides whether leases have expired. No worker
// loses a lease because the owner was busy.
//
// For an operation on a lease the time counts at which it came, not the one at which the owner
// decides it. The owner knows between which two readings of its inbox the operation came, and uses
// the first. For the same reason it takes no lease back whose deadline is later than the time at
// which an undecided operation may have come.
//
// While the owner stalls, because its disk or its process does, no lease can be renewed, and no
// worker gets one that was granted: no more than stallAfter of such a time counts. While there is
// no room on the disk to end or renew a lease, no time counts at all.
//
// All times are of the shard's monotonic clock, in ms since its origin. All except due are reduced
// by the time that did not count.
type ownerClock struct {
	stalled uint64 // ms that did not count
	due     uint64 // when the owner planned to read the clock again; never: when it is woken

	taken    uint64 // earliest time at which the operations taken from the inbox may have come
	waiting  uint64 // likewise, for those in the inbox; not before taken
	deferred uint64 // likewise, for those deferred to the next group; never: there are none
}

// stallAfter is how much of a stall counts, in ms. Groups on a slow disk take less, so that the
// leases of dead workers still expire in time.
const stallAfter = 250

// look notes that the owner has emptied its inbox, not before now. REQUIRES: the operations that it
// took before are decided, or deferred.
func (c *ownerClock) look(now uint64, late lateness) {
	c.taken = min(c.waiting, c.counted(late.taken))
	c.waiting = min(now, c.counted(late.left))
}

// counted returns a time reduced by the time that did not count, or an earlier time.
func (c *ownerClock) counted(at uint64) uint64 {
	if at == engine.Never {
		return engine.Never
	}
	return at - min(at, c.stalled)
}

// sleep notes that the owner sleeps until ms after the last tick; never: until it is woken.
func (c *ownerClock) sleep(ms uint64) {
	if ms == engine.Never {
		c.due = engine.Never
	} else {
		c.due += ms
	}
}

// wake notes the end of the sleep; nothing has come before the time at, which includes the time
// that did not count.
func (c *ownerClock) wake(at uint64) { c.waiting = c.counted(at) }

// putOff notes that an operation, which may have come at the time came, is deferred to the next
// group.
func (c *ownerClock) putOff(came uint64) { c.deferred = min(c.deferred, came) }

func millisSince(origin time.Time) uint64 { return uint64(time.Since(origin) / time.Millisecond) }

func wallMillis(o *Options) uint64 { return uint64(max(o.wall().UnixMilli(), 0)) }
