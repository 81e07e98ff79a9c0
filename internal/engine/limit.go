package engine

import (
	"math"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// limitTable counts the leased tasks of each LimitKey, by scope. All tasks of a key lie in one
// shard, so that its owner alone decides.
type limitTable map[uint64]*limitState

type limitState struct {
	leased int
	parked bool // tasks may wait for room
}

// at returns the state of a scope, and creates it if it is missing.
func (t limitTable) at(scope uint64) *limitState {
	st := t[scope]
	if st == nil {
		st = new(limitState)
		t[scope] = st
	}
	return st
}

func (t limitTable) enter(scope uint64) { t.at(scope).leased++ }

// mayLease reports whether the limit of its key and the turn of its group allow a task's lease.
func (ti *ties) mayLease(q *Queue, head *record.Head) bool {
	return !ti.full(q, head.Limit) && !ti.leases.isTurnHeld(head.Group)
}

// full reports whether no further task of a key may be leased.
func (ti *ties) full(q *Queue, scope uint64) bool {
	limit := q.Settings.ConcurrencyPerKey
	st := ti.limits[scope]
	return limit > 0 && st != nil && st.leased >= limit
}

// leaveLimit is called when a lease of a key ends.
func (ti *ties) leaveLimit(q *Queue, scope uint64) {
	st := ti.limits[scope]
	st.leased--
	switch {
	case st.parked:
		ti.wake(q, scope, keys.ID{}, keys.WakeUp)
	case st.leased == 0:
		delete(ti.limits, scope)
	}
}

// passLimit is called for a task that could be leased but will not be: another task of its key may
// use its room.
func (ti *ties) passLimit(q *Queue, scope uint64) {
	if st := ti.limits[scope]; st != nil && st.parked {
		ti.wake(q, scope, keys.ID{}, keys.WakeUp)
	}
}

// park makes the first task of a lane wait for room in the limit of its key, or for an orphan in
// its group.
func (ti *ties) park(l *Lane) {
	pos, _, _ := l.tasks.First()
	b := l.tasks.FirstRecord()
	rec, err := record.Decode(b)
	if ti.fails(err) {
		return
	}
	ti.names.ready.Remove(&l.tasks, pos, len(b))
	ti.removeTask(l.number, pos.Since, pos.ID, false)
	l.queue.Counts.Ready--
	rec.Rewritten = true
	if ti.leases.isTurnHeld(rec.Group) {
		ti.parkTurn(l, pos.ID, &rec)
		return
	}
	ti.block(l, rec.Limit, pos.ID, rec.Encode())
	ti.limits[rec.Limit].parked = true
}

// fillLimit unblocks as many tasks that wait for room as there is room for.
func (ti *ties) fillLimit(q *Queue, scope uint64) error {
	room := math.MaxInt
	st := ti.limits[scope]
	if limit := q.Settings.ConcurrencyPerKey; limit > 0 {
		room = limit
		if st != nil {
			room -= st.leased
		}
	}
	more, cut := false, false
	err := ti.waiting(q, scope, func(n int, at *located) bool {
		if n >= room {
			more = true
			return false
		}
		if cut = n > 0 && ti.Spent(); cut { // its wakeup counted as a unit already
			return false
		}
		ti.names.unblock(at)
		ti.names.place(at.lane, keys.SinceOf(keys.ID(at.id)), at.id, at.rec.Encode())
		return true
	})
	if err != nil {
		return err
	}
	if cut {
		ti.wake(q, scope, keys.ID{}, keys.WakeUp)
	}
	switch {
	case more || cut:
		ti.limits.at(scope).parked = true
	case st != nil:
		if st.parked = false; st.leased == 0 {
			delete(ti.limits, scope)
		}
	}
	return nil
}

// recheck scans the scopes of a queue after a change of its limit.
type recheck struct {
	queue *Queue
	from  []byte // nil: all were scanned
}

func (ns *names) recheck(q *Queue) {
	if q.Counts.Blocked > 0 {
		q.rechecks++
		ns.rechecks = append(ns.rechecks, &recheck{q, keys.AppendNumbered(nil, keys.Blocked, q.Number)})
	}
}

// recheckNext adds a wakeup for the next scope of a queue that has waiting tasks.
func (ti *ties) recheckNext(r *recheck) error {
	from, upper := r.from, keys.GroupEnd(keys.AppendNumbered(nil, keys.Blocked, r.queue.Number))
	r.from = nil
	return ti.Walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		_, scope, _, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return false, err
		}
		if scope != 0 && scope&keys.GroupScopeBit == 0 && !keys.IsSuspectScope(scope) {
			ti.wake(r.queue, scope, keys.ID{}, keys.WakeUp)
		}
		r.from = keys.GroupEnd(keys.AppendGroup(nil, keys.Blocked, r.queue.Number, scope))
		return false, nil
	})
}
