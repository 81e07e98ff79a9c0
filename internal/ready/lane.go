package ready

// Lane is the line of ready tasks of one (queue, tenant, priority), first come, first served. All
// of them are on disk, in one range of keys; the window has the first of them.
//
// Its owner sets the exported fields before Load; of them, only Weigh changes one. The owner finds
// its own view of a lane by Number.
//
// Invariant: the window holds exactly the ready tasks at positions before next. If complete is set,
// no ready task is at or after next; otherwise, if exact is set, one is at next.
type Lane struct {
	Queue    *Queue // nil: the lane has left memory
	Number   uint32 // of its keys
	Weight   int32  // how many claims in a row its tenant gets, at least 1
	Priority uint8
	Named    bool // its tenant has a name

	complete bool
	ahead    bool   // it is one of the ring's lanes that are ahead
	used     bool   // a claim has taken a task since makeRoom last looked
	idler    bool   // it is in the list of idle lanes
	exact    bool   // a ready task is at next
	listed   bool   // in trimmer.lanes
	left     uint16 // time of its leaving the ring during its turn: see turnTime
	turns    int32  // claims left in its turn, also while it is in no ring; 0: the turn has not begun
	spilled  uint32 // weight of the tasks on disk only, since complete was last set: see deepLane
	pass     uint32 // the last refill that read tasks of the lane
	leased   int32  // leased tasks
	taken    int32  // bytes of records taken since the last segment of the trail ended

	window window
	next   Pos // zero: the head of the lane

	ringNext, ringPrev *Lane      // nil if the lane is known to have no ready task
	newer, older       *Lane      // neighbors among the lanes that hold memory
	idleNext, idlePrev *Lane      // neighbors in the list of idle lanes
	trail              trail      // the part before the window
	share              *laneShare // nil: its tenant is not counted over the shards
}

// reaches reports whether a task at p belongs in the window: p is before next, or the window has
// all tasks.
func (l *Lane) reaches(p Pos) bool { return l.complete || p.compare(l.next) < 0 }

// spill leaves a task at p, after the end of the window, to disk, where the window reaches it
// later.
func (l *Lane) spill(p Pos, bytes int) {
	l.next, l.exact, l.complete = p, true, false
	l.weigh(bytes)
}

// weigh counts a task that is on disk only.
func (l *Lane) weigh(bytes int) {
	l.spilled = min(l.spilled+1+uint32(bytes/deepTask), 1<<31)
}

// First returns a position at or before the first ready task of the lane, and behind all consumed
// ones. exact: it is the position of the task. ok is false if no task is ready.
func (l *Lane) First() (pos Pos, exact, ok bool) {
	if l.window.Len() > 0 {
		return l.window.First(), true, true
	}
	return l.next, l.exact, !l.complete
}

// FirstRecord returns the record of the first task.
// REQUIRES: Head has returned the lane, and its tasks have not changed since.
func (l *Lane) FirstRecord() []byte { return l.window.FirstRecord() }

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

// isIdle reports whether a lane has neither ready nor leased tasks.
func (l *Lane) isIdle() bool { return l.leased == 0 && l.drained() }

// Lease counts a leased task of a lane at a since.
func (l *Lane) Lease(since uint64) {
	l.leased++
	l.trail.lease(since)
}

// A deep lane has tables of its own: see store.AddDeepLane.
const (
	deepLane = 1 << 15 // a lane of this weight or more is deep: each task counts one,
	deepTask = 2 << 10 // and one more for each deepTask bytes
)
