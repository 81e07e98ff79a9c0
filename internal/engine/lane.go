package engine

import (
	"codeq/internal/ready"
)

// Lane is the line of ready tasks of one (queue, tenant, priority), first come, first served. All
// of them are on disk, in one range of keys; the window has the first of them.
//
// Invariant: the window holds exactly the ready tasks at positions before next. If complete is set,
// no ready task is at or after next; otherwise, if exact is set, one is at next.
type Lane struct {
	LaneKey  // never changed: a Grant points to it, and other goroutines read that
	number   uint32
	complete bool
	ahead    bool   // it is one of the ring's lanes that are ahead
	used     bool   // a claim has taken a task since makeRoom last looked
	idler    bool   // it is in the catalogue's list of idle lanes
	turns    int32  // claims left in its turn, also while it is in no ring; 0: the turn has not begun
	spilled  uint32 // weight of the tasks on disk only, since complete was last set: see deepLane
	pass     uint32 // the last refill that read tasks of the lane
	place    int32  // index in the lanes of the queue
	queue    *Queue

	window ready.Window
	next   ready.Pos // zero: the head of the lane

	ringNext, ringPrev *Lane // nil if the lane is known to have no ready task
	newer, older       *Lane // neighbors among the lanes that hold memory

	leased             int32      // leased tasks
	exact              bool       // a ready task is at next
	left               uint16     // when it left its ring amid its turn: see turnTime
	trail              trail      // what lies before the window
	share              *laneShare // nil: its tenant is not counted over the shards
	idleNext, idlePrev *Lane      // neighbors in the list of idle lanes
}

// LaneKey is the name of a lane in its shard.
type LaneKey struct {
	Queue    string
	Tenant   string
	Priority uint8
}

func newLane(number uint32, q *Queue, tenant string, priority uint8) *Lane {
	return &Lane{LaneKey: LaneKey{q.Name, tenant, priority}, number: number, queue: q}
}

// laneName distinguishes a lane from the others of its queue.
type laneName struct {
	tenant   string
	priority uint8
}

// fewLanes is how many lanes a queue may have without an index of them.
const fewLanes = 8

// reaches reports whether a task at p belongs in the window: p is before next, or the window has
// all tasks.
func (l *Lane) reaches(p ready.Pos) bool { return l.complete || p.Compare(l.next) < 0 }

// spill leaves a task at p, after the end of the window, to disk, where the window reaches it
// later.
func (l *Lane) spill(p ready.Pos, bytes int) {
	l.next, l.exact, l.complete = p, true, false
	l.weigh(bytes)
}

// weigh counts a task that is on disk only.
func (l *Lane) weigh(bytes int) {
	l.spilled = min(l.spilled+1+uint32(bytes/deepTask), 1<<31)
}

// first returns a position at or before the first ready task of the lane, and after what has been
// consumed. ok is false if no task is ready.
func (l *Lane) first() (pos ready.Pos, ok bool) {
	if l.window.Len() > 0 {
		return l.window.First(), true
	}
	return l.next, !l.complete
}

// NextRecord returns the record of the task that State.Next has found.
func (l *Lane) NextRecord() []byte { return l.window.FirstRecord() }

// forget drops the window; disk has its tasks.
func (l *Lane) forget() {
	if l.window.Len() > 0 {
		l.next, l.exact = l.window.First(), true
		l.complete = false
	}
	l.window.Clear()
}

// trim drops the last tasks of the window until it holds at most so many bytes.
func (l *Lane) trim(bytes int) {
	if p, dropped := l.window.Trim(bytes); dropped {
		l.next, l.exact = p, true
		l.complete = false
	}
}

// drained reports whether the lane is known to have no ready task.
func (l *Lane) drained() bool { return l.complete && l.window.Len() == 0 }

// A deep lane has tables of its own: see store.AddDeepLane.
const (
	deepLane = 1 << 15 // weight from which a lane is deep: each task counts one,
	deepTask = 2 << 10 // and one more for each deepTask bytes
)
