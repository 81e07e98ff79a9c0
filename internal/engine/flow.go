package engine

import (
	"fmt"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// A task with parents waits until they have ended. The range Pending has the number of parents that
// the task still waits for. Each parent, in its own shard, has its children in the range Dependent,
// and a flag in its record, so that the end of a task without children reads nothing. Parents in
// the task's own shard get the child in the task's commit. Parents in other shards, and those
// beyond dependAtOnce of one operation, get it by messages. If a parent ends and is gone before it
// gets the child, the child's OnMissing decides.

// The admission of tasks with ties is here, too: admitRest looks up their idempotency keys and
// parents, and takes their turns.

// Tasks of one batch that wait for each other may belong to several shards, as do the follow-ups of
// a completion, which are all stored with it. A shard takes in tasks that may belong to it, if it
// has their siblings. The others go on together to the shard of the first of them, which does the
// same, until none is left: each hop takes in at least one task, the first.

// admitRest is admitAll for the tasks of a batch that have no ID yet. The first of them has ties.
func (s *State) admitRest(tasks []NewTask, ids []keys.ID, duplicates []int) ([]keys.ID, []int) {
	s.Ties.fetchTies(tasks)
	b := family{left: dependAtOnce}
	var others []int // tasks that are sent together
	for i := len(ids); i < len(tasks); i++ {
		t := &tasks[i]
		if t.Tied == nil {
			ids = append(ids, s.admit(t))
			continue
		}
		if t.Tied.Twin >= 0 {
			ids, duplicates = append(ids, ids[t.Tied.Twin]), append(duplicates, i)
			continue
		}
		home, bound := t.Home(s.config.Shards)
		switch elsewhere := bound && home != s.config.Shard; {
		case elsewhere && !t.hasSiblings():
			s.Mail.send(home, t.message())
			ids = append(ids, keys.ID{})
			continue
		case elsewhere, t.waitsFor(ids):
			others, ids = append(others, i), append(ids, keys.ID{})
			continue
		}
		if id, taken := s.Ties.holder(t.Tied.Unique); taken && !s.takeOver(id, t) {
			if t.Tied.Flags&record.ReplaceWaiting == 0 || !s.replace(id, t) {
				duplicates = append(duplicates, i)
			}
			b.exists(id)
			ids = append(ids, id)
			continue
		}
		b.ids = ids
		ids = append(ids, s.admitTied(t, &b))
	}
	if len(others) > 0 {
		b.ids = ids
		s.Mail.sendOn(tasks, others, &b)
	}
	return ids, duplicates
}

// hasSiblings reports whether a task has a parent or a child in its batch.
func (t *NewTask) hasSiblings() bool {
	return t.Tied.Parent || slices.ContainsFunc(t.Tied.Parents, isNth)
}

// isSibling reports whether a parent is a task of the same batch that another shard has stored.
func (t *NewTask) isSibling(parent keys.ID) bool {
	_, found := slices.BinarySearchFunc(t.Tied.siblings, parent, compareIDs)
	return found
}

func isNth(parent keys.ID) bool {
	_, sibling := keys.NthOf(parent)
	return sibling
}

// waitsFor reports whether a task waits for a task of its batch that has no ID here.
func (t *NewTask) waitsFor(ids []keys.ID) bool {
	return slices.ContainsFunc(t.Tied.Parents, func(p keys.ID) bool {
		n, sibling := keys.NthOf(p)
		return sibling && ids[n] == keys.ID{}
	})
}

// sendOn sends the tasks of a batch with the indexes in others to the shard of the first of them.
func (ml *mail) sendOn(tasks []NewTask, others []int, b *family) {
	m := keys.Message{Kind: keys.MsgFlow, Parent: tasks[others[0]].Tied.done}
	for _, i := range others {
		t := &tasks[i]
		rec, err := record.Decode(t.Rec)
		if err != nil {
			ml.Broken = fmt.Errorf("%w: task of queue %q: %w", base.ErrCorrupt, t.Key.Queue, err)
			return
		}
		for at, p := range rec.Parents {
			n, sibling := keys.NthOf(p)
			switch {
			case !sibling && !t.isSibling(p):
				continue
			case !sibling:
			case b.ids[n] != keys.ID{}:
				p = b.ids[n]
			default:
				if twin := tasks[n].Tied.Twin; twin >= 0 {
					n = twin
				}
				rec.Parents[at] = keys.ID{} // missing: a strange node has not marked the parent
				if sent, found := slices.BinarySearch(others, n); found {
					rec.Parents[at] = keys.Nth(sent)
				}
				continue
			}
			if rec.Parents[at] = p; !b.existed[p] {
				m.Siblings = append(m.Siblings, p)
			}
		}
		m.Tasks = append(m.Tasks, keys.MessageTask{
			Queue: t.Key.Queue, Tenant: t.Key.Tenant, Priority: t.Key.Priority, Record: rec.Encode(),
		})
	}
	slices.SortFunc(m.Siblings, compareIDs)
	m.Siblings = slices.Compact(m.Siblings)
	home, _ := tasks[others[0]].Home(ml.config.Shards)
	ml.send(home, &m)
}

// fetchTies reads the holders of the idempotency keys, and of the turns of the groups, of a batch.
func (ti *ties) fetchTies(tasks []NewTask) {
	if len(tasks) < 2 || ti.uniques.Usage().Whole && ti.turns.Usage().Whole {
		return
	}
	var uniques [][keys.UniqueLen]byte
	var groups []uint64
	for i := range tasks {
		t := tasks[i].Tied
		if t == nil || t.Twin >= 0 {
			continue
		}
		if home, bound := tasks[i].Home(ti.config.Shards); bound && home != ti.config.Shard {
			continue
		}
		uniques = append(uniques, t.Unique)
		if len(t.Parents) == 0 && tasks[i].RunAt <= ti.Wall {
			groups = append(groups, t.Group)
		}
	}
	ti.uniques.Fetch(uniques)
	ti.turns.Fetch(groups)
}

// canAdmit reports whether everything that admitAll looks up is on disk.
func (ti *ties) canAdmit(tasks []NewTask) bool {
	left := dependAtOnce
	for i := range tasks {
		t := tasks[i].Tied
		if t == nil {
			continue
		}
		if t.Flags&(record.ReplaceWaiting|record.ReleaseOnClaim) != 0 {
			id, taken := ti.holder(t.Unique)
			leased := t.Flags&record.ReplaceWaiting == 0 && ti.leases.byID[id] != nil // it gives up its key, or not
			if taken && !leased && ti.isHolderMoving(t.Unique, id) {
				return false
			}
		}
		for _, p := range t.Parents {
			if left > 0 && ti.isOwn(p) {
				if left--; ti.leases.isMoving(p) {
					return false
				}
			}
		}
	}
	return true
}

// dependAtOnce limits the parents that one operation looks up in its own shard. These get their new
// children in the same commit. A large operation looks up only its first parents.
const dependAtOnce = 32

// isOwn reports whether a parent is a task of this shard that was there before the batch.
func (r *round) isOwn(parent keys.ID) bool {
	return !isNth(parent) && keys.ShardOf(parent, r.config.Shards) == r.config.Shard
}

// looksUp reports whether taking in tasks looks up parents.
func (r *round) looksUp(tasks []NewTask) bool {
	for i := range tasks {
		if t := tasks[i].Tied; t != nil && slices.ContainsFunc(t.Parents, r.isOwn) {
			return true
		}
	}
	return false
}

// admitTied takes in a task with ties. Its idempotency key is free.
func (s *State) admitTied(t *NewTask, b *family) keys.ID {
	l := s.Names.lane(t.Key)
	id := s.mint.ID(l.number)
	s.Names.emit(EventProduced, l, id, 0, "")
	if t.Tied.Unique != [keys.UniqueLen]byte{} {
		s.Ties.takeKey(id, &t.Tied.Ties)
	}
	rec, waits := t.Rec, uint64(0)
	if len(t.Tied.Parents) > 0 {
		rec, waits = s.awaitParents(t, id, b)
	}
	switch group := t.Tied.Group; {
	case waits > 0:
		s.Ties.pending.Put(id, waits)
		s.Ties.block(l, 0, id, rec)
		if waits == keys.PendingCanceled {
			s.Ties.wake(l.queue, 0, id, keys.WakeCancel)
		}
	case t.RunAt > s.Wall:
		s.Times.schedule(l, id, t.RunAt, rec)
	case group != 0 && !s.Ties.takeTurn(group, id):
		s.Ties.block(l, group, id, rec)
	default:
		s.Names.placeFirst(l, id, rec)
		if t.Tied.Flags&record.ReplaceWaiting != 0 { // by a later produce of the group, perhaps
			first := keys.FirstPlace(l.number, id)
			s.Group.Put(id, l, first, rec)
		}
	}
	return id
}

// family holds the known facts about the parents of a batch during its admission.
type family struct {
	ids     []keys.ID             // of the tasks so far
	existed map[keys.ID]bool      // tasks that existed before the batch and stand for tasks of it
	found   map[keys.ID]TaskState // looked up parents, unless another child may change them
	left    int                   // how many may still be looked up
}

// exists notes a task that existed before the batch and stands for a task of it.
func (b *family) exists(id keys.ID) {
	if b.existed == nil {
		b.existed = make(map[keys.ID]bool)
	}
	b.existed[id] = true
}

// awaitParents makes a new task wait for its parents. It returns the record of the task with the
// parents' IDs, and how many of them the task waits for.
func (s *State) awaitParents(t *NewTask, id keys.ID, b *family) (encoded []byte, waits uint64) {
	rec, err := record.Decode(t.Rec)
	if err != nil {
		s.Broken = fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
		return t.Rec, 0
	}
	asked := make(map[keys.ID]bool, len(t.Tied.Parents))
	canceled := false
	for i, p := range t.Tied.Parents {
		how := t.Tied.policy
		n, sibling := keys.NthOf(p)
		if sibling {
			p = b.ids[n]
		}
		rec.Parents[i] = p
		if asked[p] {
			continue
		}
		asked[p] = true
		switch {
		case p == t.Tied.done:
			how = how.OnDead() // it was completed, and is not missing
		case t.isSibling(p):
			how |= store.OfSibling
		}
		outcome, known := byte(store.ParentWaits), false
		switch {
		case sibling && !b.existed[p]:
			s.Group.Set(keys.AppendDependent(nil, p, id), []byte{byte(how.OnDead())})
			known = true
		case !sibling && keys.ShardOf(p, s.config.Shards) == s.config.Shard:
			outcome, known = s.lookUp(p, id, how, b)
		}
		switch {
		case !known:
			s.Mail.send(keys.ShardOf(p, s.config.Shards), &keys.Message{Kind: keys.MsgDepend, Parent: p, Child: id, Outcome: byte(how)})
			waits++
		case outcome == store.ParentWaits:
			waits++
		case outcome == keys.ParentCanceled:
			canceled = true
		case s.Ties.pinFor(p, outcome) == keys.ParentPinned:
			s.Ties.pin(p, id)
		}
	}
	if canceled {
		waits = keys.PendingCanceled
	}
	return rec.Encode(), waits
}

// lookUp is depend for a new task. If a message must ask the parent, known is false and lookUp has
// done nothing.
func (s *State) lookUp(parent, child keys.ID, how store.ParentPolicy, b *family) (outcome byte, known bool) {
	state, found := b.found[parent]
	if found {
		if outcome = how.OutcomeOf(state); outcome == store.ParentWaits {
			s.Ties.addChild(parent, child, how)
		}
		return outcome, true
	}
	if b.left--; b.left < 0 || b.left < dependAtOnce-1 && s.Spent() {
		return 0, false
	}
	outcome, state, known = s.depend(parent, child, how)
	if known && (outcome == store.ParentWaits || state != Dead) {
		if b.found == nil {
			b.found = make(map[keys.ID]TaskState)
		}
		b.found[parent] = state
	}
	return outcome, known
}

func (s *State) tellChild(parent, child keys.ID, outcome byte) {
	outcome = s.Ties.pinFor(parent, outcome)
	if to := keys.ShardOf(child, s.config.Shards); to != s.config.Shard || outcome == keys.ParentEnded {
		s.Mail.send(to, &keys.Message{Kind: keys.MsgEnded, Parent: parent, Child: child, Outcome: outcome})
		return
	}
	s.parentEnded(parent, child, outcome)
}

// parentEnded counts down the parents of a task of this shard. After the end of its last parent,
// the task goes on in the same commit, or in a later one if this group has no time or room left, or
// has changed the task.
func (s *State) parentEnded(parent, child keys.ID, outcome byte) {
	if outcome != keys.ParentCanceled && s.proceedNow(parent, child, outcome) || s.Broken != nil {
		return
	}
	n, ok := s.Ties.pending.Get(child)
	if !ok || n == keys.PendingCanceled { // it was canceled, or will be
		if outcome == keys.ParentPinned {
			s.Ties.unpin(parent, 0)
		}
		return
	}
	if outcome == keys.ParentPinned {
		s.Ties.pin(parent, child)
	}
	l, err := s.Names.laneNumbered(keys.LaneOf(child))
	if s.fails(err) {
		return
	}
	q := l.queue
	switch {
	case outcome == keys.ParentCanceled:
		s.Ties.pending.Put(child, keys.PendingCanceled)
		s.Ties.wake(q, 0, child, keys.WakeCancel)
	case n > 1:
		s.Ties.pending.Put(child, n-1)
	default:
		s.Ties.pending.Drop(child)
		s.Ties.wake(q, 0, child, keys.WakeUp)
	}
}

// proceedNow moves a task on if its last parent has ended. It returns false, and does nothing, if
// other parents remain, or if the task's record alone does not show this.
func (s *State) proceedNow(parent, child keys.ID, outcome byte) bool {
	n, known := s.Ties.pending.Peek(child)
	// an end that was reported earlier may have been undone: the parent was redriven
	if !known && keys.ShardOf(parent, s.config.Shards) != s.config.Shard {
		n, _ = s.Ties.pending.Get(child)
		known = true
	}
	if known && n != 1 || s.Group.hasChanged(child) || !s.HasRoom(RoomLow) || s.isLate() {
		return false
	}
	l, err := s.Names.laneNumbered(keys.LaneOf(child))
	if s.fails(err) {
		return false
	}
	at, err := s.Ties.blockedIn(l.queue, 0, child)
	if s.fails(err) {
		return false
	}
	if at == nil || !known && !isOnly(at.rec.Parents, parent) {
		return false
	}
	if outcome == keys.ParentPinned {
		s.Ties.pin(parent, child)
	}
	s.Ties.pending.DropBlind(child)
	s.Names.unblock(at)
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

// depend makes a task wait for a parent of this shard, unless the parent has ended, or is gone. ok
// is false, and nothing was done, if the latest state of the parent is not on disk yet.
func (s *State) depend(parent, child keys.ID, how store.ParentPolicy) (outcome byte, state TaskState, ok bool) {
	if s.Leases.isMoving(parent) {
		return 0, 0, false
	}
	at, err := s.locate(parent)
	if s.fails(err) {
		return store.ParentWaits, 0, true
	}
	if at != nil {
		state = at.state
	} else if how&store.OfSibling != 0 {
		if end := s.endings.find(parent, s.Uptime); end != nil && end.State != Dead {
			state = end.State
		}
	}
	if outcome = how.OutcomeOf(state); outcome != store.ParentWaits {
		switch {
		case state == Done && at != nil && outcome != keys.ParentEnded:
			s.repin(at)
		case state == Dead && outcome == keys.ParentEnded:
			s.Times.rekeep(at, max(at.place.At, s.retainedUntil(keptForParents)))
		}
		return outcome, state, true
	}
	s.Ties.addChild(parent, child, how)
	if at.rec.Parent && (state != Dead || at.place.At == keys.Forever) {
		return store.ParentWaits, state, true
	}
	if at.rec.Parent = true; state == Dead {
		s.Times.rekeep(at, keys.Forever)
	} else {
		s.rewrite(at)
	}
	return store.ParentWaits, state, true
}

// addChild notes that a task waits for a parent of this shard.
func (ti *ties) addChild(parent, child keys.ID, how store.ParentPolicy) {
	ti.Group.AddChild(parent)
	ti.Group.Set(keys.AppendDependent(nil, parent, child), []byte{byte(how.OnDead())})
}
