package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/record"
	"codeq/internal/store"
)

// located is a task that the owner has found by its ID.
type located struct {
	id      keys.ID
	state   TaskState
	place   keys.Place
	indexed bool
	lane    *Lane
	rec     record.Record
	lease   *lease          // of a leased task
	ended   keys.EndedValue // of a task that has ended
	pending uint64          // unended parents of a blocked task
}

// waiting reports whether the task is neither leased nor ended.
func (at *located) waiting() bool {
	return at.state == Ready || at.state == Scheduled || at.state == Blocked
}

// isBehind reports whether neither disk nor the group shows the latest state of a task and its
// children: an operation on the task is then resolved again in the next group.
func (ti *ties) isBehind(id keys.ID) bool {
	// below RoomLow the children are not told, so that waiting would not help
	return ti.Group.HasChildren(id) || ti.leases.isMoving(id) || ti.isTelling(id) && ti.HasRoom(RoomLow)
}

// isMoving is isBehind for operations that do not end the task.
func (le *leases) isMoving(id keys.ID) bool {
	if le.Group.hasChanged(id) && le.Group.Find(id) == nil || le.steps.HasAdded(id) {
		return true
	}
	ls := le.byID[id]
	return ls != nil && !ls.record.written
}

// locate finds a task by its ID; nil if it does not exist.
// REQUIRES: the task is not moving.
func (s *State) locate(id keys.ID) (*located, error) {
	at, err := s.locateUnended(id)
	if at == nil && err == nil {
		at, err = s.locateEnded(id)
	}
	return at, err
}

// locateUnended finds an unended task by its ID.
// REQUIRES: the task is not moving.
func (s *State) locateUnended(id keys.ID) (*located, error) {
	if base.Invariants && s.Leases.isMoving(id) {
		base.Violated("task %s is moving", keys.FormatID(id))
	}
	at := &located{id: id}
	if ls := s.Leases.byID[id]; ls != nil {
		rec, err := s.Leases.recordOf(ls)
		if err != nil {
			return nil, err
		}
		at.state, at.lease, at.lane, at.rec = Leased, ls, ls.lane, rec
		at.place = keys.Place{Range: keys.Task, Group: ls.lane.number, At: ls.since}
		return at, nil
	}
	if t := s.Group.Find(id); t != nil {
		at.state, at.lane, at.place = StateIn(t.Place.Range), t.Lane, t.Place
		at.indexed = t.Place.IsIndexed(id)
		s.countPending(at)
		return at, at.decodeRecord(t.Rec)
	}
	p, indexed, err := store.PlaceOf(s.Store.DB(), id)
	if err != nil {
		return nil, err
	}
	at.place, at.indexed = p, indexed
	value, err := s.Lookup(p.AppendKey(nil, id))
	if value == nil || err != nil {
		return nil, err
	}
	s.countPending(at)
	return at, s.Names.decode(at, value)
}

// isForgotten reports whether a bucket is being deleted: a tool leaves that to the application, and
// finds the tasks in it.
func (r *round) isForgotten(until uint64) bool { return r.past(until) && !r.config.Untimed }

// locateEnded finds a task by its ID among the tasks that have ended and are kept.
func (s *State) locateEnded(id keys.ID) (*located, error) {
	q, err := s.Names.originQueue(id)
	if q == nil || err != nil {
		return nil, err
	}
	at := &located{id: id}
	for key := range q.buckets {
		if s.isForgotten(key.until) {
			continue
		}
		at.place = keys.Place{Range: key.prefix, Group: q.Number, At: key.until}
		if value, err := s.Lookup(at.place.AppendKey(nil, id)); err != nil {
			return nil, err
		} else if value != nil {
			return at, s.Names.decode(at, value)
		}
	}
	return nil, nil
}

func (s *State) countPending(at *located) {
	if at.place.Range == keys.Blocked && at.place.At == 0 {
		at.pending, _ = s.Ties.pending.Get(at.id)
	}
}

func (at *located) decodeRecord(rec []byte) (err error) {
	if at.rec, err = record.Decode(rec); err != nil {
		err = fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(at.id), err)
	}
	return err
}

