package ready

import "codeq/internal/base"

// windowMemory is the memory that the windows of a shard hold. Each queue with claims gets a share,
// and its lanes divide that in turn. A lane may hold more while no other needs it; the lane that
// was unused for longest gives memory back first.
//
// Invariant: bytes is at most limit, unless one task alone is larger.
// Invariant: the lanes from oldest to newest are those with windows that hold memory.
type windowMemory struct {
	limit          int
	bytes          int
	newest, oldest *Lane
	pass           uint32 // number of the last refill
	pool           pool

	// Queues with claims in this epoch, and in the last one.
	epoch     uint32
	asked     int
	askedLast int
}

// epochMillis is how long a queue counts as one with claims, or up to twice as long.
const epochMillis = 1024

// next begins a refill, at a time of the monotonic clock.
func (m *windowMemory) next(now uint64) {
	m.pass++
	if epoch := uint32(now/epochMillis) + 1; epoch != m.epoch {
		m.askedLast = 0
		if epoch == m.epoch+1 {
			m.askedLast = m.asked
		}
		m.epoch, m.asked = epoch, 0
	}
}

// ask notes that a claim asks for a queue.
func (m *windowMemory) ask(q *Queue) {
	if q.asked != m.epoch {
		q.asked = m.epoch
		m.asked++
	}
}

// share is how much the lanes of one queue that are ahead may hold. A quarter of all is for queues
// that become active, and for new tasks.
func (m *windowMemory) share() int { return m.limit / 4 * 3 / max(1, m.asked, m.askedLast) }

// laneShare is the part of it for one lane. A lane has as many parts as its tenant has weight.
func (m *windowMemory) laneShare(l *Lane) int {
	share, lanes := m.share(), 1
	if r := l.Queue.rings[l.Priority]; r != nil {
		lanes = r.lanes
	}
	return min(share, share/lanes*int(l.Weight))
}

// resized is called when the window of a lane, which held before bytes, may have changed its size.
func (m *windowMemory) resized(l *Lane, before int) {
	after := l.window.Footprint()
	m.bytes += after - before
	if l.ahead {
		l.Queue.rings[l.Priority].bytes += after - before
	}
	if base.Invariants && m.bytes < 0 {
		base.Violated("the windows of a shard take %d bytes", m.bytes)
	}
	switch {
	case before == 0 && after > 0:
		m.push(l)
	case before > 0 && after == 0:
		m.remove(l)
	}
}

// push makes a lane the newest one.
func (m *windowMemory) push(l *Lane) {
	l.older, l.newer = m.newest, nil
	if m.newest != nil {
		m.newest.newer = l
	} else {
		m.oldest = l
	}
	m.newest = l
}

// renew makes a lane the newest one, if it holds memory.
func (m *windowMemory) renew(l *Lane) {
	if l.window.Footprint() > 0 && l != m.newest {
		m.remove(l)
		m.push(l)
	}
}

func (m *windowMemory) remove(l *Lane) {
	if l.older != nil {
		l.older.newer = l.newer
	} else {
		m.oldest = l.newer
	}
	if l.newer != nil {
		l.newer.older = l.older
	} else {
		m.newest = l.older
	}
	l.older, l.newer = nil, nil
}

// makeOldest makes a lane that has no task, but may hold memory, the first to give it back.
func (m *windowMemory) makeOldest(l *Lane) {
	if l.window.Footprint() == 0 || m.oldest == l {
		return
	}
	m.remove(l)
	l.newer = m.oldest
	m.oldest.older = l
	m.oldest = l
	l.used = false
}

// makeRoom makes room for so many bytes: lanes that have not been used for longest drop their
// windows. It returns false if the rest belongs to lanes that the last refill has read, to the lane
// that needs the room, or, unless a claim waits for its ring, to lanes of that ring with an earlier
// turn.
func (m *windowMemory) makeRoom(bytes int, to *Lane) bool {
	r := to.Queue.rings[to.Priority]
	for m.bytes > 0 && m.bytes+bytes > m.limit {
		l := m.oldest
		switch {
		case l == to, l.pass == m.pass, l.ahead && l.Queue.rings[l.Priority] == r && !r.urgent:
			return false
		case l.used:
			l.used = false
			m.renew(l)
		default:
			m.forget(l)
		}
	}
	return true
}

// shrink reduces the memory of windows to the limit after one of them has grown in the middle.
func (m *windowMemory) shrink() {
	for m.bytes > m.limit && m.oldest != m.newest {
		m.forget(m.oldest)
	}
	for l := m.oldest; m.bytes > m.limit && l.window.Len() > 1; {
		m.trim(l, l.window.Size()-1)
	}
}

func (m *windowMemory) forget(l *Lane) {
	before := l.window.Footprint()
	l.forget()
	m.resized(l, before)
}

func (m *windowMemory) trim(l *Lane, bytes int) {
	before := l.window.Footprint()
	l.trim(bytes)
	m.resized(l, before)
}

// admits reports whether the window of a lane may take in a new task at its end: always while there
// is room, then only up to the lane's share.
func (m *windowMemory) admits(l *Lane, record int) bool {
	n := l.window.Growth(record)
	if m.bytes+n <= m.limit/4*3 || m.bytes == 0 {
		return true
	}
	if l.window.Size()+sizeOf(record) > m.laneShare(l) {
		return false
	}
	m.renew(l) // otherwise makeRoom would stop at it
	return m.makeRoom(n, l)
}
