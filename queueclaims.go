package codeq

import "codeq/internal/engine"

// queueClaims is what the owner of a shard knows of a queue beside its tasks: the claims that wait
// for them, and what claims have to pass.
type queueClaims struct {
	queue *engine.Queue
	claimLines
	sets     []setEntry // that have the queue
	hungry   bool       // on the list of those whose waiters may be served
	listedAt int        // 1 + the place in the list of those with tickets; 0: it has none

	heads *queueHeads // nil: the shard has published none
	gate  gateway     // nil: neither a rate nor a limit of concurrency
	shut  bool        // the gate has turned a claim away, and has not been opened since

	opensAt     uint64  // when it is no longer held back; monotonic clock of the shard, ms
	throttledAt int     // the place among those that are held back; negative: it is none
	attended    bool    // on the list of those that speak looks after
	warden      *warden // nil: another shard has it, or none does
}

func (c *queueClaims) Due() uint64 { return c.opensAt }
func (c *queueClaims) Spot() *int  { return &c.throttledAt }

// claimsOf returns what the owner knows of a queue.
func (s *shard) claimsOf(q *engine.Queue) *queueClaims {
	if q.Handle < len(s.claims) {
		if c := s.claims[q.Handle]; c != nil {
			return c
		}
	}
	for q.Handle >= len(s.claims) {
		s.claims = append(s.claims, nil)
	}
	c := &queueClaims{queue: q, throttledAt: -1}
	s.claims[q.Handle] = c
	return c
}

// knownClaims is claimsOf for a queue by name; nil if the shard does not know the queue.
func (s *shard) knownClaims(queue string) *queueClaims {
	if q := s.Queues[queue]; q != nil {
		return s.claimsOf(q)
	}
	return nil
}

// isNeeded reports whether the owner could not do without a queue.
func (c *queueClaims) isNeeded() bool {
	return c.gate != nil || c.warden != nil || c.throttledAt >= 0 || c.attended || c.listedAt != 0 || len(c.sets) > 0 || c.hungry
}

// forget drops the queues that neither the rules nor the owner need.
func (s *shard) forget() {
	for _, q := range s.Effects.Forgotten {
		if q.Handle < len(s.claims) {
			if c := s.claims[q.Handle]; c != nil {
				if c.isNeeded() {
					continue // whoever ends that lets the queue rest again
				}
				s.unpublish(c)
				s.claims[q.Handle] = nil
			}
		}
		s.Forget(q)
	}
	clear(s.Effects.Forgotten)
	s.Effects.Forgotten = s.Effects.Forgotten[:0]
}
