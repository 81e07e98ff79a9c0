package workerpool

import "time"

// Renewal renews the leases of the tasks at work in one shard, so that a stalled shard delays the
// renewals of no other. It renews three times in the length of a lease, and sleeps while none is at
// work: Wake is called when some are about to be. K is a lease.
type Renewal[K comparable] struct {
	*Heartbeat
	For   time.Duration // of a lease
	Now   func() time.Time
	Waits bool // as long as a lease, while renewals fail: there may be no new leader yet
	// AtWork returns the leases.
	AtWork func() []K
	// Renew renews leases, and returns those that are lost, and why.
	Renew func(leases []K) (lost map[K]error, err error)
	// Lose ends the tasks of leases.
	Lose func(lost map[K]error)

	renewedAt time.Time // when the shard last renewed leases
}

// Run renews leases until Stop.
func (r *Renewal[K]) Run() {
	r.Heartbeat.Run(r.For/3, func() { r.renewedAt = r.Now() }, r.renew)
}

// renew renews the leases, and returns false if there are none.
func (r *Renewal[K]) renew() (more bool) {
	leases := r.AtWork()
	if len(leases) == 0 {
		return false
	}
	asked := r.Now()
	lost, err := r.Renew(leases)
	switch {
	case err == nil:
		r.renewedAt = asked
	case r.Waits && r.Now().Sub(r.renewedAt) < r.For:
		return true
	default:
		lost = make(map[K]error, len(leases))
		for _, k := range leases {
			lost[k] = err
		}
	}
	r.Lose(lost)
	return true
}
