package engine

import (
	"codeq/internal/keys"
	"codeq/internal/store"
)

// leaseClock returns the clock of leases, ms: see store.LeaseClock.
func (le *leases) leaseClock() uint64 { return le.clock.At(le.Now) }

// loadLeaseClock continues the clock of leases.
func (le *leases) loadLeaseClock() error {
	if !le.config.Replicated {
		return nil
	}
	v, _, err := store.Value(le.Store.DB(), []byte{keys.LeaseTime}, "clock of leases", keys.ParseLeaseTime)
	if err != nil {
		return err
	}
	le.clock = store.NewLeaseClock(v.Clock, le.ClockAge, le.Now)
	le.loadCrashes(v.Crashes)
	return nil
}

// leaseClockIsDue reports whether it is time to store the clock of leases. Without room, this clock
// stands still.
func (le *leases) leaseClockIsDue() bool {
	return le.config.Replicated && le.all.Len() > 0 && le.HasRoom(RoomScarce) && le.clock.IsDue(le.Now, le.Uptime)
}

// storeLeaseClock stores the clock of leases if it is due.
func (le *leases) storeLeaseClock() {
	if le.leaseClockIsDue() {
		le.writeLeaseClock()
	}
}

// writeLeaseClock stores the clock of leases, and the crashes that go by it.
func (le *leases) writeLeaseClock() {
	le.clock.Note(le.Now, le.Uptime)
	v := keys.LeaseTimeValue{Clock: le.clock.Stored, Crashes: le.storedCrashes()}
	le.Group.Set([]byte{keys.LeaseTime}, v.Append(le.value[:0]))
}
