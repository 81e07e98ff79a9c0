package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// A task with parents waits until they have ended. It knows how many it still waits for (range
// Pending); each parent, in its own shard, knows its children (range Dependent, and a flag of the
// record, so that the end of a task without children reads nothing). Parents that exist already, or
// belong to other shards, are asked by messages.

// admitAll takes in the tasks of a batch. It appends their IDs to ids, and the indexes of those
// whose idempotency key was taken to duplicates. A task that belongs to another shard is sent
// there; its ID is not known.
// REQUIRES: canAdmit.
func (s *State) admitAll(tasks []NewTask, ids []keys.ID, duplicates []int) ([]keys.ID, []int) {
	s.fetchTies(tasks)
	var existed map[keys.ID]bool // tasks that existed before the batch and stand for tasks of it
	for i := range tasks {
		t := &tasks[i]
		if t.Tied == nil {
			ids = append(ids, s.admit(t))
			continue
		}
		if home, bound := t.Home(s.config.Shards); bound && home != s.config.Shard {
			s.send(home, t.message())
			ids = append(ids, keys.ID{})
			continue
		}
		if t.Tied.Twin >= 0 {
			ids, duplicates = append(ids, ids[t.Tied.Twin]), append(duplicates, i)
			continue
		}
		if id, taken := s.holder(t.Tied.Unique); taken {
			if t.Tied.Flags&record.ReplaceWaiting == 0 || !s.replace(id, t) {
				duplicates = append(duplicates, i)
			}
			if existed == nil {
				existed = make(map[keys.ID]bool)
			}
			existed[id] = true
			ids = append(ids, id)
			continue
		}
		ids = append(ids, s.admitTied(t, ids, existed))
	}
	return ids, duplicates
}

// fetchTies reads the holders of the idempotency keys, and of the turns of the groups, of a batch.
func (s *State) fetchTies(tasks []NewTask) {
	if len(tasks) < 2 || s.uniques.whole && s.turns.whole {
		return
	}
	var uniques [][keys.UniqueLen]byte
	var groups []uint64
	for i := range tasks {
		t := tasks[i].Tied
		if t == nil || t.Twin >= 0 {
			continue
		}
		if home, bound := tasks[i].Home(s.config.Shards); bound && home != s.config.Shard {
			continue
		}
		uniques = append(uniques, t.Unique)
		if len(t.Parents) == 0 && tasks[i].RunAt <= s.Wall {
			groups = append(groups, t.Group)
		}
	}
	s.uniques.fetch(s, uniques)
	s.turns.fetch(s, groups)
}

// canAdmit reports whether everything that admitAll looks up is on disk.
func (s *State) canAdmit(tasks []NewTask) bool {
	for i := range tasks {
		if t := tasks[i].Tied; t != nil && t.Flags&record.ReplaceWaiting != 0 {
			id, taken := s.holder(t.Unique)
			if taken && s.isHolderMoving(t.Unique, id) {
				return false
			}
		}
	}
	return true
}

// admitTied takes in a task with ties, whose key is free.
func (s *State) admitTied(t *NewTask, batch []keys.ID, existed map[keys.ID]bool) keys.ID {
	l := s.lane(t.Key)
	id := s.mint.id(l.number)
	s.emit(EventProduced, l, id, 0, "")
	if t.Tied.Unique != [keys.UniqueLen]byte{} {
		s.takeKey(id, &t.Tied.Ties, mintedAt(id))
	}
	switch group := t.Tied.Group; {
	case len(t.Tied.Parents) > 0:
		s.awaitParents(l, t, id, batch, existed)
	case t.RunAt > s.Wall:
		s.schedule(l, id, t.RunAt, t.Rec)
	case group != 0 && !s.takeTurn(group, id):
		s.block(l, group, id, t.Rec)
	default:
		s.placeFirst(l, id, t.Rec)
		if t.Tied.Flags&record.ReplaceWaiting != 0 { // by a later produce of the group, perhaps
			first := keys.FirstPlace(l.number, id)
			s.Group.put(id, l, first, t.Rec)
		}
	}
	return id
}

// awaitParents makes a new task wait for its parents.
func (s *State) awaitParents(l *Lane, t *NewTask, id keys.ID, batch []keys.ID, existed map[keys.ID]bool) {
	rec, err := record.Decode(t.Rec)
	if err != nil {
		s.Broken = fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
		return
	}
	onDead := byte(t.Tied.onDead)
	asked := make(map[keys.ID]bool, len(t.Tied.Parents))
	for i, p := range t.Tied.Parents {
		n, sibling := keys.NthOf(p)
		if sibling {
			p = batch[n]
			sibling = !existed[p]
		}
		rec.Parents[i] = p
		switch {
		case asked[p]:
		case sibling:
			s.Group.set(keys.AppendDependent(nil, p, id), []byte{onDead})
		default:
			s.send(keys.ShardOf(p, s.config.Shards), &keys.Message{Kind: keys.MsgDepend, Parent: p, Child: id, Outcome: onDead})
		}
		asked[p] = true
	}
	s.pending.put(s, id, uint64(len(asked)))
	s.block(l, 0, id, rec.Encode())
}

