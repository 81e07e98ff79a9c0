package engine

import "codeq/internal/keys"

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

// forgetQueues reports the queues that the rules no longer need: the owner drops them, unless it
// needs them itself. A queue with wakeups in memory stays until they are applied. While wakeups are
// on disk only, a queue that may have some of them is doubtful, and stays as well.
func (s *State) forgetQueues() {
	if !s.Ties.wakeups.onDisk {
		for range min(s.Names.doubtful.Len(), doubtsAtOnce) {
			s.Names.resting = append(s.Names.resting, s.Names.doubtful.Pop())
		}
	}
	var awakened map[*Queue]bool
	for _, q := range s.Names.resting {
		if q.hasWakeups && s.Ties.wakeups.onDisk {
			s.Names.doubtful.Append(q)
			continue
		}
		if q.resting = false; q.hasWakeups {
			if awakened == nil {
				awakened = s.Ties.wakeups.queues()
			}
			if q.hasWakeups = awakened[q]; q.hasWakeups {
				continue // applying the last of them calls Rest
			}
		}
		if q.Suspects != 0 && q.Counts.Blocked == 0 { // they were canceled
			s.Suspects.forgetSuspects(q)
		}
		if s.Names.isUnknown(q) && s.Names.isFiled(q) {
			s.Effects.Forgotten = append(s.Effects.Forgotten, q)
		}
	}
	clear(s.Names.resting)
	s.Names.resting = s.Names.resting[:0]
}

// hasDoubts reports whether doubtful queues can be checked now.
func (ti *ties) hasDoubts() bool { return ti.names.doubtful.Len() > 0 && !ti.wakeups.onDisk }

// isUnknown reports whether the rules need nothing that memory has of a queue.
func (ns *names) isUnknown(q *Queue) bool {
	return q.lanes.Len() == 0 && q.Counts == keys.Counts{} && len(q.buckets) == 0 && !q.touched && !q.Fed && q.rechecks == 0 &&
		q.Version == 0 && q.Orphans == 0
}

// Forget removes a queue that nobody needs from memory.
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
		c.formerQueues.add(q.Name, q.Number, ns.formerMost())
	}
	c.gone[c.slot(q.Name)] += q.arrived
}
