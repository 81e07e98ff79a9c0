package codeq

import "codeq/internal/keys"

// A group of tasks has one turn. The first task to become due takes it, and keeps
// it until it ends, over all its attempts; the others wait in the scope of the
// group. An entry of the range Group says who has the turn: a group without tasks
// that are due has none. A task that dies while Settings.HoldGroups is set keeps the turn, which
// its record notes, until it is redriven, purged or canceled.

// takeTurn gives a task the turn of its group if nobody has it. A task that has
// it keeps it until it ends, also while it waits for another attempt.
func (s *shard) takeTurn(scope uint64, id ID) bool {
	v, ok := s.groups.get(s, scope)
	switch {
	case !ok:
		s.groups.put(s, scope, keys.GroupValue{Holder: id})
		return true
	case v.Holder == keys.ID(id):
		return true
	case !v.Waiting || v.Holder == keys.ID{}: // giveTurn looks for the change
		v.Waiting = true
		s.groups.put(s, scope, v)
	}
	return false
}

// passTurn is the end of a task of a group: the first that waits is next.
func (s *shard) passTurn(q *queueState, scope uint64, id ID) {
	v, ok := s.groups.get(s, scope)
	if !ok || v.Holder != keys.ID(id) { // it was not its turn
		return
	}
	if !v.Waiting {
		s.groups.drop(s, scope)
		return
	}
	s.groups.put(s, scope, keys.GroupValue{Waiting: true})
	s.wake(q, scope, ID{}, wakeUp)
}

// giveTurn gives the turn of a group to the first task that waits for it.
func (s *shard) giveTurn(q *queueState, scope uint64) error {
	var first *located
	err := s.waiting(q, scope, func(_ int, at *located) bool {
		first = at
		return false
	})
	switch {
	case err != nil:
		return err
	case first != nil:
		s.groups.put(s, scope, keys.GroupValue{Holder: first.id, Waiting: true})
		s.unblock(first)
		s.place(first.lane, keys.SinceOf(keys.ID(first.id)), first.id, first.rec.Encode())
	case s.groups.hasChanged(scope): // the first has just begun to wait
		s.wake(q, scope, ID{}, wakeUp)
	default:
		s.groups.drop(s, scope)
	}
	return nil
}