// How a parent has ended, as its children see it.
const (
	parentDone = iota
	parentCanceled
	parentPinned // done, and its result is kept until the child has ended
)

// outcomeFor returns what the end of a parent means to a child; held: the child goes on waiting.
func outcomeFor(state TaskState, onDead OnDead) (outcome byte, held bool) {
	switch {
	case state == Done, state == Dead && onDead == RunOnDead:
		return parentDone, false
	case state == Dead && onDead == HoldOnDead:
		return 0, true
	}
	return parentCanceled, false
}

func (s *State) tellChild(parent, child keys.ID, outcome byte) {
	outcome = s.pinFor(parent, outcome)
	if to := keys.ShardOf(child, s.config.Shards); to != s.config.Shard {
		s.send(to, &keys.Message{Kind: keys.MsgEnded, Parent: parent, Child: child, Outcome: outcome})
		return
	}
	s.parentEnded(parent, child, outcome)
}

// toBeCanceled is the value in the range Pending of a task that will be canceled.
const toBeCanceled = Never

// parentEnded counts down the parents of a task of this shard. A task whose last parent has ended
// goes on in the same commit, or in a later one if this group has no time or room left, or has
// changed the task.
func (s *State) parentEnded(parent, child keys.ID, outcome byte) {
	if outcome != parentCanceled && s.proceedNow(parent, child, outcome) || s.Broken != nil {
		return
	}
	n, ok := s.pending.get(s, child)
	if !ok || n == toBeCanceled { // it was canceled, or will be
		if outcome == parentPinned {
			s.unpin(parent, 0)
		}
		return
	}
	if outcome == parentPinned {
		s.pin(parent, child)
	}
	l, err := s.laneNumbered(keys.LaneOf(child))
	if err != nil {
		s.Broken = err
		return
	}
	q := l.queue
	switch {
	case outcome == parentCanceled:
		s.pending.put(s, child, toBeCanceled)
		s.wake(q, 0, child, keys.WakeCancel)
	case n > 1:
		s.pending.put(s, child, n-1)
	default:
		s.pending.drop(s, child)
		s.wake(q, 0, child, keys.WakeUp)
	}
}

// proceedNow lets a task go on whose last parent has ended. It returns false, and does nothing, if
// other parents remain, or if the task's record alone does not tell.
func (s *State) proceedNow(parent, child keys.ID, outcome byte) bool {
	n, known := s.pending.peek(child)
	// an end that was reported earlier may have been undone: the parent was redriven
	if !known && keys.ShardOf(parent, s.config.Shards) != s.config.Shard {
		n, _ = s.pending.get(s, child)
		known = true
	}
	if known && n != 1 || s.Group.hasChanged(child) || !s.HasRoom(RoomLow) || s.isLate() {
		return false
	}
	l, err := s.laneNumbered(keys.LaneOf(child))
	if err != nil {
		s.Broken = err
		return false
	}
	at, err := s.waitingChild(l.queue, child)
	if err != nil {
		s.Broken = err
		return false
	}
	if at == nil || !known && !isOnly(at.rec.Parents, parent) {
		return false
	}
	if outcome == parentPinned {
		s.pin(parent, child)
	}
	s.pending.dropBlind(child)
	s.unblock(at)
	s.proceed(at.lane, child, &at.rec.Head, at.rec.Encode())
	return true
}

// isOnly reports whether a task has this parent and no other.
func isOnly(parents [][record.IDLen]byte, parent keys.ID) bool {
	for _, p := range parents {
		if p != parent {
			return false
		}
	}
	return len(parents) > 0
}

// depend makes a task wait for a parent of this shard. It returns false, and does nothing, if the
// latest state of the parent is not on disk yet.
func (s *State) depend(parent, child keys.ID, onDead OnDead) bool {
	if s.isMoving(parent) {
		return false
	}
	at, err := s.locate(parent)
	if err != nil {
		s.Broken = err
		return true
	}
	if at == nil { // completed, and no longer kept
		s.tellChild(parent, child, parentDone)
		return true
	}
	if at.state == Done || at.state == Canceled || at.state == Dead {
		if outcome, held := outcomeFor(at.state, onDead); !held {
			if at.state == Done {
				s.repin(at)
			}
			s.tellChild(parent, child, outcome)
			return true
		}
	}
	s.Group.addChild(parent)
	s.Group.set(keys.AppendDependent(nil, parent, child), []byte{byte(onDead)})
	if at.rec.Parent {
		return true
	}
	at.rec.Parent = true
	switch {
	case at.state == Dead: // to the bucket that does not expire
		s.unkeep(at)
		s.keep(at.lane.queue, keys.Dead, at.id, keys.Forever, at.ended, &at.rec)
	default:
		s.rewrite(at)
	}
	return true
}
