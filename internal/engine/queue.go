package engine

import (
	"strings"

	"codeq/internal/container/chunked"
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// names holds the queues and lanes of a shard that are in memory, with their numbers in the
// catalogue, their ready tasks, and the totals and settings of queues.
type names struct {
	*round

	Queues    map[string]*Queue
	recent    *Queue               // the last one that known has found; nil: it has left memory
	handles   chunked.List[int]    // handles that are free again
	numbers   chunked.List[*Queue] // by number; 0 is never assigned; nil: not in memory
	lanes     chunked.List[*Lane]  // by number; nil: not in memory
	catalogue catalogue
	ready     ready.Tasks
	busy      int // queues with unended tasks

	resting  []*Queue             // may no longer be needed
	doubtful chunked.List[*Queue] // resting, and may have wakeups that are on disk only

	settled  chunked.Places[*Queue] // that have settings, and so stay in memory: cursors may go on
	Given    uint64                 // the largest version of settings that were removed
	rechecks []*recheck             // queues with changed limits
	totals   totals
}

// isBusy reports whether a queue has tasks that have not ended.
func (q *Queue) isBusy() bool {
	c := &q.Counts
	return c.Ready+c.Scheduled+c.Blocked+c.Leased > 0
}

// noteBusy updates the number of queues with unended tasks, which may include this one.
func (ns *names) noteBusy(q *Queue) {
	if busy := q.isBusy(); busy != q.busy {
		if q.busy = busy; busy {
			ns.busy++
		} else {
			ns.busy--
		}
	}
}

// noteTouched updates that number, and calls Rest, for the queues with counts that the group has
// changed so far.
func (ns *names) noteTouched() {
	for _, q := range ns.Group.Touched {
		ns.noteBusy(q)
		ns.Rest(q)
	}
}

// Queue holds the memory of the rules about a queue. By its handle the owner finds the claims that
// wait for its tasks, and the limits of claims.
type Queue struct {
	Name    string
	Handle  int                 // a small number among the queues in memory
	since   uint64              // Seq of its first lane under Number; 0: load has set Number
	lanes   chunked.List[*Lane] // in no order
	byName  map[laneName]*Lane  // the lanes, if there are more than fewLanes
	Counts  keys.Counts
	granted uint64           // when a task was leased last, as stored; while it has a rate
	Orphans int              // handlers that go on though their leases have ended
	totals  keys.TotalsValue // Day is 0 until they are known
	changed uint64           // clock of periods at the last group that has changed it; 0: none since Open
	touched bool             // on the group's list
	filed   bool             // a row has the totals, and the counters have none
	Gated   bool             // the owner is told when its leases end
	Fed     bool             // on the list of queues that have more to claim
	buckets map[bucketKey]*bucket
	kinds   *store.DeadKinds // of its dead letters; nil: it has had none since it is in memory
	arrived uint64           // tasks that have come from other shards since the queue is in memory
	Configured
	timeout uint64 // Settings.Timeout, ms
	Removed uint64 // the last version of settings that were removed since the queue is in memory

	Suspects uint16 // bit part: some may wait in that scope to be started
	Stale    int    // were started, and were not leased until their place was over: others do not start
	starting int    // how many of them the next group starts
	heldIn   uint32 // the last group that made one wait

	ready.Queue // Number is 0 until the first task of the queue

	resting    bool // on the list of queues that may no longer be needed
	hasWakeups bool // perhaps: wakeups concern tasks of it
	settledAt  int  // its place among those with settings, if it has some
	rechecks   int  // changes of its limits that are not processed yet
	busy       bool // counted among the queues with unended tasks
}

// SetGated says whether the owner is told when leases of the queue end.
func (q *Queue) SetGated(gated bool) { q.Gated = gated }

func newQueue(name string) *Queue {
	return &Queue{Name: name, Configured: unconfigured}
}

// lane returns the queue's lane in memory; nil if there is none.
func (q *Queue) lane(tenant string, priority uint8) *Lane {
	if q.byName != nil {
		return q.byName[laneName{tenant, priority}]
	}
	for _, l := range q.lanes.All() {
		if l.Priority == priority && l.Tenant == tenant {
			return l
		}
	}
	return nil
}

// addLane adds a new lane to the queue.
func (q *Queue) addLane(l *Lane) {
	l.place = int32(q.lanes.Len())
	switch q.lanes.Append(l); {
	case q.byName != nil:
		q.byName[laneName{l.Tenant, l.Priority}] = l
	case q.lanes.Len() > fewLanes:
		q.byName = make(map[laneName]*Lane, 2*fewLanes)
		for _, l := range q.lanes.All() {
			q.byName[laneName{l.Tenant, l.Priority}] = l
		}
	}
}

// removeLane removes a lane of the queue. The index stays until it is empty, so that it is not
// rebuilt whenever lanes come and go around fewLanes.
func (q *Queue) removeLane(l *Lane) {
	if moved, ok := q.lanes.Remove(int(l.place)); ok {
		moved.place = l.place
	}
	if delete(q.byName, laneName{l.Tenant, l.Priority}); q.lanes.Len() == 0 {
		q.lanes, q.byName = chunked.List[*Lane]{}, nil
	}
}

// known returns a queue in memory; nil: it is not there. Operations often follow each other in the
// same queue, so that most look-ups are one comparison.
func (ns *names) known(name string) *Queue {
	if q := ns.recent; q != nil && q.Name == name {
		return q
	}
	q := ns.Queues[name]
	if q != nil {
		ns.recent = q
	}
	return q
}

// QueueNamed returns a queue, and creates it if it is not in memory. Disk does not change before
// the queue has a task.
func (ns *names) QueueNamed(name string) *Queue {
	q := ns.known(name)
	if q == nil {
		q = newQueue(strings.Clone(name)) // it may be a part of a long string
		q.Handle = len(ns.Queues)
		if ns.handles.Len() > 0 {
			q.Handle = ns.handles.Pop()
		}
		ns.Queues[q.Name] = q
	}
	return q
}

// touch makes the group store the counts of a queue.
func (ns *names) touch(q *Queue) {
	if !q.touched {
		ns.touchFirst(q)
	}
}

func (ns *names) touchFirst(q *Queue) {
	q.touched = true
	ns.Group.Touched = append(ns.Group.Touched, q)
	if q.totals.Day != ns.totals.today {
		ns.beginDay(q)
	}
	q.changed, q.filed = ns.periods.Now, false
	if ns.Wanted&WantCounts != 0 {
		ns.Effects.Counted = append(ns.Effects.Counted, Counted{q, q.totals.All})
	}
}

// Lane is the line of ready tasks of one (queue, tenant, priority): see ready.Lane, which leads to
// it by number.
type Lane struct {
	LaneKey // never changed: a Grant points to it, and other goroutines read that
	number  uint32
	place   int32 // index in the lanes of the queue
	queue   *Queue
	tasks   ready.Lane
}

// LaneKey is the name of a lane in its shard.
type LaneKey struct {
	Queue    string
	Tenant   string
	Priority uint8
}

func newLane(number uint32, q *Queue, tenant string, priority uint8) *Lane {
	return &Lane{
		LaneKey: LaneKey{q.Name, tenant, priority}, number: number, queue: q,
		tasks: ready.Lane{
			Queue: &q.Queue, Number: number, Weight: q.Settings.Weight(tenant), Priority: priority, Named: tenant != "",
		},
	}
}

// laneName distinguishes a lane from the others of its queue.
type laneName struct {
	tenant   string
	priority uint8
}

// fewLanes is how many lanes a queue may have without an index of them.
const fewLanes = 8

// NextRecord returns the record of the task that State.Next has found.
func (l *Lane) NextRecord() []byte { return l.tasks.FirstRecord() }

// laneOf returns the lane in memory with ready tasks l.
func (ns *names) laneOf(l *ready.Lane) *Lane { return ns.lanes.At(int(l.Number)) }

// queueOf returns the queue with ready tasks q; nil if it has left memory.
func (ns *names) queueOf(q *ready.Queue) *Queue {
	if of := ns.numbers.At(int(q.Number)); of != nil && &of.Queue == q {
		return of
	}
	return nil
}

// dropLane drops an idle lane from memory.
func (ns *names) dropLane(l *Lane) {
	q := l.queue
	if ns.ready.Drop(&l.tasks) {
		ns.show(q)
	}
	if q.removeLane(l); q.lanes.Len() == 0 {
		ns.Rest(q)
	}
	ns.lanes.Set(int(l.number), nil)
	ns.catalogue.loaded.Remove(l.number)
}

// head returns the lane with the next task of a queue: see ready.Tasks.Head.
func (ns *names) head(q *Queue) (l *Lane, pending bool) {
	first, pending, left := ns.ready.Head(&q.Queue)
	if left {
		ns.show(q)
	}
	if first != nil {
		l = ns.laneOf(first)
	}
	return l, pending
}

// FirstTask describes the task that a claim of a queue would get here, as far as memory shows.
type FirstTask struct {
	Priority uint8
	Tenant   string
	Alone    bool   // no other tenant has a task of the priority
	Since    uint64 // if Alone; the task is not older
	Share    uint64 // of the tenants that have; see Share
}

func (ns *names) First(q *Queue) (f FirstTask, ok bool) {
	first := ns.ready.First(&q.Queue)
	if q.Settings.Paused || first.Lane == nil {
		return f, false
	}
	l := ns.laneOf(first.Lane)
	f = FirstTask{Priority: l.Priority, Tenant: l.Tenant, Alone: first.Alone, Share: first.Share}
	if f.Alone {
		pos, _, _ := first.Lane.First()
		f.Since = pos.Since
	}
	return f, true
}

// Queues leave memory when neither the rules nor their owner need them.

// Rest is called when a queue may no longer be needed.
func (ns *names) Rest(q *Queue) {
	if !q.resting && q.lanes.Len() == 0 { // else the last of them calls Rest
		q.resting = true
		ns.resting = append(ns.resting, q)
	}
}

// doubtsAtOnce is how many doubtful queues a group checks once no wakeups are on disk only.
const doubtsAtOnce = 1 << 10

// hasDoubts reports whether doubtful queues can be checked now.
func (ti *ties) hasDoubts() bool { return ti.names.doubtful.Len() > 0 && !ti.wakeups.onDisk }

// isUnknown reports whether the rules need nothing that memory has of a queue.
func (ns *names) isUnknown(q *Queue) bool {
	return q.lanes.Len() == 0 && q.Counts == keys.Counts{} && len(q.buckets) == 0 && !q.touched && !q.Fed && q.rechecks == 0 &&
		q.Version == 0 && q.Orphans == 0
}

// Forget removes a queue from memory that neither the rules nor the owner need.
func (ns *names) Forget(q *Queue) {
	c := &ns.catalogue
	delete(ns.Queues, q.Name)
	if ns.recent == q {
		ns.recent = nil
	}
	ns.handles.Append(q.Handle)
	if q.Number != 0 {
		ns.numbers.Set(int(q.Number), nil)
		c.current.Remove(q.Number)
		c.formerQueues.Add(q.Name, q.Number, ns.formerMost())
	}
	c.gone[c.slot(q.Name)] += q.arrived
}