// decode reads the value found at the place of a task.
func (ns *names) decode(at *located, value []byte) error {
	number, rec, ended, err := store.SplitValue(at.place, value)
	if err == nil {
		at.state, at.ended = StateIn(at.place.Range), ended
		if at.lane, err = ns.laneNumbered(number); err == nil {
			at.rec, err = record.Decode(rec)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(at.id), err)
	}
	return nil
}

// locateDead finds a dead letter by its ID; nil if the task is none. It tries the bucket first
// before all others, and sets first to the bucket of the task.
// REQUIRES: the task is not moving.
func (s *State) locateDead(id keys.ID, first *bucketKey) (*located, error) {
	if s.Group.hasChanged(id) { // it has just been moved
		return nil, nil
	}
	q, err := s.Names.originQueue(id)
	if q == nil || err != nil {
		return nil, err
	}
	look := func(key bucketKey) (*located, error) {
		at := &located{id: id, place: keys.Place{Range: keys.Dead, Group: q.Number, At: key.until}}
		value, err := s.dead.Lookup(at.place.AppendKey(nil, id))
		if value == nil || err != nil {
			return nil, err
		}
		*first = key
		return at, s.Names.decode(at, value)
	}
	if q.buckets[*first] != nil && !s.isForgotten(first.until) {
		if at, err := look(*first); at != nil || err != nil {
			return at, err
		}
	}
	for key := range q.buckets {
		if key.prefix != keys.Dead || key == *first || s.isForgotten(key.until) {
			continue
		}
		if at, err := look(key); at != nil || err != nil {
			return at, err
		}
	}
	return nil, nil
}

// rewrite stores the changed record of a task in its place.
func (s *State) rewrite(at *located) {
	at.rec.Rewritten = at.rec.Rewritten || at.place.Range == keys.Task
	b := at.rec.Encode()
	switch at.place.Range {
	case keys.Task:
		s.Group.noteRemoved()
		s.Group.flushTasks() // it may be one of them
		s.Group.Put(at.id, at.lane, at.place, b)
		s.Group.SetTask(at.lane.number, at.place.At, at.id, b)
		if at.lease != nil {
			at.lease.rewritten, at.lease.ties, at.lease.tied = true, at.rec.Ties, at.rec.Ties != record.Ties{}
			s.Leases.copyRecord(at.lease, b)
		} else {
			s.Names.ready.Replace(&at.lane.tasks, ready.Item{Pos: ready.Pos{Since: at.place.At, ID: at.id}, Record: b})
		}
	case keys.Scheduled, keys.Blocked:
		if at.place.Range == keys.Blocked {
			s.Ties.blocked.Forget(at.place.At)
		}
		s.Group.Put(at.id, at.lane, at.place, b)
		s.Group.Set(at.place.AppendKey(nil, at.id), s.withLane(at.lane, b))
	default:
		s.Group.Change(at.id)
		s.Group.Set(at.place.AppendKey(nil, at.id), append(at.ended.Append(nil), b...))
	}
}

var states = [...]TaskState{
	keys.Scheduled: Scheduled, keys.Blocked: Blocked, keys.Dead: Dead, keys.Done: Done, keys.Canceled: Canceled, keys.Task: Ready,
}

// StateIn returns the state of a task by the range of its place. A leased task counts as ready.
func StateIn(prefix byte) TaskState { return states[prefix] }

// withdraw removes a task that is not leased from its place. When its record is stored again, it
// says that its first place has been used. A suspect keeps its place of the slow start, which goes
// with it unless it stays ready (freePlace).
func (s *State) withdraw(at *located) {
	q := at.lane.queue
	s.Group.Change(at.id)
	switch at.state {
	case Ready:
		pos := ready.Pos{Since: at.place.At, ID: at.id}
		s.Names.ready.Remove(&at.lane.tasks, pos, len(at.rec.Payload))
		s.Group.removeTask(at.lane.number, at.place.At, at.id, false)
		q.Counts.Ready--
		if at.rec.Limit != 0 {
			s.Ties.passLimit(q, at.rec.Limit)
		}
	case Scheduled:
		s.Group.Delete(at.place.AppendKey(nil, at.id))
		q.Counts.Scheduled--
	case Blocked:
		s.Group.Delete(at.place.AppendKey(nil, at.id))
		s.Ties.blocked.Forget(at.place.At)
		q.Counts.Blocked--
		if at.place.At == 0 {
			s.Ties.pending.Drop(at.id)
			// it may have been the last task that used the limit
		} else if st := s.Ties.limits[at.place.At]; st != nil && st.leased == 0 {
			s.Ties.passLimit(q, at.place.At)
		}
	case Dead:
		s.Times.unkeep(at)
	case Leased, Done, Canceled: // have no place to leave
	}
	s.Names.touch(q)
	if at.indexed {
		s.unindex(at.id)
	}
	at.rec.Rewritten = true
}

