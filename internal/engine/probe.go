package engine

import (
	"encoding/binary"
	"slices"

	"codeq/internal/keys"
)

// Probe reads and disturbs a State, for the tests of packages that use it. Only the owner uses it.
type Probe struct{ s *State }

// IsAtRest is State.isAtRest.
func (p Probe) IsAtRest() bool { return p.s.isAtRest() }

// Usage counts the contents of memory, and the work since the shard was loaded.
type Usage struct {
	Read                                     int // entries of the store
	Lanes, Doubtful                          int
	LaneSweeps                               uint64
	Limits                                   int
	Telling                                  int    // parents with children to be told
	Schedules                                uint64 // times that a schedule had a turn
	Groups, Uniques                          cacheUsage
	OutNext, OutFirst, OutStored, OutWaiting []uint64 // messages, by receiver
	// by sender, the last message taken
	Inbound []uint64
}

// cacheUsage counts the entries and fingerprints that a writeBackCache holds.
type cacheUsage struct {
	Held    int
	Whole   bool // nothing else exists
	Listed  bool // all keys have fingerprints
	TooMany bool
	Prints  int
	Most    int // that are held between two groups, at most
}

func usageOf[K comparable, V any](m *writeBackCache[K, V]) cacheUsage {
	return cacheUsage{len(m.held), m.whole, m.all, m.tooMany, m.prints.Len(), m.most()}
}

// Usage returns the present Usage.
func (p Probe) Usage() Usage {
	s := p.s
	return Usage{
		Read:  s.reading.entries,
		Lanes: s.Names.catalogue.loaded.Len(), Doubtful: s.Names.doubtful.Len(), LaneSweeps: s.Names.catalogue.swept,
		Limits: len(s.Ties.limits), Telling: s.Ties.notices.count, Schedules: s.Times.recurring.looked,
		Groups: usageOf(&s.Ties.turns), Uniques: usageOf(&s.Ties.uniques),
		OutNext: slices.Clone(s.Mail.out.next), OutFirst: slices.Clone(s.Mail.out.first), OutStored: slices.Clone(s.Mail.out.stored),
		OutWaiting: slices.Clone(s.Mail.out.waiting), Inbound: slices.Clone(s.Mail.inbound),
	}
}

// MostTurns and MostUniques are how many groups, and idempotency keys, memory holds between two
// groups.
func MostTurns() int   { m := newTurnCache(); return m.most() }
func MostUniques() int { m := newUniqueCache(); return m.most() }

// ForgetCaches empties the caches: the next access to an entry reads disk, and keys are listed
// again. It returns false if the group has changed entries.
func (p Probe) ForgetCaches() bool {
	s := p.s
	if len(s.Ties.uniques.changed)+len(s.Ties.turns.changed)+len(s.Ties.pending.changed)+len(s.Ties.notices.ends.changed)+len(s.Ties.pins.counts.changed) > 0 {
		return false
	}
	forgetCache(&s.Ties.uniques)
	forgetCache(&s.Ties.turns)
	forgetCache(&s.Ties.pending)
	forgetCache(&s.Ties.notices.ends)
	forgetCache(&s.Ties.pins.counts)
	return true
}

func forgetCache[K comparable, V any](m *writeBackCache[K, V]) {
	clear(m.held)
	m.whole = false
	m.forgetPrints()
}

// TooManyUniques adds more fingerprints of idempotency keys than memory may hold: so many bytes
// from now on, or as many as ever for 0.
func (p Probe) TooManyUniques(most int) {
	forgetCache(&p.s.Ties.uniques)
	p.s.Ties.uniques.mostPrints = most
	for n := uint32(0); p.s.Ties.uniques.note([keys.UniqueLen]byte(binary.BigEndian.AppendUint32(make([]byte, 12, 16), n))); n++ {
	}
}

// Expire ends the lease of a task as if its deadline had passed. It returns false if the task has
// no lease.
func (p Probe) Expire(id keys.ID) bool {
	ls := p.s.Leases.byID[id]
	if ls != nil {
		p.s.expire(ls)
	}
	return ls != nil
}

// ReloadOutbox reads the numbers of messages again.
func (p Probe) ReloadOutbox(shards int) error { return p.s.Mail.loadOutbox(shards) }

// LoseNumbers resets the stored numbers of messages in memory, as if disk had none.
func (p Probe) LoseNumbers() {
	clear(p.s.Mail.out.stored)
	p.s.Mail.out.ahead = true
}

// NumbersAhead reports whether some numbers of messages are not stored yet.
func (p Probe) NumbersAhead() bool { return p.s.Mail.out.ahead }

// Send stores a message to a shard.
func (p Probe) Send(to int, m *keys.Message) { p.s.Mail.send(to, m) }
