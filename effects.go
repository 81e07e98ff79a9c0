package codeq

import "codeq/internal/engine"

// What the rules have collected, and the owner carries out: between two operations what other
// operations of the group go by, before the commit what concerns what disk has already, and
// after it what others are to learn of.

// follow carries out what the rest of the group goes by.
func (s *shard) follow() {
	if len(s.Effects.Configured) > 0 {
		s.followSettings()
	}
	if len(s.Effects.Freed) > 0 {
		s.leaveGates()
	}
}

// followSettings has claims go by new settings of their queues.
func (s *shard) followSettings() {
	for i, r := range s.Effects.Configured {
		s.Effects.Configured[i] = engine.Reconfigured{}
		s.limitClaims(s.claimsOf(r.Queue), r.Before, r.Fresh)
	}
	s.Effects.Configured = s.Effects.Configured[:0]
}

// leaveGates gives back the places of leases that have ended.
func (s *shard) leaveGates() {
	for i, q := range s.Effects.Freed {
		s.Effects.Freed[i] = nil
		s.leaveGate(s.claimsOf(q))
	}
	s.Effects.Freed = s.Effects.Freed[:0]
}

// feedAll has the claims served that wait for what may be claimed now.
func (s *shard) feedAll() {
	for i, q := range s.Effects.Fed {
		s.Effects.Fed[i] = nil
		q.Fed = false
		s.feedClaims(s.claimsOf(q))
	}
	s.Effects.Fed = s.Effects.Fed[:0]
	for i, q := range s.Effects.Shown {
		s.Effects.Shown[i] = nil
		s.publish(q)
	}
	s.Effects.Shown = s.Effects.Shown[:0]
}

// sendAll has others learn of what disk has had before the group.
func (s *shard) sendAll() {
	for i := range s.Effects.Outgoing {
		s.deliver(&s.Effects.Outgoing[i])
	}
	clear(s.Effects.Outgoing)
	s.Effects.Outgoing = s.Effects.Outgoing[:0]
	if sw := s.Effects.Sweep; sw != nil {
		s.Effects.Sweep = nil
		s.startSweep(sw)
	}
}

// tellAll has others learn of what the group has done, which has persisted.
func (s *shard) tellAll() {
	e := &s.Effects
	if s.node == nil { // else the log tells
		if len(e.Events) > 0 {
			events := eventsOf(e.Events)
			for _, sub := range s.hub.all() {
				sub.offer(events)
			}
		}
		for _, r := range e.Canceled {
			s.runs.canceled(receiptOf(r))
		}
	}
}

// note sets what the next group goes by.
func (s *shard) note() {
	s.Reap = s.reapable()
	s.Wanted = s.Interested
	if s.node == nil {
		s.Wanted = engine.KindSet(s.hub.wanted.Load()) | engine.WantCancels
	}
	if len(s.awaits) > 0 {
		s.Wanted |= engine.WantOutcomes
	}
}

// answerAll answers who waits for tasks that the group has ended.
func (s *shard) answerAll() {
	if len(s.awaits) == 0 {
		return
	}
	for i := range s.Effects.Endings {
		e := &s.Effects.Endings[i]
		s.answer(e.ID, outcomeOf(&e.Outcome))
	}
}

// eventsOf are events of the rules, for subscribers.
func eventsOf(events []engine.Event) []Event {
	all := make([]Event, len(events))
	for i := range events {
		e := &events[i]
		all[i] = Event{
			Kind: EventKind(e.Kind), ID: e.ID, Queue: e.Queue, Tenant: e.Tenant, Attempt: int(e.Attempt), Time: e.Time, LastError: e.LastError,
		}
	}
	return all
}
