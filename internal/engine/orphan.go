package engine

import (
	"codeq/internal/keys"
	"codeq/internal/record"
)

// An orphan is a handler of Run that goes on when its lease has ended without it: its task was
// canceled, completed, or given back by somebody else, or by the handler itself. What limits the
// work of others counts it until it has returned, or until the lease would have ended that nobody
// renews: the limits of its queue and of its LimitKey, and the turn of its group. Only memory knows
// orphans: the next Open, or the next leader, lets others go on.
//
// An orphan is in the wheel of leases, like the lease that it had.

// heldTurn is the turn of a group that has an orphan. Wakeups of the group are on disk, for the
// next Open, and are not applied before the turn is free.
type heldTurn struct {
	orphans int
	wakes   bool // a wakeup was not applied
}

// orphan makes an orphan of a lease that has just ended.
func (le *leases) orphan(ls *lease) {
	t, q := le, ls.lane.queue
	o := &lease{id: ls.id, token: ls.token, lane: ls.lane, ties: ls.ties, goesOn: true}
	o.expiry.Value = o
	t.wheel.Add(&o.expiry, ls.expiry.Deadline())
	if t.orphans == nil {
		t.orphans, t.heldTurns = make(map[Receipt]*lease), make(map[uint64]heldTurn)
	}
	t.orphans[o.receipt()] = o
	q.Orphans++
	if scope := o.ties.Group; scope != 0 {
		held := t.heldTurns[scope]
		held.orphans++
		t.heldTurns[scope] = held
	}
}

// returned is called when the handler of a lease that is lost has returned.
func (ti *ties) returned(r Receipt) {
	if o := ti.leases.orphans[r]; o != nil {
		ti.leases.wheel.Remove(&o.expiry)
		ti.endOrphan(o)
	}
}

// endOrphan ends an orphan: others may go on.
func (ti *ties) endOrphan(o *lease) {
	q := o.lane.queue
	delete(ti.leases.orphans, o.receipt())
	q.Orphans--
	ti.leave(q, &o.ties)
	if scope := o.ties.Group; scope != 0 {
		held := ti.leases.heldTurns[scope]
		if held.orphans--; held.orphans > 0 {
			ti.leases.heldTurns[scope] = held
		} else if delete(ti.leases.heldTurns, scope); held.wakes {
			ti.wake(q, scope, keys.ID{}, keys.WakeUp)
		}
	}
	ti.names.Rest(q)
}

// leave is called when a lease has ended and no handler works on its task any more.
func (ti *ties) leave(q *Queue, ties *record.Ties) {
	if ties.Limit != 0 {
		ti.leaveLimit(q, ties.Limit)
	}
	ti.free(q)
}

// isTurnHeld reports whether a group has an orphan.
func (le *leases) isTurnHeld(scope uint64) bool { return le.heldTurns[scope].orphans > 0 }

// delaysWakeup reports whether a wakeup has to wait for the orphans of its group. It stays on disk.
func (le *leases) delaysWakeup(m wakeup) bool {
	held, ok := le.heldTurns[m.scope]
	if ok {
		held.wakes = true
		le.heldTurns[m.scope] = held
	}
	return ok
}
