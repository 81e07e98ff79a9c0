package engine

import (
	"slices"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// Probe reads and disturbs a State, for the tests of packages that use it. Only the owner uses it.
type Probe struct{ s *State }

// IsAtRest is State.isAtRest.
func (p Probe) IsAtRest() bool { return p.s.isAtRest() }

// Usage counts the contents of memory, and the work since the shard was loaded.
type Usage struct {
	Read            int // entries of the store
	Lanes, Doubtful int
	LaneSweeps      uint64
	Limits          int
	Telling         int    // parents with children to be told
	Schedules       uint64 // times that a schedule had a turn
	Groups, Uniques store.CacheUsage
	Out             store.OutboxUsage
	// by sender, the last message taken
	Inbound []uint64
}

// Usage returns the present Usage.
func (p Probe) Usage() Usage {
	s := p.s
	return Usage{
		Read:  s.ReadEntries,
		Lanes: s.Names.catalogue.loaded.Len(), Doubtful: s.Names.doubtful.Len(), LaneSweeps: s.Names.catalogue.swept,
		Limits: len(s.Ties.limits), Telling: s.Ties.notices.count, Schedules: s.Times.recurring.Turns,
		Groups: s.Ties.turns.Usage(), Uniques: s.Ties.uniques.Usage(),
		Out: s.Mail.Outbox.Usage(), Inbound: slices.Clone(s.Mail.inbound),
	}
}

// MostTurns and MostUniques are how many groups, and idempotency keys, memory holds between two
// groups.
func MostTurns() int   { return store.MostHeld[uint64, keys.GroupValue]() }
func MostUniques() int { return store.MostHeld[[keys.UniqueLen]byte, keys.UniqueValue]() }

// ForgetCaches empties the caches: the next access to an entry reads disk, and keys are listed
// again. It returns false if the group has changed entries.
func (p Probe) ForgetCaches() bool {
	all := p.s.Ties.caches()
	if slices.ContainsFunc(all[:], rangeCache.HasChanges) {
		return false
	}
	for _, m := range all {
		m.Forget()
	}
	return true
}

// TooManyUniques adds more fingerprints of idempotency keys than memory may hold: so many bytes
// from now on, or as many as ever for 0.
func (p Probe) TooManyUniques(most int) { p.s.Ties.uniques.Overflow(most) }

// Expire ends the lease of a task as if its deadline had passed. It returns false if the task has
// no lease.
func (p Probe) Expire(id keys.ID) bool {
	ls := p.s.Leases.byID[id]
	if ls != nil {
		p.s.expire(ls)
	}
	return ls != nil
}

// LoseNumbers resets the stored numbers of messages in memory, as if disk had none.
func (p Probe) LoseNumbers() { p.s.Mail.LoseNumbers() }

// Send stores a message to a shard.
func (p Probe) Send(to int, m *keys.Message) { p.s.Mail.send(to, m) }
