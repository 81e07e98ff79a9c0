package engine

import (
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The tasks of a group take turns: one has the turn. The first task to become due takes it, and
// keeps it until it ends, over all its attempts; the others wait in the scope of the group. An
// entry of the range Group says who has the turn; a group without due tasks has no entry. A task
// that dies while Settings.HoldGroups is set keeps the turn, as its record notes, until it is
// redriven, purged or canceled. While a handler goes on whose task was canceled, completed or given
// back, no task of the group begins.

// takeTurn gives a task the turn of its group if nobody has it. A task that has it keeps it until
// it ends, also while it waits for another attempt.
func (ti *ties) takeTurn(scope uint64, id keys.ID) bool {
	v, ok := ti.turns.get(ti.round, scope)
	switch {
	case !ok:
		ti.turns.put(ti.round, scope, keys.GroupValue{Holder: id})
		return true
	case v.Holder == keys.ID(id):
		return true
	case !v.Waiting || v.Holder == keys.ID{}: // giveTurn checks for the change
		if !v.Waiting {
			ti.cursors.begin(scope)
		}
		v.Waiting = true
		ti.turns.put(ti.round, scope, v)
	}
	return false
}

// parkTurn makes a task wait that has the turn of its group, until the orphan has returned that it
// has left.
func (ti *ties) parkTurn(l *Lane, id keys.ID, rec *record.Record) {
	ti.turns.put(ti.round, rec.Group, keys.GroupValue{Holder: id, Waiting: true})
	ti.block(l, rec.Group, id, rec.Encode())
	ti.wake(l.queue, rec.Group, keys.ID{}, keys.WakeUp)
}

// unparkTurn lets a task go on that has the turn of its group, if it was parked.
func (ti *ties) unparkTurn(q *Queue, scope uint64, id keys.ID) error {
	if ti.Group.hasChanged(id) {
		return nil
	}
	at, err := ti.blockedIn(q, scope, id)
	if at == nil || err != nil {
		return err
	}
	ti.cursors.forget(scope)
	ti.names.unblock(at)
	ti.names.place(at.lane, keys.SinceOf(id), id, at.rec.Encode())
	return nil
}
