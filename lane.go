package codeq

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/window"
)

// lane is the line of ready tasks of one (queue, tenant, priority), first come
// first served. All of them are on disk, in one range of keys; the window has
// the first of them.
//
// Invariant: the window holds exactly the ready tasks at positions before
// next. With complete set, there is none at or after next.
type lane struct {
	number   uint32
	queue    *queueState
	tenant   string
	priority uint8

	window   window.Window
	next     window.Pos // zero: the head of the lane
	complete bool
	spilled  int // tasks that went to disk only since the lane was complete
	turns    int // claims left of its turn; 0: it has not begun

	// The ring of the queue's lanes of this priority that may have ready
	// tasks; nil while the lane is known to have none.
	ringNext, ringPrev *lane
	wanted             bool // on the shard's list of lanes to refill

	leased             int   // tasks in workers' hands
	place              int   // in the lanes of the queue
	idleNext, idlePrev *lane // in the catalogue's list of idle lanes
	idler              bool  // it is there
}

type laneKey struct {
	queue    string
	tenant   string
	priority uint8
}

// queueState is what a shard knows of a queue.
type queueState struct {
	name    string
	number  uint32  // 0 until the first task of the queue
	since   uint64  // the Seq of its first lane under the number; 0: load has found the number
	lanes   []*lane // in no order
	counts  keys.Counts
	touched bool    // on the group's list
	gate    gateway // nil: neither a rate nor a limit of concurrency
	buckets map[bucketKey]*bucket
	arrived uint64 // tasks that have come from other shards since it is in memory
	configured

	rings [MaxPriority + 1]*lane // where the next turn begins
	mask  uint16                 // bit p: rings[p] is not empty
	claimLines
	sets   []setEntry // that have the queue
	hungry bool       // on the shard's list of queues whose waiters may be served

	listedAt int  // 1 + the place in the shard's list of queues with tickets; 0: it has none
	resting  bool // on the shard's list of queues that may be of no more use
	hasMarks bool // perhaps: tasks of it may go on
	rechecks int  // changes of its limits that the shard has not followed
	busy     bool // it counts among the shard's queues with tasks that have not ended

	heads *queueHeads // nil: the shard has published none
	shut  bool        // the gate has turned a claim away, and has not been opened since

	throttled bool    // on the shard's list of queues that are held back
	attended  bool    // on the shard's list of queues that speak looks after
	warden    *warden // nil: another shard has it, or none does
}

// join puts a lane into its ring, last in turn.
func (q *queueState) join(l *lane) {
	if l.ringNext != nil {
		return
	}
	p := l.priority
	head := q.rings[p]
	if head == nil {
		l.ringNext, l.ringPrev = l, l
		q.rings[p] = l
		q.mask |= 1 << p
		return
	}
	l.ringNext, l.ringPrev = head, head.ringPrev
	l.ringPrev.ringNext = l
	head.ringPrev = l
}

// turn ends a lane's turn when it has had as many claims as its tenant's weight.
func (q *queueState) turn(l *lane) {
	if w := q.settings.weight(l.tenant); l.turns == 0 || l.turns > w { // a new turn, or a lower weight
		l.turns = w
	}
	if l.turns--; l.turns == 0 {
		q.rings[l.priority] = l.ringNext
	}
}

// leave takes a lane out of its ring.
func (q *queueState) leave(l *lane) {
	p := l.priority
	switch {
	case l.ringNext == l:
		q.rings[p] = nil
		q.mask &^= 1 << p
	case q.rings[p] == l:
		q.rings[p] = l.ringNext
	}
	l.ringPrev.ringNext = l.ringNext
	l.ringNext.ringPrev = l.ringPrev
	l.ringNext, l.ringPrev = nil, nil
	l.turns = 0
}

// insert adds a ready task whose record is in the group or on disk. It returns
// by how much the memory held has grown.
func (l *lane) insert(it window.Item, limit int) (grown int) {
	if !l.complete && it.Compare(l.next) >= 0 {
		l.spilled++
		return 0 // on disk, where the window will come to it
	}
	before := l.window.Footprint()
	l.window.Insert(it)
	if l.window.Len() > limit {
		l.next = l.window.PopLast().Pos
		l.complete = false
		l.spilled++
	}
	return l.window.Footprint() - before
}

// first returns a position at or before that of the first task of the lane that is
// ready, and after what has been consumed. ok is false if no task is ready.
func (l *lane) first() (pos window.Pos, ok bool) {
	if l.window.Len() > 0 {
		return l.window.First(), true
	}
	return l.next, !l.complete
}

