package store

// LeaseClock is the clock of leases of a replicated shard, as its difference from the shard's own
// monotonic clock (now, below), ms.
//
// In a cluster, leases continue when the leader of their shard changes. The shard has a clock of
// leases, which goes on from leader to leader, and lease records have deadlines by it. It is
// monotonic, and not faster than the monotonic clocks of the leaders: if these are right, no lease
// ends before its time. The wall clocks of the nodes do not matter.
//
// While the shard has leases, its leader stores the clock when it begins, after the clock has stood
// still, and otherwise every LeaseClockEvery. The next leader adds the age of the entry in its
// store, by its own monotonic clock, up to LeaseClockEvery: after that the shard had no leader, or
// its clock stood still. So leases last too long by
//
//   - the time that the entry was on its way,
//   - the part of LeaseClockEvery that the next leader does not know, because its process has begun
//     or got a snapshot since,
//   - and the time beyond LeaseClockEvery in which the shard had no leader.
//
// If monotonic clocks run at different rates, a lease is shorter or longer by the difference during
// its time and LeaseClockEvery before it: since the clock of leases was stored, the last leader has
// measured time by one clock, and the next leader measures the same time by another.
//
// Invariant: no lease is granted or extended by a clock that is behind the clock of a possible next
// leader: if a leader knows less than others, or its clock has stood still, the clock is stored in
// the same group.
type LeaseClock struct {
	Ahead  uint64 // of now; an unsigned number that may wrap around
	Stored uint64 // the clock in the store, or in the current group
	Begun  bool   // this leader has stored it
	stood  uint64 // for how long now had stood still by then
}

const (
	// LeaseClockEvery is how far the clock of leases goes until it is stored again, ms.
	LeaseClockEvery = 5000
	// LeaseGrace is the least time that a lease lasts after a change of the leader, ms: its holder
	// may have waited for a leader, to extend or end the lease.
	LeaseGrace = 1000
)

// NewLeaseClock continues a stored clock of a known age.
func NewLeaseClock(stored, age, now uint64) LeaseClock {
	return LeaseClock{Stored: stored, Ahead: stored + min(age, LeaseClockEvery) - now}
}

// At returns the clock of leases.
func (c *LeaseClock) At(now uint64) uint64 { return now + c.Ahead }

// Left returns how long a lease of another leader still lasts that ends at a time; 0: the shard was
// not replicated when it was granted.
func (c *LeaseClock) Left(ends, duration, now uint64) uint64 {
	if ends == 0 {
		return duration
	}
	at := c.At(now)
	return min(max(ends, at+LeaseGrace)-at, duration)
}

// IsDue reports whether it is time to store the clock. uptime does not stand still.
func (c *LeaseClock) IsDue(now, uptime uint64) bool {
	return !c.Begun || c.stood != uptime-now || c.At(now)-c.Stored >= LeaseClockEvery
}

// DueAt returns when it is time, unless the clock stands still.
func (c *LeaseClock) DueAt() (now uint64) { return c.Stored + LeaseClockEvery - c.Ahead }

// Note notes that the clock is stored.
func (c *LeaseClock) Note(now, uptime uint64) {
	c.Stored, c.Begun, c.stood = c.At(now), true, uptime-now
}
