package engine

import (
	"codeq/internal/window"
)

// Lane is the line of ready tasks of one (queue, tenant, priority), first come first served. All of
// them are on disk, in one range of keys; the window has the first of them.
//
// Invariant: the window holds exactly the ready tasks at positions before next. With complete set,
// there is none at or after next.
type Lane struct {
	number   uint32
	Priority uint8
	complete bool
	ahead    bool   // of the ring's lanes that are ahead
	used     bool   // a claim has taken from the window since it was last looked at
	idler    bool   // it is in the catalogue's list of idle lanes
	turns    int32  // claims left of its turn; 0: it has not begun
	spilled  uint32 // weight of the tasks that went to disk only since the lane was complete: see deepLane
	pass     uint32 // the last refill that read tasks of the lane
	queue    *Queue
	tenant   string

	window window.Window
	next   window.Pos // zero: the head of the lane

	ringNext, ringPrev *Lane // nil while the lane is known to have no ready task
	newer, older       *Lane // of the lanes that hold memory

	leased             int   // tasks in workers' hands
	trail              trail // behind the window
	place              int   // in the lanes of the queue
	idleNext, idlePrev *Lane // in that list
}

type LaneKey struct {
	Queue    string
	Tenant   string
	Priority uint8
}

// key is the name of the lane in its shard.
func (l *Lane) key() LaneKey { return LaneKey{l.queue.Name, l.tenant, l.Priority} }

// laneName tells a lane from the others of its queue.
type laneName struct {
	tenant   string
	priority uint8
}

// fewLanes is how many lanes a queue has at the most without an index of them.
const fewLanes = 8

// reaches reports whether the window has the place of a task: it is before next, or the window has
// all.
func (l *Lane) reaches(p window.Pos) bool { return l.complete || p.Compare(l.next) < 0 }

// spill leaves a task that comes next after all of the window to disk, where the window will come
// to it.
func (l *Lane) spill(p window.Pos, bytes int) {
	l.next, l.complete = p, false
	l.weigh(bytes)
}

// weigh counts a task that goes to disk only.
func (l *Lane) weigh(bytes int) {
	l.spilled = min(l.spilled+1+uint32(bytes/deepTask), 1<<31)
}

// first returns a position at or before that of the first task of the lane that is ready, and after
// what has been consumed. ok is false if no task is ready.
func (l *Lane) first() (pos window.Pos, ok bool) {
	if l.window.Len() > 0 {
		return l.window.First(), true
	}
	return l.next, !l.complete
}

// forget drops the window; disk has all of it.
func (l *Lane) forget() {
	if l.window.Len() > 0 {
		l.next = l.window.First()
		l.complete = false
	}
	l.window.Clear()
}

// trim drops the last tasks of the window until it holds no more than so many bytes.
func (l *Lane) trim(bytes int) {
	if p, dropped := l.window.Trim(bytes); dropped {
		l.next = p
		l.complete = false
	}
}

// drained reports whether the lane is known to have no ready task.
func (l *Lane) drained() bool { return l.complete && l.window.Len() == 0 }

// A lane that is deep has tables of its own: see store.AddDeepLane.
const (
	deepLane = 1 << 15 // tasks on disk only from which on a lane is deep, each of so many
	deepTask = 2 << 10 // bytes counting once more
)
