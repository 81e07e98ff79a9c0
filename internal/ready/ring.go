package ready

import "math/bits"

// ring holds the lanes of a queue and priority that may have ready tasks. They take turns: first
// has its turn, and the others follow in the order of the ring. A lane keeps its place whether
// memory has its tasks or not.
//
// The lanes from first to before edge are ahead: memory has what their next turn takes, or had it,
// and has given it up for others since. Refills move edge forward.
//
// Invariant: the first lanes of the ring, ahead in number, have Lane.ahead set, and no others;
// their windows hold bytes. The lane after them is edge, if not all are ahead.
type ring struct {
	queue    *Queue
	priority uint8
	wanted   bool // on the shard's list of rings to refill
	urgent   bool // a claim waits for the tasks of first
	first    *Lane
	edge     *Lane
	lanes    int
	ahead    int
	reach    int // how many lanes refills bring ahead
	bytes    int
	shares   *ringShares // nil: no lane has had one
}

// spareRings is how many unused rings a shard keeps.
const spareRings = 64

// ringReach is how many lanes the first refill brings ahead; each later one doubles the number.
const ringReach = 64

// A lane that has left its ring during its turn keeps the rest of the turn for so long, ms. It is
// first when it joins again: otherwise a tenant would get one claim in a turn of several if its
// tasks become ready one at a time. The rest is less than a turn, and the lane is last after it.
const turnKept = 10 * 60_000

// turnTime is a time for Lane.left, in units of 1,024 ms; it wraps around after 18 hours.
func (t *Tasks) turnTime() uint16 { return uint16(t.uptime / 1024) }

// joinRing puts a lane that may have ready tasks into its ring: last in order, or first for the
// rest of its turn.
func (t *Tasks) joinRing(l *Lane) {
	if l.ringNext != nil {
		return
	}
	q, p := l.Queue, l.Priority
	r := q.rings[p]
	if l.turns > 0 && t.turnTime()-l.left > turnKept/1024 {
		l.turns = 0
	}
	if r == nil {
		r = t.newRing()
		r.queue, r.priority = q, p
		r.first, r.edge = l, l
		l.ringNext, l.ringPrev = l, l
		q.rings[p] = r
		q.Mask |= 1 << p
	} else {
		l.ringNext, l.ringPrev = r.first, r.first.ringPrev
		l.ringPrev.ringNext = l
		r.first.ringPrev = l
		r.place(l)
	}
	r.lanes++
	if l.share != nil || l.isShared() {
		t.joinShares(l)
	}
}

// place decides whether a new lane, which lies between the last and the first one, is last or
// first. A lane that has to be read before it can be ahead of others that are is last.
func (r *ring) place(l *Lane) {
	switch {
	case l.turns > 0 && l.window.Len() > 0:
		r.first = l
		r.bringAhead(l)
	case l.turns > 0 && r.ahead == 0:
		r.first, r.edge = l, l
	default:
		l.turns = 0
		if r.ahead == r.lanes {
			r.edge = l
		}
	}
}

// leaveRing takes a lane without ready tasks out of its ring.
func (t *Tasks) leaveRing(l *Lane) {
	q, p := l.Queue, l.Priority
	r := q.rings[p]
	if l.share != nil {
		t.leaveShares(l)
	}
	r.fallBehind(l)
	if r.lanes--; r.lanes == 0 {
		q.rings[p] = nil
		q.Mask &^= 1 << p
		if !r.wanted {
			t.dropRing(r)
		}
	} else {
		if r.first == l {
			r.first = l.ringNext
		}
		if r.edge == l {
			r.edge = l.ringNext
		}
		l.ringPrev.ringNext = l.ringNext
		l.ringNext.ringPrev = l.ringPrev
	}
	l.ringNext, l.ringPrev = nil, nil
	if l.turns > 0 {
		l.left = t.turnTime()
	}
	t.windows.makeOldest(l)
}

// newRing and dropRing reuse rings: a queue that becomes empty every other moment costs no
// allocations.
func (t *Tasks) newRing() *ring {
	n := len(t.rings)
	if n == 0 {
		return new(ring)
	}
	r := t.rings[n-1]
	t.rings = t.rings[:n-1]
	return r
}

func (t *Tasks) dropRing(r *ring) {
	*r = ring{shares: r.shares} // which are empty
	if len(t.rings) < cap(t.rings) {
		t.rings = append(t.rings, r)
	}
}

// fallBehind makes a lane one that is not ahead. REQUIRES: it is the first that is ahead, or leaves
// the ring.
func (r *ring) fallBehind(l *Lane) {
	if l.ahead {
		l.ahead = false
		r.ahead--
		r.bytes -= l.window.Footprint()
	}
}

// goAhead makes the lane at the edge one that is ahead.
func (r *ring) goAhead() {
	l := r.edge
	r.bringAhead(l)
	r.edge = l.ringNext
}

func (r *ring) bringAhead(l *Lane) {
	l.ahead = true
	r.ahead++
	r.bytes += l.window.Footprint()
}

// Turn counts a claim of the first lane. Its turn ends after as many claims as its tenant's weight
// (see longestTurn). If it has no task left before, it keeps the rest: see turnKept.
func (t *Tasks) Turn(l *Lane) {
	r := l.Queue.rings[l.Priority]
	if l.isShared() {
		t.renewShare(l)
	}
	// the lane follows itself: nothing below would change anything
	if r.lanes == 1 && l.ahead && l.window.Len() > 0 && t.enough(r, l) {
		l.turns = 0
		return
	}
	// a new turn, or a lower weight
	if l.turns == 0 || l.turns > l.longestTurn() {
		l.turns = l.beginTurn()
	}
	l.turns--
	switch {
	case l.drained():
		t.leaveRing(l)
		if r.lanes == 0 {
			return
		}
	case l.turns == 0:
		if l.window.Len() == 0 {
			t.windows.forget(l) // the lanes before it use its room until its next turn
		}
		all := r.ahead == r.lanes
		r.fallBehind(l)
		r.first = l.ringNext
		if all {
			r.edge = l
		} else if r.ahead == 0 {
			r.edge = r.first
		}
	case !t.enough(r, l):
		t.want(r)
		return
	}
	if t.advance(r, 2); r.ahead < r.lanes && r.ahead <= r.reach/2 {
		t.want(r)
	}
}

// Head returns the lane with the next task of a queue: of the highest priority, the tenants in
// turn. nil: there is none. pending: a refill has to look for it. left: lanes without a task have
// left their rings.
func (t *Tasks) Head(q *Queue) (l *Lane, pending, left bool) {
	t.windows.ask(q)
	for q.Mask != 0 {
		r := q.rings[bits.Len16(q.Mask)-1]
		l := r.first
		if l.window.Len() > 0 {
			return l, false, left
		}
		if !l.complete {
			r.urgent = true
			t.want(r)
			return nil, true, left
		}
		t.leaveRing(l)
		left = true
	}
	return nil, false, left
}

// First describes the next task of a queue, as far as memory shows.
type First struct {
	Lane  *Lane  // nil: nothing
	Alone bool   // no other lane of the priority may have a task
	Share uint64 // of the lanes that may have
}

// First looks at a queue without a claim.
func (t *Tasks) First(q *Queue) First {
	for mask := q.Mask; mask != 0; {
		p := bits.Len16(mask) - 1
		mask &^= 1 << p
		r := q.rings[p]
		l := r.first
		for range r.lanes {
			if !l.drained() {
				return First{l, l.ringNext == l, r.shareOf()}
			}
			l = l.ringNext
		}
	}
	return First{}
}