// The place of a task is an entry in a range. Outside of the task's first place, an entry of the
// index by ID leads to it.

// placeFirst makes a task ready in its first place, a key that has not been written before.
func (ns *names) placeFirst(l *Lane, id keys.ID, rec []byte) {
	since := keys.SinceOf(keys.ID(id))
	ns.Group.tasks.Add(l.number, since, id, rec)
	ns.offer(l, ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: rec})
}

// place moves a task into its lane, at since.
func (ns *names) place(l *Lane, since uint64, id keys.ID, rec []byte) {
	ns.Group.SetTask(l.number, since, id, rec)
	p := keys.Place{Range: keys.Task, Group: l.number, At: since}
	if isFirstPlace(l, since, id) {
		ns.unindex(id)
		ns.Group.Put(id, l, p, rec)
	} else {
		ns.setIndex(id, l, p, rec)
	}
	ns.offer(l, ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: rec})
}

// isFirstPlace reports whether a task that is in a lane needs no index entry.
func isFirstPlace(l *Lane, since uint64, id keys.ID) bool {
	return keys.IsFirstPlace(since) && l.number == keys.LaneOf(id)
}

// offer counts a task as ready and offers it to claims; its record is in the group.
func (ns *names) offer(l *Lane, it ready.Item) {
	l.queue.Counts.Ready++
	ns.touch(l.queue)
	ns.ready.Add(&l.tasks, it)
	ns.feed(l.queue)
}

// setIndex stores the place of a task that is not in its first place. The group keeps rec.
func (r *round) setIndex(id keys.ID, l *Lane, p keys.Place, rec []byte) {
	var key [1 + keys.IDLen]byte
	var value [keys.PlaceLen]byte
	r.Group.Put(id, l, p, rec)
	r.Group.Set(keys.AppendByID(key[:0], keys.Index, id), p.Append(value[:0]))
}

func (r *round) unindex(id keys.ID) {
	var key [1 + keys.IDLen]byte
	r.Group.Change(id)
	r.Group.Delete(keys.AppendByID(key[:0], keys.Index, id))
}

// withLane prefixes a record with its lane, for places without the lane in their keys. The result
// is valid until the next call.
func (r *round) withLane(l *Lane, rec []byte) []byte {
	r.value = append(keys.AppendLaneNumber(r.value[:0], l.number), rec...)
	return r.value
}

// removeTask takes a task from its place in a lane.
func (r *round) removeTask(lane uint32, since uint64, id keys.ID, once bool) {
	if !once {
		r.Group.Change(id)
	}
	r.Group.removeTask(lane, since, id, once)
}

// blockAgain returns a withdrawn task to its scope.
func (ti *ties) blockAgain(l *Lane, at *located, rec []byte) {
	if at.place.At == 0 && at.pending > 0 {
		ti.pending.Put(at.id, at.pending)
	}
	ti.block(l, at.place.At, at.id, rec)
}

// schedule adds a task to those that wait for their time of day: due is RunAt of its record.
func (tm *times) schedule(l *Lane, id keys.ID, due uint64, rec []byte) {
	tm.addScheduled(l, id, due, rec)
	tm.nextDue.Lower(due, id)
}

// scheduleWait adds a task to those that wait between attempts, until a deadline.
func (tm *times) scheduleWait(l *Lane, id keys.ID, deadline uint64, rec []byte) {
	tm.addScheduled(l, id, deadline, rec)
	tm.nextWait.Lower(deadline, id)
}

func (tm *times) addScheduled(l *Lane, id keys.ID, due uint64, rec []byte) {
	tm.scratch = keys.AppendScheduled(tm.scratch[:0], due, id)
	tm.Group.Set(tm.scratch, tm.withLane(l, rec))
	tm.setIndex(id, l, keys.Place{Range: keys.Scheduled, At: due}, rec)
	l.queue.Counts.Scheduled++
	tm.names.touch(l.queue)
}
