package engine

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// How blocked tasks go on: when the holder of a turn, or of room in a limit, has ended, when the
// parents of a task have ended, or when suspects may start. The turns of groups are here as a
// whole; schedule.go moves on the tasks that are due.

// wakeBlocked applies the wakeups. REQUIRES: the group is empty, except for tasks that became due.
// Some of these may have begun to wait for a turn that a wakeup concerns; giveTurn checks for them.
func (s *State) wakeBlocked() {
	todo := s.Ties.wakeups
	s.Ties.wakeups = wakeupList{onDisk: todo.onDisk, from: todo.from, busy: true}
	defer s.Ties.blocked.Close()
	n := 0
	for ; n < len(todo.order) && s.Broken == nil && !s.Spent(); n++ {
		if n%wakeupsSorted == 0 { // their tasks are then read in one pass
			slices.SortFunc(todo.order[n:min(n+wakeupsSorted, len(todo.order))], wakeup.compare)
		}
		m := todo.order[n]
		if _, newer := s.Ties.wakeups.how[m]; !newer { // else it waits for the next group
			s.Broken = s.applyWakeup(m, todo.how[m])
		}
	}
	for _, m := range todo.order[n:] {
		if _, newer := s.Ties.wakeups.how[m]; !newer {
			s.Ties.wakeups.note(m, s.Ties.wakeupKey(m), todo.how[m])
		}
	}
	if s.Ties.wakeups.onDisk && n == len(todo.order) && s.Broken == nil {
		s.walkWakeups(todo.how)
	}
	s.Ties.wakeups.busy = false
}

// walkWakeups applies the wakeups on disk, except for those that the group has applied or added.
func (s *State) walkWakeups(applied map[wakeup]byte) {
	lower, upper := keys.Range(keys.Wake)
	if s.Ties.wakeups.from != nil {
		lower = s.Ties.wakeups.from
	}
	s.Ties.wakeups.onDisk, s.Ties.wakeups.from = false, nil
	s.Broken = s.Walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		if s.Spent() {
			s.Ties.wakeups.onDisk, s.Ties.wakeups.from = true, bytes.Clone(it.Key())
			return false, nil
		}
		number, scope, id, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return false, err
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		q := s.Names.numbers.At(int(number))
		if len(v) != 1 || q == nil {
			return false, fmt.Errorf("wakeup %x has value %x", it.Key(), v)
		}
		m := wakeup{q, scope, id}
		_, done := applied[m]
		_, newer := s.Ties.wakeups.how[m]
		if done || newer {
			return true, nil
		}
		return true, s.applyWakeup(m, v[0])
	})
}

// applyWakeup carries out a wakeup, and removes it.
func (s *State) applyWakeup(m wakeup, how byte) error {
	if s.Leases.delaysWakeup(m) {
		return nil
	}
	s.Group.Delete(s.Ties.wakeupKey(m))
	s.Names.Rest(m.queue)
	switch {
	case m.scope == 0:
		return s.wakeTask(m.queue, m.id, how)
	case m.scope&keys.GroupScopeBit != 0:
		return s.giveTurn(m.queue, m.scope)
	case keys.IsSuspectScope(m.scope):
		return s.Suspects.startSuspects(m.queue)
	default:
		return s.Ties.fillLimit(m.queue, m.scope)
	}
}

// wakeTask moves on a task when its parents have ended, or cancels it.
func (s *State) wakeTask(q *Queue, id keys.ID, how byte) error {
	if s.Group.hasChanged(id) {
		return nil
	}
	at, err := s.Ties.blockedIn(q, 0, id)
	if at == nil || err != nil { // nil: it was canceled in the meantime
		return err
	}
	if how == keys.WakeCancel {
		s.cancel(at)
		return nil
	}
	s.Names.unblock(at)
	s.proceed(at.lane, id, &at.rec.Head, at.rec.Encode())
	return nil
}

// passTurn is called when a task of a group ends: the first waiting task is next.
func (s *State) passTurn(q *Queue, scope uint64, id keys.ID) {
	v, ok := s.Ties.turns.Get(scope)
	if !ok || v.Holder != keys.ID(id) { // it did not have the turn
		return
	}
	if s.Leases.isTurnHeld(scope) {
		s.Ties.turns.Put(scope, keys.GroupValue{Waiting: true})
		s.Ties.wake(q, scope, keys.ID{}, keys.WakeUp)
		return
	}
	if !v.Waiting || s.Ties.blocked.IsEmpty(scope) {
		s.Ties.turns.Drop(scope)
		return
	}
	if first := s.Ties.firstWaiter(q, scope); first != nil {
		s.giveTurnTo(first, scope, !s.Ties.blocked.IsEmpty(scope))
		return
	}
	s.Ties.turns.Put(scope, keys.GroupValue{Waiting: true})
	s.Ties.wake(q, scope, keys.ID{}, keys.WakeUp)
}

