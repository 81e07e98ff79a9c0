package store

import "codeq/internal/keys"

// Clock is the times of a shard's clocks at one moment, ms since 1970. The zero Clock is not known.
type Clock struct {
	Wall    uint64 // the wall clock; in a cluster, the one on which its nodes agree
	Stamps  uint64 // the clock that stamps IDs, places of ready tasks, and ends; not before Wall
	Periods uint64 // the clock of waits between attempts
	Sets    ClockSets
}

// Stamp returns the time that goes with the state of a task, as it is stored, ms: since when it is
// ready, until when it waits or is leased, when it was produced, or when it has ended.
func (t *Task) Stamp() uint64 {
	switch {
	case t.Lease != nil:
		return t.Lease.Deadline
	case t.Range == keys.Task:
		return keys.SinceMillis(t.At)
	case t.Range == keys.Scheduled:
		return t.At
	case t.Range == keys.Blocked:
		return keys.MintedAt(t.ID)
	}
	return t.Ended.At
}

// UsualLead is how far the clock that stamps may be ahead of the wall clock as it numbers the tasks
// of one moment, ms.
const UsualLead = 2000

// usualJitter is the usual difference between the clock of waits and a wall clock that is never
// set, ms: both are rounded, and do not go exactly alike.
const usualJitter = 100

// Shown returns Stamp by the wall clock, and the time that counts for the bounds of lists. They
// differ only while no clock was set, by as much as clocks then differ. A wait between attempts has
// its end by a wall clock that is never set.
func (t *Task) Shown() (shown, counts uint64) {
	at, c := t.Stamp(), &t.clock
	switch {
	case !c.isKnown() || t.Lease != nil:
		return at, at
	case t.Range == keys.Scheduled:
		if max(c.Wall, c.Periods)-min(c.Wall, c.Periods) > usualJitter && t.Record.IsWait(at) {
			at = c.Wall + at - min(at, c.Periods)
		}
		return at, at
	}
	return c.ByWall(at)
}

// Until returns when an ended task is deleted, by the wall clock as it is set now; keys.Forever:
// never, or the task has not ended.
func (t *Task) Until() uint64 {
	if !keys.Ended(t.Range) || t.At == keys.Forever {
		return keys.Forever
	}
	c := &t.clock
	if max(c.Wall, c.Periods)-min(c.Wall, c.Periods) <= usualJitter || !c.isKnown() {
		return t.At
	}
	return c.Wall + t.At - min(t.At, c.Periods)
}

// ByWall returns a stamp of the task's shard by the wall clock.
func (t *Task) ByWall(stamp uint64) uint64 {
	if !t.clock.isKnown() {
		return stamp
	}
	shown, _ := t.clock.ByWall(stamp)
	return shown
}

func (c *Clock) isKnown() bool { return c.Stamps|c.Periods != 0 }

// ByWall returns when a stamp was made, by the wall clock as it is set now, and the time that
// counts for the bounds of lists, which is never one to come.
func (c *Clock) ByWall(stamp uint64) (shown, counts uint64) {
	shown = c.Sets.Made(stamp)
	if shown <= c.Wall {
		return shown, shown
	}
	now := c.Sets.Made(c.Stamps)
	counts = c.Wall - min(c.Wall, now-min(shown, now))
	if now-min(c.Wall, now) > UsualLead {
		shown = counts
	}
	return shown, counts
}

// StampsBetween returns between which stamps all those lie that count from one time on and before
// another, ms.
func (c *Clock) StampsBetween(from, to uint64, scheduled bool) (_, _ uint64) {
	if !scheduled {
		ahead, behind := c.Sets.Most()
		return from - min(behind, from), to + max(c.Stamps-min(c.Wall, c.Stamps), ahead)
	}
	ahead, behind := c.Periods-min(c.Wall, c.Periods), c.Wall-min(c.Wall, c.Periods)
	return from - min(behind, from), to + ahead
}
