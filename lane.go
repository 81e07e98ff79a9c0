package codeq

import (
	"codeq/internal/chunked"
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
	priority uint8
	complete bool
	ahead    bool   // of the ring's lanes that are ahead
	used     bool   // a claim has taken from the window since it was last looked at
	idler    bool   // it is in the catalogue's list of idle lanes
	turns    int32  // claims left of its turn; 0: it has not begun
	spilled  uint32 // weight of the tasks that went to disk only since the lane was complete: see deepLane
	pass     uint32 // the last refill that read tasks of the lane
	queue    *queueState
	tenant   string

	window window.Window
	next   window.Pos // zero: the head of the lane

	ringNext, ringPrev *lane // nil while the lane is known to have no ready task
	newer, older       *lane // of the lanes that hold memory

	leased             int   // tasks in workers' hands
	trail              trail // behind the window
	place              int   // in the lanes of the queue
	idleNext, idlePrev *lane // in that list
}

type laneKey struct {
	queue    string
	tenant   string
	priority uint8
}

// laneName tells a lane from the others of its queue.
type laneName struct {
	tenant   string
	priority uint8
}

// fewLanes is how many lanes a queue has at the most without an index of them.
const fewLanes = 8

// queueState is what a shard knows of a queue.
type queueState struct {
	name    string
	number  uint32              // 0 until the first task of the queue
	since   uint64              // the Seq of its first lane under the number; 0: load has found the number
	lanes   chunked.List[*lane] // in no order
	byName  map[laneName]*lane  // the lanes, if they are more than fewLanes
	counts  keys.Counts
	touched bool    // on the group's list
	gate    gateway // nil: neither a rate nor a limit of concurrency
	buckets map[bucketKey]*bucket
	arrived uint64 // tasks that have come from other shards since it is in memory
	configured

	rings [MaxPriority + 1]*ring // nil: no lane may have a ready task
	mask  uint16                 // bit p: there is rings[p]
	asked uint32                 // the last epoch in which a claim asked for it
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

	opensAt     uint64  // when it is no longer held back; monotonic clock of the shard, ms
	throttledAt int     // the place among the shard's queues that are held back; negative: it is none
	attended    bool    // on the shard's list of queues that speak looks after
	warden      *warden // nil: another shard has it, or none does
}

func newQueueState(name string) *queueState {
	return &queueState{name: name, configured: unconfigured, throttledAt: -1}
}

// lane returns the queue's lane in memory; nil if there is none.
func (q *queueState) lane(tenant string, priority uint8) *lane {
	if q.byName != nil {
		return q.byName[laneName{tenant, priority}]
	}
	for _, l := range q.lanes.All() {
		if l.priority == priority && l.tenant == tenant {
			return l
		}
	}
	return nil
}

// addLane adds a lane that the queue does not have.
func (q *queueState) addLane(l *lane) {
	l.place = q.lanes.Len()
	switch q.lanes.Append(l); {
	case q.byName != nil:
		q.byName[laneName{l.tenant, l.priority}] = l
	case q.lanes.Len() > fewLanes:
		q.byName = make(map[laneName]*lane, 2*fewLanes)
		for _, l := range q.lanes.All() {
			q.byName[laneName{l.tenant, l.priority}] = l
		}
	}
}

// removeLane removes a lane of the queue. The index stays until it is empty, so that
// lanes that come and go at its bound do not build it again and again.
func (q *queueState) removeLane(l *lane) {
	if moved, ok := q.lanes.Remove(l.place); ok {
		moved.place = l.place
	}
	if delete(q.byName, laneName{l.tenant, l.priority}); q.lanes.Len() == 0 {
		q.lanes, q.byName = chunked.List[*lane]{}, nil
	}
}

func (q *queueState) due() uint64 { return q.opensAt }
func (q *queueState) spot() *int  { return &q.throttledAt }

// reaches reports whether the window has the place of a task: it is before next,
// or the window has all.
func (l *lane) reaches(p window.Pos) bool { return l.complete || p.Compare(l.next) < 0 }

// spill leaves a task that comes next after all of the window to disk, where the window
// will come to it.
func (l *lane) spill(p window.Pos, bytes int) {
	l.next, l.complete = p, false
	l.weigh(bytes)
}

// weigh counts a task that goes to disk only.
func (l *lane) weigh(bytes int) {
	l.spilled = min(l.spilled+1+uint32(bytes/deepTask), 1<<31)
}

// first returns a position at or before that of the first task of the lane that is
// ready, and after what has been consumed. ok is false if no task is ready.
func (l *lane) first() (pos window.Pos, ok bool) {
	if l.window.Len() > 0 {
		return l.window.First(), true
	}
	return l.next, !l.complete
}

// forget drops the window; disk has all of it.
func (l *lane) forget() {
	if l.window.Len() > 0 {
		l.next = l.window.First()
		l.complete = false
	}
	l.window.Clear()
}

// trim drops the last tasks of the window until it holds no more than so many bytes.
func (l *lane) trim(bytes int) {
	if p, dropped := l.window.Trim(bytes); dropped {
		l.next = p
		l.complete = false
	}
}

// drained reports whether the lane is known to have no ready task.
func (l *lane) drained() bool { return l.complete && l.window.Len() == 0 }

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

// A lane that is deep has tables of its own: see store.AddDeepLane.
const (
	deepLane = 1 << 15 // tasks on disk only from which on a lane is deep, each of so many
	deepTask = 2 << 10 // bytes counting once more
)
