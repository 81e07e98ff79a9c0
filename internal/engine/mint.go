package engine

import (
	"math"
	"math/rand/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// minter makes the IDs and the other increasing numbers of one shard, and the places of tasks that
// become ready again. Only the shard's owner uses it.
//
// Invariant: clock never decreases, even over a restart: every group stores it, and load resumes
// after the largest stored value. So an ID is never made twice, and no task that becomes ready gets
// a place before one that was ready already, however the wall clock jumps.
//
// While the wall clock is behind time, because it was set back or is that of another node, time
// advances at half speed: so successive tasks still get different times, and the wall clock catches
// up, after twice as long. From sets follows when a stamp was made by the wall clock.
type minter struct {
	clock  uint64 // milliseconds << 12 | counter, of the last number or place made
	time   uint64 // ms since 1970; never decreases, never behind the wall clock or clock
	read   uint64 // monotonic clock that time belongs to, ms
	lead   uint64 // by how much time was ahead of the wall clock then, ms
	sets   store.ClockSets
	unset  bool // sets differs from the stored value
	rand   *rand.Rand
	shard  int
	shards int
}

const clockShift = 12

// loaded returns the latest time that the store has, ms.
func (m *minter) loaded() uint64 { return max(m.clock>>clockShift, m.sets.Latest()) }

// tick sets time from the wall clock and the monotonic clock, both in ms.
func (m *minter) tick(wall, now uint64) {
	opened, made := m.time == 0, m.clock>>clockShift
	if opened {
		m.time, m.read = m.loaded(), now
	}
	passed := now - m.read
	caughtUp := min(passed/2, m.lead)
	expected := m.time + passed - caughtUp
	before := *m
	switch {
	case wall >= max(m.time, made) && (caughtUp == m.lead && wall+clockJitter+passed>>clockDrift >= expected || wall >= expected):
		m.time, m.read = wall, now
	case made > expected:
		m.time, m.read = made, now
	case caughtUp < m.lead:
		m.time, m.read = expected-passed%2, now-passed%2
	default:
		m.time, m.read = expected, now
	}
	if base.Invariants && m.time < before.time {
		base.Violated("the time of a shard goes back from %d to %d", before.time, m.time)
	}
	m.lead = m.time - min(wall, m.time)
	if wall != 0 && before.time != 0 {
		m.noteSet(&before, wall, passed, opened)
	}
}

// noteSet notes that the wall clock was set in the last ms, or while the shard was closed, if it
// was.
func (m *minter) noteSet(before *minter, wall, passed uint64, opened bool) {
	lead := before.sets.LeadNow(before.time)
	expected := before.time + passed - lead // by the wall clock
	slack := store.UsualLead + passed>>clockDrift
	if wall+slack >= expected && wall <= expected+slack {
		return
	}
	at := m.time
	if wall > expected && wall == at { // which no stamp has yet
		at = max(m.clock>>clockShift, before.time+passed-min(passed/2, lead))
	}
	m.sets, m.unset = m.sets.Add(keys.ClockSet{At: at, Wall: wall, Opened: opened}), true
}

// made returns when a stamp was made, by the wall clock as it was set last, ms.
func (m *minter) made(stamp uint64) uint64 { return m.sets.Made(stamp) }

// time returns the time by the minter's clock, ms, which is not before any that the shard has
// stored.
func (r *round) time() uint64 { return max(r.mint.time, r.mint.clock>>clockShift) }

// stamp is the time that a stored record gets. REQUIRES: the group stores the clock.
func (r *round) stamp() uint64 {
	r.mint.clock = max(r.mint.clock, r.mint.time<<clockShift)
	return r.time()
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
	at, now := m.made(keys.SinceMillis(since)), m.made(m.time)
	return uint32(min(max(now, at)-at, math.MaxUint32))
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
