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
func (s *State) noteGrant(q *Queue) {
	if now := s.periods.now; q.granted == noGrant || now-q.granted >= grantEvery {
		s.storeGrant(q, now)
	}
}

func (s *State) storeGrant(q *Queue, at uint64) {
	s.periods.made = true
	q.granted = at
	s.Group.set(grantedKey(q.Name), keys.AppendNumber(s.value[:0], at))
}

// SinceGrant returns how long ago the last lease of a queue was that is stored, ms; Never: there
// was none since it has its rate.
func (s *State) SinceGrant(q *Queue) uint64 {
	if q.granted == noGrant {
		return Never
	}
	return s.periods.now - min(q.granted, s.periods.now)
}

// followRate is called when the settings of a queue have changed.
func (s *State) followRate(q *Queue, before *Settings) {
	switch has := q.Settings.Rate > 0; {
	case has == (before.Rate > 0):
	case has:
		s.storeGrant(q, noGrant)
	default:
		q.granted = noGrant
		s.Group.delete(grantedKey(q.Name))
	}
}

// loadGrants reads the last grants. A queue that has a rate and no entry may have had one right
// now.
// REQUIRES: the settings are loaded, and the clock of periods.
func (s *State) loadGrants() error {
	s.SetClock()
	for _, q := range s.settled.queues.All() {
		if q != nil && q.Settings.Rate > 0 {
			q.granted = s.periods.now
			s.ungranted = append(s.ungranted, q)
		}
	}
	known := make(map[*Queue]bool)
	err := store.Scan(s.Store.DB(), keys.Granted, func(key, value []byte) error {
		at, err := keys.ParseNumber(bytes.Clone(value))
		if err != nil {
			return fmt.Errorf("%w: last grant of queue %q: %w", base.ErrCorrupt, key[1:], err)
		}
		if q := s.Queues[string(key[1:])]; q != nil && q.Settings.Rate > 0 {
			q.granted, known[q] = min(at, s.periods.now), true
		}
		return nil
	})
	s.ungranted = slices.DeleteFunc(s.ungranted, func(q *Queue) bool { return known[q] })
	return err
}

// sealGrants stores when the rates of queues began of which that was not known, some in a group.
func (s *State) sealGrants() {
	if len(s.ungranted) == 0 || s.Group.isEmpty() {
		return
	}
	n := min(len(s.ungranted), grantsAtOnce)
	for _, q := range s.ungranted[:n] {
		if s.Queues[q.Name] == q && q.Settings.Rate > 0 {
			s.storeGrant(q, q.granted)
		}
	}
	s.ungranted = s.ungranted[n:]
}
