package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// In a cluster, leases continue when the leader of their shard changes. The shard has a clock of
// leases, which goes on from leader to leader, and lease records have deadlines by it. It is
// monotonic, and not faster than the monotonic clocks of the leaders: if these are right, no lease
// ends before its time. The wall clocks of the nodes do not matter.
//
// While the shard has leases, its leader stores the clock when it begins, after the clock has stood
// still, and otherwise every leaseClockEvery. The next leader adds the age of the entry in its
// store, by its own monotonic clock, up to leaseClockEvery: after that the shard had no leader, or
// its clock stood still. So leases last too long by
//
//   - the time that the entry was on its way,
//   - the part of leaseClockEvery that the next leader does not know, because its process has begun
//     or got a snapshot since,
//   - and the time beyond leaseClockEvery in which the shard had no leader.
//
// If monotonic clocks run at different rates, a lease is shorter or longer by the difference during
// its time and leaseClockEvery before it: since the clock of leases was stored, the last leader has
// measured time by one clock, and the next leader measures the same time by another.
//
// Invariant: no lease is granted or extended by a clock that is behind the clock of a possible next
// leader: if a leader knows less than others, or its clock has stood still, the clock is stored in
// the same group.

const (
	// leaseClockEvery is how far the clock of leases goes until it is stored again, ms.
	leaseClockEvery = 5000
	// leaseGrace is the least time that a lease lasts after a change of the leader, ms: its holder
	// may have waited for a leader, to extend or end the lease.
	leaseGrace = 1000
)

// leaseClock holds the clock of leases as its difference from Now, an unsigned number that may wrap
// around.
type leaseClock struct {
	ahead  uint64 // of Now, ms
	stored uint64 // the clock in the store, or in the current group
	begun  bool   // this leader has stored it
	stood  uint64 // for how long Now had stood still by then, ms
}

// leaseClock returns the clock of leases, ms.
func (le *leases) leaseClock() uint64 { return le.Now + le.clock.ahead }

// loadLeaseClock continues the clock of leases.
func (le *leases) loadLeaseClock() error {
	if !le.config.Replicated {
		return nil
	}
	v, _, err := store.Value(le.Store.DB(), []byte{keys.LeaseTime}, "clock of leases", keys.ParseLeaseTime)
	if err != nil {
		return err
	}
	le.clock.stored = v.Clock
	le.clock.ahead = le.clock.stored + min(le.ClockAge, leaseClockEvery) - le.Now
	le.loadCrashes(v.Crashes)
	return nil
}

// left returns how long a lease of another leader still lasts in a replicated shard, ms.
func (le *leases) left(r *leaseRecord, duration uint64) uint64 {
	if r.ends == 0 { // the shard was not replicated
		return duration
	}
	now := le.leaseClock()
	return min(max(r.ends, now+leaseGrace)-now, duration)
}

// leaseClockIsDue reports whether it is time to store the clock of leases. Without room, this clock
// stands still.
func (le *leases) leaseClockIsDue() bool {
	c := &le.clock
	return le.config.Replicated && le.all.Len() > 0 && le.HasRoom(RoomScarce) &&
		(!c.begun || c.stood != le.Uptime-le.Now || le.leaseClock()-c.stored >= leaseClockEvery)
}

// storeLeaseClock stores the clock of leases if it is due.
func (le *leases) storeLeaseClock() {
	if le.leaseClockIsDue() {
		le.writeLeaseClock()
	}
}

// writeLeaseClock stores the clock of leases, and the crashes that go by it.
func (le *leases) writeLeaseClock() {
	le.clock.stored, le.clock.begun, le.clock.stood = le.leaseClock(), true, le.Uptime-le.Now
	v := keys.LeaseTimeValue{Clock: le.clock.stored, Crashes: le.storedCrashes()}
	le.Group.Set([]byte{keys.LeaseTime}, v.Append(le.value[:0]))
}
