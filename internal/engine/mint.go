package engine

import (
	"math"
	"math/rand/v2"

	"codeq/internal/keys"
)

// minter makes the IDs and the other increasing numbers of one shard, and the places of tasks that
// become ready again. Only the shard's owner uses it.
//
// Invariant: clock never decreases, even over a restart: every group stores it, and load resumes
// after the largest stored value. So an ID is never made twice, and no task that becomes ready gets
// a place before one that was ready already, whatever the wall clock does.
//
// While the wall clock is behind clock, because it was set back or is that of another node, time
// advances at half speed: so successive tasks still get different times, and the wall clock catches
// up.
type minter struct {
	clock  uint64 // milliseconds << 12 | counter, of the last number or place made
	time   uint64 // ms since 1970; never decreases, never behind the wall clock or clock
	read   uint64 // monotonic clock for which time is valid, ms
	rand   *rand.Rand
	shard  int
	shards int
}

const clockShift = 12

// tick sets time from the wall clock and the monotonic clock, both in ms.
func (m *minter) tick(wall, now uint64) {
	switch made := m.clock >> clockShift; {
	case wall >= max(m.time, made):
		m.time, m.read = wall, now
	case made > m.time:
		m.time, m.read = made, now
	default:
		passed := (now - m.read) / 2
		m.time += passed
		m.read += 2 * passed
	}
}

// time returns the time by the minter's clock, ms, which is not before any that the shard has
// stored.
func (s *State) time() uint64 { return max(s.mint.time, s.mint.clock>>clockShift) }

// stamp is the time that a stored record gets. REQUIRES: the group stores the clock.
func (s *State) stamp() uint64 {
	s.mint.clock = max(s.mint.clock, s.mint.time<<clockShift)
	return s.time()
}

// next returns a number larger than all before, with the time in its upper bits.
func (m *minter) next() uint64 {
	m.clock = max(m.time<<clockShift, m.clock+1)
	return m.clock
}

// since returns the place of a task that becomes ready again now: behind all places made in an
// earlier millisecond.
func (m *minter) since() uint64 { return m.sinceMillis(max(m.time, m.clock>>clockShift)) }

// sinceAgo returns the place of a task that was due some ms ago.
func (m *minter) sinceAgo(ms uint64) uint64 { return m.sinceMillis(m.time - min(ms, m.time)) }

func (m *minter) sinceMillis(ms uint64) uint64 {
	m.clock = max(m.clock, ms<<clockShift)
	return keys.MovedSince(ms)
}

// age returns for how many ms a task has been ready at a place, 2^32-1 at most.
func (m *minter) age(since uint64) uint32 {
	at := keys.SinceMillis(since)
	return uint32(min(max(m.time, at)-at, math.MaxUint32))
}

// id makes the ID of a task of a lane.
func (m *minter) id(lane uint32) keys.ID {
	c := m.next()
	ms, ctr := c>>clockShift, c&(1<<clockShift-1)
	id := keys.ID{
		byte(ms >> 40), byte(ms >> 32), byte(ms >> 24), byte(ms >> 16), byte(ms >> 8), byte(ms),
		0x70 | byte(ctr>>8), byte(ctr),
		0, byte(lane >> 16), byte(lane >> 8), byte(lane),
	}
	for {
		r := m.rand.Uint64()
		id[8] = 0x80 | byte(r>>32)&0x3f
		id[12], id[13], id[14], id[15] = byte(r>>24), byte(r>>16), byte(r>>8), byte(r)
		if keys.Route(&id, m.shard, m.shards) {
			return id
		}
	}
}
