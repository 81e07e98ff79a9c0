package store

import (
	"slices"

	"codeq/internal/keys"
)

// ClockSets is how the wall clock of a shard was set, the earliest first. From it follows how long
// ago a stamp was made: the clock that stamps is never set back. While it is ahead of the wall
// clock it advances at half speed.
//
// A shard that is opened later finds a wall clock that has advanced, and cannot tell whether that
// was set. So it counts as set: if the wall clock is set back later, the stamps before such a gap
// are those of a clock that was right.
type ClockSets []keys.ClockSet

// maxClockSets is how many are kept.
const maxClockSets = 16

// leadAt returns by how much the clock that stamps is ahead as it shows a time after the one with
// an index, and before the next one, ms.
func (c ClockSets) leadAt(i int, stamp uint64) uint64 {
	if i < 0 || c[i].Wall >= c[i].At {
		return 0
	}
	lead := c[i].At - c[i].Wall
	return lead - min(lead, stamp-min(stamp, c[i].At))
}

// leadNow returns the lead of the clock that stamps over the wall clock, at a time of the former
// after the last entry, ms.
func (c ClockSets) leadNow(stamp uint64) uint64 { return c.leadAt(len(c)-1, stamp) }

// Latest returns a time that the clock that stamps has shown, ms.
func (c ClockSets) Latest() uint64 {
	if n := len(c); n > 0 {
		return max(c[n-1].At, c[n-1].Wall)
	}
	return 0
}

// Made returns when a stamp was made, by the wall clock as it was set last, ms.
func (c ClockSets) Made(stamp uint64) uint64 {
	if len(c) == 0 {
		return stamp
	}
	return uint64(max(0, int64(stamp)-c.lead(stamp)))
}

// lead returns by how much a stamp is ahead of the time at which it was made, ms.
//
// Invariant: of two stamps, the later one was made later.
func (c ClockSets) lead(stamp uint64) (lead int64) {
	if stamp > c[len(c)-1].At {
		return int64(c.leadNow(stamp))
	}
	gap, gaps := int64(0), int64(0)   // by how much it advanced while the shard was closed: since the stamp, and at all
	ahead, back := int64(0), int64(0) // by how much it was set forward, or was perhaps set back while it was right
	least := int64(-1)                // the stamp is not from before its gap
	for i, s := range c {
		counts := stamp <= s.At
		if counts && (i == 0 || stamp > c[i-1].At) {
			if lead = int64(c.leadAt(i-1, stamp)); i > 0 && stamp < c[i-1].Wall {
				least = int64(c[i-1].At)
			}
		}
		forward := int64(c.leadAt(i-1, s.At)+s.Wall) - int64(s.At)
		switch {
		case forward < 0:
			undoes := min(-forward, ahead)
			ahead -= undoes
			closed := min(-forward-undoes, gaps) // it was wrong since then, and right before
			gaps -= closed
			if back = -forward - undoes - closed; counts {
				closed = min(-forward-undoes, gap)
				gap -= closed
				lead += -forward - closed
			}
		case !s.Opened:
			ahead += max(0, forward-back)
			back = max(0, back-forward)
			if counts {
				lead -= forward
			}
		case forward < back: // time has passed
			if gaps += forward; counts {
				gap += forward
			}
		default: // a clock that was behind is right again, or more time than that has passed
			if counts {
				undoes := back
				if c.before(i, stamp) {
					undoes = min(back, max(0, lead))
				}
				lead -= undoes
				gap += forward - undoes
			}
			gaps += forward - back
			back = 0
		}
	}
	if least > 0 {
		return min(lead, int64(stamp)-least+c.lead(uint64(least)))
	}
	return lead
}

// before reports whether a stamp is from before the clock was set back the last time before i.
func (c ClockSets) before(i int, stamp uint64) bool {
	for i--; i >= 0; i-- {
		if c.leadAt(i-1, c[i].At)+c[i].Wall < c[i].At {
			return stamp <= c[i].At
		}
	}
	return true
}

// Most returns by how much stamps are at most ahead of the time at which they were made, and
// behind it, ms.
func (c ClockSets) Most() (ahead, behind uint64) {
	for _, s := range c {
		for stamp := s.At; stamp <= s.At+1; stamp++ {
			lead := c.lead(stamp)
			ahead, behind = max(ahead, uint64(max(0, lead))), max(behind, uint64(max(0, -lead)))
		}
	}
	return ahead, behind
}

// Add returns the list with one more. If there are too many, the one that changes least goes.
func (c ClockSets) Add(s keys.ClockSet) ClockSets {
	c = append(slices.Clip(c), s) // others may read c
	if len(c) <= maxClockSets {
		return c
	}
	least, at := uint64(0), -1
	for i := range len(c) - 1 {
		before := c.leadAt(i-1, c[i].At) + c[i].Wall
		if by := max(before, c[i].At) - min(before, c[i].At); at < 0 || by < least {
			least, at = by, i
		}
	}
	return slices.Delete(c, at, at+1)
}
