package engine

// Lanes leave memory in the order in which they became idle.

// laneList holds lanes in the order in which they were last added.
type laneList struct {
	first, last *Lane
	n           int
}

// push adds a lane, or moves it to the end.
func (t *laneList) push(l *Lane) {
	if t.last == l {
		return
	}
	t.remove(l)
	if l.idler = true; t.last == nil {
		t.first = l
	} else {
		t.last.idleNext, l.idlePrev = l, t.last
	}
	t.last = l
	t.n++
}

// remove takes a lane out if it is in the list.
func (t *laneList) remove(l *Lane) {
	if !l.idler {
		return
	}
	if l.idlePrev != nil {
		l.idlePrev.idleNext = l.idleNext
	} else {
		t.first = l.idleNext
	}
	if l.idleNext != nil {
		l.idleNext.idlePrev = l.idlePrev
	} else {
		t.last = l.idlePrev
	}
	l.idleNext, l.idlePrev, l.idler = nil, nil, false
	t.n--
}

// noteIdle is called when a lane may have become idle.
func (s *State) noteIdle(l *Lane) {
	if l.isIdle() {
		s.catalogue.idle.push(l)
	}
}

// isIdle reports whether a lane has neither ready nor leased tasks.
func (l *Lane) isIdle() bool { return l.leased == 0 && l.drained() }

// forgetIdle drops from memory the lanes that have been idle longest, beyond those that may stay,
// and reports the queues that are no longer needed. Its cost grows with what the group did, and
// with doubtsAtOnce.
// REQUIRES: the group is empty.
func (s *State) forgetIdle() {
	c := &s.catalogue
	for c.idle.n > s.config.IdleLanes {
		l := c.idle.first
		c.idle.remove(l)
		if l.isIdle() {
			s.dropLane(l)
			c.formerLanes.add(formerLane{l.queue.number, laneName{l.Tenant, l.Priority}}, l.number, s.formerMost())
		}
	}
	s.forgetQueues()
}

// dropLane drops an idle lane from memory.
func (s *State) dropLane(l *Lane) {
	q := l.queue
	if l.ringNext != nil {
		s.leaveRing(l)
		s.show(q)
	}
	s.dropShare(l)
	if l.spilled > 0 {
		s.Store.RemoveDeepLane(l.number)
	}
	s.windows.forget(l)
	if q.removeLane(l); q.lanes.Len() == 0 {
		s.Rest(q)
	}
	s.lanes.Set(int(l.number), nil)
	s.catalogue.loaded.Remove(l.number)
}
