package store

import (
	"math"
	"math/rand/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Minter makes the IDs and the other increasing numbers of one shard, and the places of tasks that
// become ready again. Only the shard's owner uses it.
//
// Invariant: Clock never decreases, even over a restart: every group stores it, and load resumes
// after the largest stored value. So an ID is never made twice, and it makes no place before that
// of a task that was ready already, however the wall clock jumps.
//
// While the wall clock is behind Time, because it was set back or is that of another node, Time
// advances at half speed: so successive tasks still get different times, and the wall clock catches
// up, after twice as long. From Sets follows when a stamp was made by the wall clock.
type Minter struct {
	Clock  uint64 // milliseconds << 12 | counter, of the last number or place made
	Time   uint64 // ms since 1970; never decreases, never behind the wall clock or Clock
	read   uint64 // monotonic clock that Time belongs to, ms
	lead   uint64 // by how much Time was ahead of the wall clock then, ms
	Sets   ClockSets
	Unset  bool // Sets differs from the stored value
	Rand   *rand.Rand
	shard  int
	shards int
}

const clockShift = 12

// NewMinter returns the minter of a shard.
func NewMinter(seed [32]byte, shard, shards int) Minter {
	return Minter{Rand: rand.New(rand.NewChaCha8(seed)), shard: shard, shards: shards}
}

// Loaded returns the latest time that the store has, ms.
func (m *Minter) Loaded() uint64 { return max(m.Clock>>clockShift, m.Sets.Latest()) }

// Tick sets Time from the wall clock and the monotonic clock, both in ms.
func (m *Minter) Tick(wall, now uint64) {
	opened, made := m.Time == 0, m.Clock>>clockShift
	if opened {
		m.Time, m.read = m.Loaded(), now
	}
	passed := now - m.read
	caughtUp := min(passed/2, m.lead)
	expected := m.Time + passed - caughtUp
	before := *m
	switch {
	case wall >= max(m.Time, made) && (caughtUp == m.lead && wall+ClockJitter+passed>>ClockDrift >= expected || wall >= expected):
		m.Time, m.read = wall, now
	case made > expected:
		m.Time, m.read = made, now
	case caughtUp < m.lead:
		m.Time, m.read = expected-passed%2, now-passed%2
	default:
		m.Time, m.read = expected, now
	}
	if base.Invariants && m.Time < before.Time {
		base.Violated("the time of a shard goes back from %d to %d", before.Time, m.Time)
	}
	m.lead = m.Time - min(wall, m.Time)
	if wall != 0 && before.Time != 0 {
		m.noteSet(&before, wall, passed, opened)
	}
}

// noteSet notes that the wall clock was set in the last ms, or while the shard was closed, if it
// was.
func (m *Minter) noteSet(before *Minter, wall, passed uint64, opened bool) {
	lead := before.Sets.leadNow(before.Time)
	expected := before.Time + passed - lead // by the wall clock
	slack := UsualLead + passed>>ClockDrift
	if wall+slack >= expected && wall <= expected+slack {
		return
	}
	at := m.Time
	if wall > expected && wall == at { // which no stamp has yet
		at = max(m.Clock>>clockShift, before.Time+passed-min(passed/2, lead))
		if at > m.Time { // a stamp from now on is not before it
			m.Time, m.read, m.lead = at, before.read+passed, at-wall
		}
	}
	m.Sets, m.Unset = m.Sets.Add(keys.ClockSet{At: at, Wall: wall, Opened: opened}), true
}

// made returns when a stamp was made, by the wall clock as it was set last, ms.
func (m *Minter) made(stamp uint64) uint64 { return m.Sets.Made(stamp) }

// Now returns the time, ms, which is not before any that the shard has stored.
func (m *Minter) Now() uint64 { return max(m.Time, m.Clock>>clockShift) }

// Stamp returns the time for a stored record. REQUIRES: the group stores the clock.
func (m *Minter) Stamp() uint64 {
	m.Clock = max(m.Clock, m.Time<<clockShift)
	return m.Now()
}

// Next returns a number larger than all before, with the time in its upper bits.
func (m *Minter) Next() uint64 {
	m.Clock = max(m.Time<<clockShift, m.Clock+1)
	return m.Clock
}

// Since returns the place of a task that becomes ready again now: behind all places made in an
// earlier millisecond.
func (m *Minter) Since() uint64 { return m.sinceMillis(m.Now()) }

// SinceAgo returns the place of a task that was due some ms ago.
func (m *Minter) SinceAgo(ms uint64) uint64 { return m.sinceMillis(m.Time - min(ms, m.Time)) }

func (m *Minter) sinceMillis(ms uint64) uint64 {
	m.Clock = max(m.Clock, ms<<clockShift)
	return keys.MovedSince(ms)
}

// Age returns for how many ms a task has been ready at a place, 2^32-1 at most.
func (m *Minter) Age(since uint64) uint32 {
	at, now := m.made(keys.SinceMillis(since)), m.made(m.Time)
	return uint32(min(max(now, at)-at, math.MaxUint32))
}

// ID makes the ID of a task of a lane.
func (m *Minter) ID(lane uint32) keys.ID {
	c := m.Next()
	ms, ctr := c>>clockShift, c&(1<<clockShift-1)
	id := keys.ID{
		byte(ms >> 40), byte(ms >> 32), byte(ms >> 24), byte(ms >> 16), byte(ms >> 8), byte(ms),
		0x70 | byte(ctr>>8), byte(ctr),
		0, byte(lane >> 16), byte(lane >> 8), byte(lane),
	}
	for {
		r := m.Rand.Uint64()
		id[8] = 0x80 | byte(r>>32)&0x3f
		id[12], id[13], id[14], id[15] = byte(r>>24), byte(r>>16), byte(r>>8), byte(r)
		if keys.Route(&id, m.shard, m.shards) {
			return id
		}
	}
}
