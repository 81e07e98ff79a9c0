package engine

import (
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The life of a task. Each arrow is one function, called by verbs and upkeep. This file begins and
// ends the life, attempt.go begins and ends a lease, schedule.go moves due tasks on, proceed.go
// moves blocked tasks on, and alter.go has the callers' operations on a task by its ID.
//
//	          admit, enter         Grant              complete
//	produce ---------> Ready  -------------> Leased ------------> gone, or Done
//	   |                 ^ ^                  | | |
//	   | admit    promote| +---- giveBack ----+ | +-- toDeadLetter --> Dead
//	   |                 |                      | postpone
//	   +------------> Scheduled <---------------+
//	   |                 ^
//	   |                 | proceed                    cancel
//	   +-------------> Blocked          from any ------------> gone, or Canceled
//
// Each function changes the shard's memory and its counts, and adds the same changes to the group.
// None can fail halfway: records are read and decoded before the first change.

// admitAll takes in the tasks of a batch. It appends their IDs to ids, which is empty, and the
// indexes of tasks with taken idempotency keys to duplicates. A task of another shard, or one that
// waits for such a task of the batch, is sent there. Its ID is not known, and zero.
// REQUIRES: canAdmit.
func (s *State) admitAll(tasks []NewTask, ids []keys.ID, duplicates []int) ([]keys.ID, []int) {
	for i := range tasks {
		if tasks[i].Tied != nil {
			return s.admitRest(tasks, ids, duplicates)
		}
		ids = append(ids, s.admit(&tasks[i]))
	}
	return ids, duplicates
}

// admit takes in a new task.
func (s *State) admit(t *NewTask) keys.ID {
	l := s.Names.lane(t.Key)
	id := s.mint.ID(l.number)
	s.Names.emit(EventProduced, l, id, 0, "")
	if t.RunAt > s.Wall {
		s.Times.schedule(l, id, t.RunAt, t.Rec)
		return id
	}
	s.Names.placeFirst(l, id, t.Rec)
	return id
}

// enter makes a due task ready, or makes it wait for its turn, or a suspect for its start.
func (s *State) enter(l *Lane, since uint64, id keys.ID, head *record.Head, rec []byte) {
	switch group := head.Group; {
	case group != 0 && !s.Ties.takeTurn(group, id):
		s.Ties.block(l, group, id, rec)
	case head.Suspect:
		s.Suspects.hold(l, id, head.Leases, rec)
	default:
		s.Names.place(l, since, id, rec)
	}
}

// end is the last step of a task that has ended: the tasks that are tied to it go on.
func (s *State) end(q *Queue, id keys.ID, t *record.Ties, o Outcome) {
	if t.Unique != [keys.UniqueLen]byte{} {
		var release uint8
		if o.State == Done {
			release = record.ReleaseOnComplete
		} else if o.State == Dead {
			release = record.ReleaseOnDead
		}
		s.Ties.endKey(id, t, release)
	}
	if t.Group != 0 {
		s.passTurn(q, t.Group, id)
	}
	if t.Parent {
		s.tellChildren(id, o.State)
	}
	if t.Child && o.State != Dead {
		s.Ties.releaseParents(id, 0)
	}
	if s.Wanted&WantOutcomes != 0 {
		s.Effects.Endings = append(s.Effects.Endings, Ending{id, o})
	}
}

// followDeath takes in the task that the settings of a dead task's queue ask for. It has no ties,
// so that its shard is that of the dead task: both are in one commit. If the lanes have run out,
// there is none.
func (s *State) followDeath(ls *lease, rec *record.Record) {
	l := ls.lane
	headers, ok := record.DeathHeaders(rec, keys.FormatID(ls.id), l.Queue)
	if !ok || s.Names.hasLanes(1) != nil {
		return
	}
	t := NewTask{Key: LaneKey{l.queue.Settings.DeadLetterQueue, l.Tenant, l.Priority}}
	t.Encode(&record.Record{Headers: headers, Payload: rec.Payload}, nil)
	s.admit(&t)
}
