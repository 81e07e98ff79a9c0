package engine

import (
	"codeq/internal/keys"
	"codeq/internal/ready"
)

// Where a task lies: its entry in a range and, outside of its first place, an entry of the index by
// ID that says where.

// placeFirst makes a task ready in its first place, a key that has not been written before.
func (ns *names) placeFirst(l *Lane, id keys.ID, rec []byte) {
	since := keys.SinceOf(keys.ID(id))
	ns.Group.setNew(l.number, since, id, rec)
	ns.offer(l, ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: rec})
}

// place moves a task into its lane, at since.
func (ns *names) place(l *Lane, since uint64, id keys.ID, rec []byte) {
	ns.Group.setTask(l.number, since, id, rec)
	p := keys.Place{Range: keys.Task, Group: l.number, At: since}
	if isFirstPlace(l, since, id) {
		ns.unindex(id)
		ns.Group.put(id, l, p, rec)
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
	r.Group.put(id, l, p, rec)
	r.Group.set(keys.AppendByID(key[:0], keys.Index, id), p.Append(value[:0]))
}

func (r *round) unindex(id keys.ID) {
	var key [1 + keys.IDLen]byte
	r.Group.change(id)
	r.Group.delete(keys.AppendByID(key[:0], keys.Index, id))
}

// withLane prefixes a record with its lane, for places whose keys do not contain it. The result is
// valid until the next call.
func (r *round) withLane(l *Lane, rec []byte) []byte {
	r.value = append(keys.AppendLaneNumber(r.value[:0], l.number), rec...)
	return r.value
}

// removeTask takes a task from its place in a lane.
func (r *round) removeTask(lane uint32, since uint64, id keys.ID, once bool) {
	if !once {
		r.Group.change(id)
	}
	r.Group.removeTask(lane, since, id, once)
}

// withdraw removes a task that is not leased from its place. When its record is stored again, it
// says that its first place has been used. A suspect keeps its place of the slow start, which goes
// with it unless it stays ready (freePlace).
func (s *State) withdraw(at *located) {
	q := at.lane.queue
	s.Group.change(at.id)
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
		s.Group.delete(at.place.AppendKey(nil, at.id))
		q.Counts.Scheduled--
	case Blocked:
		s.Group.delete(at.place.AppendKey(nil, at.id))
		s.Ties.cursors.forget(at.place.At)
		q.Counts.Blocked--
		if at.place.At == 0 {
			s.Ties.pending.drop(&s.round, at.id)
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

// blockAgain returns a task to the scope from which it was withdrawn.
func (ti *ties) blockAgain(l *Lane, at *located, rec []byte) {
	if at.place.At == 0 && at.pending > 0 {
		ti.pending.put(ti.round, at.id, at.pending)
	}
	ti.block(l, at.place.At, at.id, rec)
}

// schedule adds a task to those that wait for their time of day: due is RunAt of its record.
func (tm *times) schedule(l *Lane, id keys.ID, due uint64, rec []byte) {
	tm.addScheduled(l, id, due, rec)
	tm.nextDue.lower(due, id)
}

// scheduleWait adds a task to those that wait between attempts, until a deadline.
func (tm *times) scheduleWait(l *Lane, id keys.ID, deadline uint64, rec []byte) {
	tm.addScheduled(l, id, deadline, rec)
	tm.nextWait.lower(deadline, id)
}

func (tm *times) addScheduled(l *Lane, id keys.ID, due uint64, rec []byte) {
	tm.scratch = keys.AppendScheduled(tm.scratch[:0], due, id)
	tm.Group.set(tm.scratch, tm.withLane(l, rec))
	tm.setIndex(id, l, keys.Place{Range: keys.Scheduled, At: due}, rec)
	l.queue.Counts.Scheduled++
	tm.names.touch(l.queue)
}