func (s *State) giveTurnTo(at *located, scope uint64, others bool) {
	s.Ties.turns.Put(scope, keys.GroupValue{Holder: at.id, Waiting: others})
	s.Names.unblock(at)
	s.enter(at.lane, keys.SinceOf(keys.ID(at.id)), at.id, &at.rec.Head, at.rec.Encode())
}

// giveTurn gives the turn of a group to the first task that waits for it, or moves on the task that
// has it and was parked.
func (s *State) giveTurn(q *Queue, scope uint64) error {
	if v, _ := s.Ties.turns.Get(scope); v.Holder != (keys.ID{}) {
		return s.Ties.unparkTurn(q, scope, v.Holder)
	}
	var first *located
	others := s.Ties.turns.HasChanged(scope) // tasks that have begun to wait in this group
	err := s.Ties.waiting(q, scope, func(n int, at *located) bool {
		if n > 0 {
			others = true
			return false
		}
		first = at
		return true
	})
	switch {
	case err != nil:
		return err
	case first != nil:
		s.giveTurnTo(first, scope, others)
	case others:
		s.Ties.wake(q, scope, keys.ID{}, keys.WakeUp)
	default:
		s.Ties.turns.Drop(scope)
	}
	return nil
}

// tellChildren is called when a task with children ends.
// REQUIRES: the group has not added children to the task.
func (s *State) tellChildren(parent keys.ID, state TaskState) {
	if base.Invariants && s.Group.HasChildren(parent) {
		base.Violated("task %s ends in the group that has added children to it", keys.FormatID(parent))
	}
	left := TellAtOnce
	_, all := s.tellFrom(keys.AppendDependent(nil, parent, keys.ID{}), parent, state, func() bool {
		left--
		return left < 0 || s.Spent()
	})
	if all {
		s.Ties.allTold(parent)
		return
	}
	s.Ties.notices.ends.Put(parent, byte(slices.Index(states[:], state)))
	s.Ties.notices.count++
}

// tellFrom tells the children of a task, from a key of the range Dependent on, until enough returns
// true. It returns the key of the first child that is not told; all: all children are told.
func (s *State) tellFrom(from []byte, parent keys.ID, state TaskState, enough func() bool) (left []byte, all bool) {
	s.Ties.eachChild(from, parent, func(key []byte, child keys.ID, how store.ParentPolicy) bool {
		if enough() {
			left = bytes.Clone(key)
			return false
		}
		if outcome := how.OutcomeOf(state); outcome != store.ParentWaits {
			s.Group.Delete(key)
			s.tellChild(parent, child, outcome)
		}
		return true
	})
	return left, left == nil
}

// eachChild visits the children of a task on disk, from a key of the range Dependent on.
func (ti *ties) eachChild(from []byte, parent keys.ID, visit func(key []byte, child keys.ID, how store.ParentPolicy) bool) {
	end := keys.GroupEnd(keys.AppendDependent(nil, parent, keys.ID{})[:1+keys.IDLen])
	err := ti.children.Walk(from, end, func(key, value []byte) (bool, error) {
		_, child, err := keys.ParseDependent(key)
		if err == nil && len(value) != 1 {
			err = fmt.Errorf("dependent %x has value %x", key, value)
		}
		return err == nil && visit(key, child, store.ParentPolicy(value[0])), err
	})
	if err != nil {
		ti.Broken = err
	}
}

// isAwaited reports whether children go on to wait for a task that becomes a dead letter. A task
// with more than TellAtOnce children counts as such.
// REQUIRES: the group has not added children to the task.
func (ti *ties) isAwaited(parent keys.ID) (awaited bool) {
	seen := 0
	ti.eachChild(keys.AppendDependent(nil, parent, keys.ID{}), parent, func(_ []byte, _ keys.ID, how store.ParentPolicy) bool {
		seen++
		awaited = how.OutcomeOf(Dead) == store.ParentWaits || seen > TellAtOnce
		return !awaited
	})
	return awaited
}

// tellMore tells the children that earlier groups have left.
func (s *State) tellMore() {
	defer s.Ties.children.Close()
	t := &s.Ties.notices
	for s.Broken == nil && t.count > 0 && (t.parent != keys.ID{} || s.Ties.nextToTell()) {
		end, ok := t.ends.Get(t.parent)
		if !ok {
			s.Broken = fmt.Errorf("%w: task %s has children to be told and has not ended", base.ErrCorrupt, keys.FormatID(t.parent))
			return
		}
		left, all := s.tellFrom(t.from, t.parent, StateIn(end), s.Spent)
		if !all {
			t.from = left
			return
		}
		s.Ties.allTold(t.parent)
		t.ends.Drop(t.parent)
		t.count--
		s.Group.Change(t.parent)
		t.next, t.parent = keys.AppendByID(nil, keys.Telling, t.parent), keys.ID{}
	}
}

