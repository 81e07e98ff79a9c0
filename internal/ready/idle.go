package ready

// The lane that has been idle longest leaves memory first.

// laneList holds lanes in the order of their last push.
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
func (t *Tasks) noteIdle(l *Lane) {
	if l.isIdle() {
		t.idle.push(l)
	}
}

// Idle returns a lane to leave memory by Drop: the one that has been idle longest, while there are
// more than may stay; nil: there is none.
func (t *Tasks) Idle() *Lane {
	for t.idle.n > t.config.IdleLanes {
		l := t.idle.first
		t.idle.remove(l)
		if l.isIdle() {
			return l
		}
	}
	return nil
}

// Drop drops an idle lane from memory. It reports whether the lane was in its ring.
func (t *Tasks) Drop(l *Lane) (left bool) {
	if left = l.ringNext != nil; left {
		t.leaveRing(l)
	}
	t.dropShare(l)
	if l.spilled > 0 {
		t.store.RemoveDeepLane(l.Number)
	}
	t.windows.forget(l)
	t.idle.remove(l)
	l.Queue = nil
	return left
}
