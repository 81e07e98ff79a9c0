package engine

import "codeq/internal/ready"

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
			Queue: &q.Queue, Number: number, Weight: q.Settings.weight(tenant), Priority: priority, Named: tenant != "",
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

// forgetIdle drops from memory the lanes that have been idle longest, beyond those that may stay,
// and reports the queues that are no longer needed. Its cost grows with what the group did, and
// with doubtsAtOnce.
// REQUIRES: the group is empty.
func (s *State) forgetIdle() {
	for idle := s.Names.ready.Idle(); idle != nil; idle = s.Names.ready.Idle() {
		l := s.Names.laneOf(idle)
		s.Names.dropLane(l)
		s.Names.catalogue.formerLanes.add(formerLane{l.queue.Number, laneName{l.Tenant, l.Priority}}, l.number, s.Names.formerMost())
	}
	s.forgetQueues()
}
