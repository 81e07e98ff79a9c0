package engine

import (
	"bytes"
	"fmt"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// A queue that has a rate remembers when its last task was leased, by the clock of periods, so that
// the rate goes on after a restart or with another leader. It is stored with the lease, at most
// once in grantEvery. Queues without a rate have no such entry.

const (
	// grantEvery is how long after a stored grant others are not stored, ms.
	grantEvery = 1000
	// noGrant is stored when a queue gets a rate: no task was leased since.
	noGrant = 0
	// grantsAtOnce bounds how many missing entries a group adds.
	grantsAtOnce = 64
)

func grantedKey(queue string) []byte { return append([]byte{keys.Granted}, queue...) }

// noteGrant is called for a lease of a queue that has a rate.
func (ns *names) noteGrant(q *Queue) {
	if now := ns.periods.now; q.granted == noGrant || now-q.granted >= grantEvery {
		ns.storeGrant(q, now)
	}
}

func (ns *names) storeGrant(q *Queue, at uint64) {
	ns.periods.made = true
	q.granted = at
	ns.Group.set(grantedKey(q.Name), keys.AppendNumber(ns.value[:0], at))
}

// SinceGrant returns how long ago the last lease of a queue was that is stored, ms; Never: there
// was none since it has its rate.
func (ns *names) SinceGrant(q *Queue) uint64 {
	if q.granted == noGrant {
		return Never
	}
	return ns.periods.now - min(q.granted, ns.periods.now)
}

// followRate is called when the settings of a queue have changed.
func (ns *names) followRate(q *Queue, before *Settings) {
	switch has := q.Settings.Rate > 0; {
	case has == (before.Rate > 0):
	case has:
		ns.storeGrant(q, noGrant)
	default:
		q.granted = noGrant
		ns.Group.delete(grantedKey(q.Name))
	}
}

// loadGrants reads the last grants. A queue that has a rate and no entry may have had one right
// now.
// REQUIRES: the settings are loaded, and the clock of periods is set.
func (ns *names) loadGrants() error {
	for _, q := range ns.settled.queues.All() {
		if q != nil && q.Settings.Rate > 0 {
			q.granted = ns.periods.now
			ns.ungranted = append(ns.ungranted, q)
		}
	}
	known := make(map[*Queue]bool)
	err := store.Scan(ns.Store.DB(), keys.Granted, func(key, value []byte) error {
		at, err := keys.ParseNumber(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: last grant of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		if q := ns.Queues[string(key[1:])]; q != nil && q.Settings.Rate > 0 {
			q.granted, known[q] = min(at, ns.periods.now), true
		}
		return nil
	})
	ns.ungranted = slices.DeleteFunc(ns.ungranted, func(q *Queue) bool { return known[q] })
	return err
}

// sealGrants stores when the rates of queues began of which that was not known, some in a group.
func (ns *names) sealGrants() {
	if len(ns.ungranted) == 0 || ns.Group.isEmpty() {
		return
	}
	n := min(len(ns.ungranted), grantsAtOnce)
	for _, q := range ns.ungranted[:n] {
		if ns.Queues[q.Name] == q && q.Settings.Rate > 0 {
			ns.storeGrant(q, q.granted)
		}
	}
	ns.ungranted = ns.ungranted[n:]
}