// repin keeps a completed task for one more child, which is told next.
// REQUIRES: the task is not moving.
func (s *State) repin(at *located) {
	if at.place.At == keys.Forever { // kept for ever, or pinned
		return
	}
	s.Ties.pins.counts.Put(at.id, keys.PinnedValue{Until: at.place.At}) // pinFor counts the child
	s.Times.rekeep(at, keys.Forever)
}

// unpinned counts one pin of a task of this shard less. After the last one, the task is kept until
// its retention has passed. It returns false, and does nothing, if the latest state of the task is
// not on disk yet.
func (s *State) unpinned(parent keys.ID, until uint64) bool {
	if s.Leases.isMoving(parent) {
		return false
	}
	v, ok := s.Ties.pins.counts.Get(parent)
	if !ok {
		return true
	}
	v.Until = max(v.Until, until)
	if v.Count--; v.Count > 0 {
		s.Ties.pins.counts.Put(parent, v)
		return true
	}
	at, err := s.locate(parent)
	if err == nil && (at == nil || at.state != Done) {
		err = fmt.Errorf("%w: task %s is pinned and is %+v", base.ErrCorrupt, keys.FormatID(parent), at)
	}
	if s.fails(err) {
		return true
	}
	s.Ties.pins.counts.Drop(parent)
	if v.Until == 0 { // a repair has written the value
		v.Until = keys.BucketOf(at.ended.At, s.Times.retention(at.lane.queue, at.rec.Retention))
	}
	s.Times.rekeep(at, max(v.Until, s.retainedUntil(1)))
	return true
}

// proceed moves on a task that has waited for its parents.
func (s *State) proceed(l *Lane, id keys.ID, head *record.Head, rec []byte) {
	if head.RunAt > s.Wall {
		s.Times.schedule(l, id, head.RunAt, rec)
		return
	}
	s.enter(l, keys.SinceOf(keys.ID(id)), id, head, rec)
}

// resumeTask makes a suspended task go on.
func (s *State) resumeTask(at *located) {
	at.rec.Beside &^= record.Awaits
	s.withdraw(at)
	s.enter(at.lane, s.mint.Since(), at.id, &at.rec.Head, at.rec.Encode())
}

// childEnded makes a task go on that is suspended until another one has ended. It returns false,
// and does nothing, if the latest state of the task is not on disk yet.
func (s *State) childEnded(child, parent keys.ID) bool {
	if s.Ties.isBehind(parent) {
		return false
	}
	at, err := s.locateUnended(parent)
	var last record.Step
	if err == nil && at != nil && at.state == Scheduled && at.rec.Beside&record.Awaits != 0 {
		last, err = s.Leases.steps.Step(parent, at.rec.Steps-1)
	}
	if !s.fails(err) && last.Kind == record.StepChild && keys.ID(last.Result) == child {
		s.resumeTask(at)
	}
	return true
}

// The tasks of a group take turns: one has the turn. The first task to become due takes it, and
// keeps it until it ends, over all its attempts; the others wait in the scope of the group. An
// entry of the range Group names the task with the turn; a group without due tasks has no entry. A
// task that dies while Settings.HoldGroups is set keeps the turn, as its record notes, until it is
// redriven, purged or canceled. No task of the group begins as long as a handler goes on after its
// task was canceled, completed or given back.

// takeTurn gives a task the turn of its group if the turn is free. A task keeps the turn until the
// task ends, also while the task waits for another attempt.
func (ti *ties) takeTurn(scope uint64, id keys.ID) bool {
	v, ok := ti.turns.Get(scope)
	switch {
	case !ok:
		ti.turns.Put(scope, keys.GroupValue{Holder: id})
		return true
	case v.Holder == keys.ID(id):
		return true
	case !v.Waiting || v.Holder == keys.ID{}: // giveTurn checks for the change
		if !v.Waiting {
			ti.blocked.Begin(scope)
		}
		v.Waiting = true
		ti.turns.Put(scope, v)
	}
	return false
}

// parkTurn makes a task with the turn of its group wait until the task's orphan has returned.
func (ti *ties) parkTurn(l *Lane, id keys.ID, rec *record.Record) {
	ti.turns.Put(rec.Group, keys.GroupValue{Holder: id, Waiting: true})
	ti.block(l, rec.Group, id, rec.Encode())
	ti.wake(l.queue, rec.Group, keys.ID{}, keys.WakeUp)
}

// unparkTurn moves on a task with the turn of its group, if the task was parked.
func (ti *ties) unparkTurn(q *Queue, scope uint64, id keys.ID) error {
	if ti.Group.hasChanged(id) {
		return nil
	}
	at, err := ti.blockedIn(q, scope, id)
	if at == nil || err != nil {
		return err
	}
	ti.blocked.Forget(scope)
	ti.names.unblock(at)
	ti.names.place(at.lane, keys.SinceOf(id), id, at.rec.Encode())
	return nil
}
