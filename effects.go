package codeq

// What the rules have collected, and the owner carries out: between two operations what other
// operations of the group go by, before the commit what concerns what disk has already, and
// after it what others are to learn of.

// follow carries out what the rest of the group goes by.
func (s *shard) follow() {
	if len(s.effects.configured) > 0 {
		s.followSettings()
	}
	if len(s.effects.freed) > 0 {
		s.leaveGates()
	}
}

// followSettings has claims go by new settings of their queues.
func (s *shard) followSettings() {
	for i, r := range s.effects.configured {
		s.effects.configured[i] = reconfigured{}
		s.limitClaims(s.claimsOf(r.queue), r.before, r.fresh)
	}
	s.effects.configured = s.effects.configured[:0]
}

// leaveGates gives back the places of leases that have ended.
func (s *shard) leaveGates() {
	for i, q := range s.effects.freed {
		s.effects.freed[i] = nil
		s.leaveGate(s.claimsOf(q))
	}
	s.effects.freed = s.effects.freed[:0]
}

// feedAll has the claims served that wait for what may be claimed now.
func (s *shard) feedAll() {
	for i, q := range s.effects.fed {
		s.effects.fed[i] = nil
		q.fed = false
		s.feedClaims(s.claimsOf(q))
	}
	s.effects.fed = s.effects.fed[:0]
	for i, q := range s.effects.shown {
		s.effects.shown[i] = nil
		s.publish(q)
	}
	s.effects.shown = s.effects.shown[:0]
}

// sendAll has others learn of what disk has had before the group.
func (s *shard) sendAll() {
	for i := range s.effects.outgoing {
		s.deliver(&s.effects.outgoing[i])
	}
	clear(s.effects.outgoing)
	s.effects.outgoing = s.effects.outgoing[:0]
	if sw := s.effects.sweep; sw != nil {
		s.effects.sweep = nil
		s.startSweep(sw)
	}
}

// tellAll has others learn of what the group has done, which has persisted.
func (s *shard) tellAll() {
	e := &s.effects
	if s.node == nil { // else the log tells
		if len(e.events) > 0 {
			events := eventsOf(e.events)
			for _, sub := range s.hub.all() {
				sub.offer(events)
			}
		}
		for _, r := range e.canceled {
			s.runs.canceled(receiptOf(r))
		}
	}
}

// clear forgets what the group had to tell.
func (e *effects) clear() {
	clear(e.events)
	clear(e.endings)
	e.events, e.endings, e.canceled = e.events[:0], e.endings[:0], e.canceled[:0]
}

// note sets what the next group goes by.
func (s *shard) note() {
	s.reap = s.reapable()
	s.wanted = s.interested
	if s.node == nil {
		s.wanted = XKindSet(s.hub.wanted.Load()) | XWantCancels
	}
	if len(s.awaits) > 0 {
		s.wanted |= XWantOutcomes
	}
}

// answerAll answers who waits for tasks that the group has ended.
func (s *shard) answerAll() {
	if len(s.awaits) == 0 {
		return
	}
	for i := range s.effects.endings {
		e := &s.effects.endings[i]
		s.answer(e.ID, outcomeOf(&e.Outcome))
	}
}

// eventsOf are events of the rules, for subscribers.
func eventsOf(events []XEvent) []Event {
	all := make([]Event, len(events))
	for i := range events {
		e := &events[i]
		all[i] = Event{
			Kind: EventKind(e.Kind), ID: e.ID, Queue: e.Queue, Tenant: e.Tenant, Attempt: int(e.Attempt), Time: e.Time, LastError: e.LastError,
		}
	}
	return all
}