// update replaces the record of a task of the window, if it is there. It
// returns by how much the memory held has grown.
func (l *lane) update(since uint64, id ID, rec []byte) (grown int) {
	before := l.window.Footprint()
	l.window.Replace(window.Item{Pos: window.Pos{Since: since, ID: id}, Record: rec})
	return l.window.Footprint() - before
}

// forget drops the window; disk has all of it. It returns how much memory is
// free now.
func (l *lane) forget() int {
	freed := l.window.Footprint()
	if l.window.Len() > 0 {
		l.next = l.window.First()
		l.complete = false
	}
	l.window.Clear()
	return freed
}

// head returns the lane whose first task is next in a queue: of the highest
// priority, in turn over the tenants. Nil means that there is none; pending,
// that it depends on what the refill of a lane will find.
func (s *shard) head(q *queueState) (l *lane, pending bool) {
	for p := MaxPriority; p >= MinPriority && q.mask != 0; p-- {
		for l := q.rings[p]; l != nil; {
			if l.window.Len() > 0 {
				q.rings[p] = l
				return l, false
			}
			next := l.ringNext
			if l.complete {
				first := l == q.rings[p]
				q.leave(l)
				if first { // the ring begins at next, or is no more
					l = q.rings[p]
					continue
				}
			} else {
				s.want(l)
				pending = true
			}
			if l = next; l == q.rings[p] {
				break
			}
		}
		if pending {
			return nil, true
		}
	}
	return nil, false
}

// want asks for a lane to be refilled before the next group.
func (s *shard) want(l *lane) {
	if !l.wanted && !l.complete {
		l.wanted = true
		s.wants = append(s.wants, l)
	}
}

// refillTasks is how many tasks a lane gets from disk between two groups.
const refillTasks = 1024

// refill brings the wanted lanes' next tasks into memory.
// REQUIRES: the group is empty, so that disk has every task.
func (s *shard) refill() {
	for i, l := range s.wants {
		s.wants[i] = nil
		l.wanted = false
		if s.broken == nil {
			s.broken = s.fill(l)
		}
		s.feed(l.queue)
		s.publish(l.queue)
	}
	s.wants = s.wants[:0]
}

func (s *shard) fill(l *lane) error {
	lower := keys.AppendFrom(nil, l.number, l.next.Since, l.next.ID)
	upper := keys.AppendLane(nil, l.number+1)
	it, err := s.store.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	room := min(refillTasks, s.opts.WindowTasks-l.window.Len())
	bytes := max(s.windowLimit/16, 1)
	before := l.window.Footprint()
	var records slab
	valid := it.First()
	for ; valid && room > 0 && bytes > 0; valid = it.Next() {
		_, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		pos := window.Pos{Since: since, ID: id}
		l.next = pos.Next()
		if s.leases.byID[id] != nil {
			continue
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return storageError(err)
		}
		l.window.Insert(window.Item{Pos: pos, Record: records.clone(v)})
		s.noteRead(len(v))
		room--
		bytes -= len(v)
	}
	if err := it.Error(); err != nil {
		return storageError(err)
	}
	if l.complete = !valid; l.complete && l.spilled > 0 {
		l.spilled = 0
		s.store.partition.remove(l.number)
	}
	s.windowBytes += l.window.Footprint() - before
	if s.windowBytes > s.windowLimit {
		s.evict(l)
	}
	s.rested(l)
	return nil
}

// evict frees window memory: other lanes forget theirs in turn, and when that
// is not enough, keep its last tasks.
func (s *shard) evict(keep *lane) {
	for n := len(s.lanes); n > 0 && s.windowBytes > s.windowLimit/4*3; n-- {
		s.evictAt = (s.evictAt + 1) % len(s.lanes)
		if l := s.lanes[s.evictAt]; l != nil && l != keep {
			s.windowBytes -= l.forget()
		}
	}
	before := keep.window.Footprint()
	s.windowBytes -= before
	for keep.window.Len() > 1 && s.windowBytes+keep.window.Footprint() > s.windowLimit {
		keep.next = keep.window.PopLast().Pos
		keep.complete = false
	}
	s.windowBytes += keep.window.Footprint()
}

// feed has the waiters of a queue served when the group's operations are decided.
func (s *shard) feed(q *queueState) {
	if len(q.sets) > 0 && q.mask != 0 {
		s.feedSets(q)
	}
	if !q.hungry && q.mask != 0 && q.front().len() > 0 {
		q.hungry = true
		s.hungry = append(s.hungry, q)
	}
}
