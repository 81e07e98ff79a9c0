package engine

import (
	"errors"
	"fmt"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Operations on a task by its ID. The task may have any state.

// Alteration is the kind of an operation on a task by its ID.
type Alteration byte

const (
	AlterPriority Alteration = iota
	AlterRunAt
	AlterRedrive
	_ // 3
	AlterCancel
	AlterForget
	AlterMove
	endOfAlterations
)

// alterations has the function of each Alteration.
var alterations = [endOfAlterations]func(s *State, at *located, arg *AlterTo) error{
	AlterPriority: (*State).setPriority,
	AlterRunAt:    (*State).setRunAt,
	AlterRedrive:  (*State).redrive,
	AlterCancel:   func(s *State, at *located, _ *AlterTo) error { return s.cancelUnended(at) },
	AlterForget:   func(s *State, at *located, _ *AlterTo) error { return s.forgetEnded(at) },
	AlterMove:     (*State).moveTo,
}

// Exists reports whether this version knows an alteration.
func (how Alteration) Exists() bool { return how < endOfAlterations && alterations[how] != nil }

// AlterTo has the arguments of an alteration.
type AlterTo struct {
	Arg    uint64         // a priority, or a time, ms
	Queue  string         // the new queue of a task
	Step   string         // the handler of a dead letter runs it, and those after it, again; "": none
	Signal *record.Signal // in place of an alteration
}

// Alter alters a task, or gives it a signal.
func (s *State) Alter(id keys.ID, how Alteration, to AlterTo) (Verdict, error) {
	at, v, err := s.find(id)
	switch {
	case at == nil:
		return v, err
	case to.Signal != nil:
		return Decided, s.signal(at, *to.Signal)
	case s.Ties.isTelling(id):
		return Decided, ErrNoRoom
	}
	return Decided, alterations[how](s, at, &to)
}

func (s *State) setPriority(at *located, to *AlterTo) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	if err := s.Names.hasLanes(1); err != nil {
		return err
	}
	l := s.Names.lane(LaneKey{at.lane.queue.Name, at.lane.Tenant, uint8(to.Arg)})
	s.withdraw(at) // a suspect keeps its place of the slow start
	s.placeAgain(l, at, at.rec.Encode())
	return nil
}

// placeAgain is the opposite of withdraw for a waiting task, which may have another record, or
// another lane of its queue: it waits as before.
func (s *State) placeAgain(l *Lane, at *located, rec []byte) {
	switch at.state {
	case Ready:
		s.Names.place(l, keys.MovedSince(keys.SinceMillis(at.place.At)), at.id, rec)
	case Scheduled:
		if at.rec.Head.IsWait(at.place.At) {
			s.Times.scheduleWait(l, at.id, at.place.At, rec)
		} else {
			s.Times.schedule(l, at.id, at.place.At, rec)
		}
	default:
		s.Ties.blockAgain(l, at, rec)
	}
}

func (s *State) setRunAt(at *located, to *AlterTo) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	runAt := to.Arg
	s.Suspects.freePlace(at.id)
	s.withdraw(at)
	at.rec.RunAt = runAt
	rec := at.rec.Encode()
	switch due := runAt > s.Wall; {
	case at.state == Blocked && (at.place.At == 0 || !due):
		s.Ties.blockAgain(at.lane, at, rec)
	case due:
		s.Times.schedule(at.lane, at.id, runAt, rec)
	default:
		s.enter(at.lane, s.mint.Since(), at.id, &at.rec.Head, rec)
	}
	return nil
}

func (s *State) redrive(at *located, to *AlterTo) error {
	if at.state != Dead {
		return fmt.Errorf("%w: %s is %v, not dead", base.ErrNotFound, keys.FormatID(at.id), at.state)
	}
	if to.Step != "" {
		from := slices.IndexFunc(at.rec.Kept, func(step record.Step) bool { return step.Name == to.Step })
		if from < 0 {
			return &base.Invalid{Field: "RedriveDeadFrom step", Value: to.Step, Limit: "a step of the task"}
		}
		at.rec.Kept = at.rec.Kept[:from]
	}
	if hash := at.rec.Unique; hash != [keys.UniqueLen]byte{} {
		holder, taken := s.Ties.holder(hash)
		if taken && holder != at.id {
			return &Duplicate{Key: at.rec.UniqueKey, ID: holder}
		}
		if !taken {
			s.Ties.takeKeyFrom(at.id, &at.rec.Ties, keys.MintedAt(at.id))
		}
		at.rec.Flags |= record.KeyFlags(at.rec.Flags)
	}
	s.withdraw(at)
	s.Leases.restoreSteps(at.id, &at.rec)
	at.rec.Attempts, at.rec.RunAt, at.rec.Expired, at.rec.HoldsTurn, at.rec.Crashes = 0, 0, false, false, 0
	s.enter(at.lane, s.mint.Since(), at.id, &at.rec.Head, at.rec.Encode())
	return nil
}

// purge deletes a dead letter.
func (s *State) purge(at *located) error {
	s.withdraw(at)
	ties := record.Ties{Parent: at.rec.Parent, Child: at.rec.Child}
	if at.rec.HoldsTurn {
		ties.Group = at.rec.Group
	}
	s.end(at.lane.queue, at.id, &ties, Outcome{State: Canceled})
	return nil
}

// forgetEnded deletes a task that has ended. If its children still need its result, it is deleted
// when the last child has ended.
func (s *State) forgetEnded(at *located) error {
	switch at.state {
	case Dead:
		return s.purge(at)
	case Done, Canceled:
		if v, pinned := s.Ties.pins.counts.Get(at.id); pinned {
			v.Until = min(v.Until, s.periods.Now)
			s.Ties.pins.counts.Put(at.id, v)
			return nil
		}
		s.Times.unkeep(at)
		return nil
	default:
		return fmt.Errorf("%w: %s is %v, and has not ended", base.ErrNotFound, keys.FormatID(at.id), at.state)
	}
}

// errTied is the reason why a task with ties cannot move to another queue: its key, group and limit
// belong to its queue, and its parents and children refer to it by its ID.
var errTied = errors.New("the task is tied to others")

// moveTo replaces a task by a new task in another queue. The new task starts from the beginning. It
// has another ID, because an ID contains the lane.
func (s *State) moveTo(at *located, to *AlterTo) error {
	switch {
	case to.Queue == "" || to.Queue == at.lane.Queue,
		at.state != Ready && at.state != Scheduled && at.state != Dead:
		return notWaiting(at)
	case at.rec.Ties != record.Ties{}:
		return fmt.Errorf("%w: %s", errTied, keys.FormatID(at.id))
	}
	if err := s.Names.hasLanes(1); err != nil {
		return err
	}
	s.Suspects.freePlace(at.id)
	s.withdraw(at)
	s.Names.emit(EventCanceled, at.lane, at.id, at.rec.Attempts, "")
	s.endings.add(at.id, s.Uptime, Canceled, at.rec.Attempts, nil, at.rec.Error)
	s.end(at.lane.queue, at.id, &record.Ties{}, Outcome{State: Canceled, LastError: at.rec.Error, Attempts: int(at.rec.Attempts)})
	rec := at.rec
	if rec.RunAt = 0; at.state == Scheduled {
		if rec.RunAt = at.place.At; at.rec.Head.IsWait(at.place.At) {
			rec.RunAt = s.wallOf(at.place.At)
		}
	}
	rec.Attempts, rec.Leases, rec.Expired, rec.Rewritten, rec.Crashes, rec.Suspect = 0, 0, false, false, 0, false
	rec.RetryFirst = false
	record.ForgetDeath(rec.Headers)
	s.Leases.steps.Delete(&s.Group.Writes, at.id, &rec.Head)
	rec.History, rec.Notes, rec.Kept, rec.Cursors = nil, nil, nil, nil
	t := NewTask{Key: LaneKey{to.Queue, at.lane.Tenant, at.lane.Priority}}
	t.Encode(&rec, make([]byte, 0, rec.MaxSize()))
	s.admit(&t)
	return nil
}

// cancelUnended is cancel for a task that may have ended.
func (s *State) cancelUnended(at *located) error {
	if at.state == Done || at.state == Canceled {
		return notWaiting(at)
	}
	// the canceled task would be kept
	if !s.HasRoom(RoomScarce) && s.Times.retention(at.lane.queue, at.rec.Retention) != 0 {
		return ErrNoRoom
	}
	s.cancel(at)
	return nil
}

// cancel ends a task in any state.
func (s *State) cancel(at *located) {
	retention := s.Times.retention(at.lane.queue, at.rec.Retention)
	gone := at.state == Dead && !at.rec.HoldsTurn // the turn of its group was passed on
	at.rec.HoldsTurn = false
	at.rec.Suspect = false
	s.Suspects.freePlace(at.id)
	if at.lease != nil {
		if s.Broken = s.Leases.noteSteps(at.lease, &at.rec.Head); s.Broken != nil {
			return
		}
		at.lease.goesOn = at.lease.handled && !at.lease.over
		s.unlease(at.lease)
		if !isFirstPlace(at.lane, at.lease.since, at.id) {
			s.unindex(at.id)
		}
		at.rec.Attempts, at.rec.Leases = at.lease.attempts, at.lease.leases
		if retention != 0 {
			s.Leases.noteAttempt(at.lease, &at.rec, attemptEnd{how: EventCanceled})
		}
		s.Leases.canceled.Add(at.lease.receipt())
		if s.Wanted&WantCancels != 0 && at.lease.local {
			s.Effects.Canceled = append(s.Effects.Canceled, CanceledLease{at.lease.receipt(), at.lease.runner})
		}
	} else {
		s.withdraw(at)
	}
	ties := at.rec.Ties
	if retention == 0 {
		s.Leases.steps.Delete(&s.Group.Writes, at.id, &at.rec.Head)
	} else if s.Broken = s.Leases.keepSteps(at.id, &at.rec); s.Broken != nil {
		return
	}
	if retention == 0 {
		s.endings.add(at.id, s.Uptime, Canceled, at.rec.Attempts, nil, at.rec.Error)
	} else {
		s.Times.keep(at.lane.queue, keys.Canceled, at.id, s.retainedUntil(retention), keys.EndedValue{Lane: at.lane.number, At: s.mint.Stamp()}, &at.rec)
	}
	s.Names.emit(EventCanceled, at.lane, at.id, at.rec.Attempts, "")
	if gone {
		ties.Group = 0
	}
	s.end(at.lane.queue, at.id, &ties, Outcome{State: Canceled, LastError: at.rec.Error, Attempts: int(at.rec.Attempts)})
}

// replace gives a waiting task the contents of a new task. The waiting task keeps its ID and its
// children. replace returns false if the task does not wait any more, or has finished a step.
// REQUIRES: the task is not moving, or the group has completed it.
func (s *State) replace(id keys.ID, t *NewTask) bool {
	at := s.findWaiting(id)
	if at == nil || at.rec.Steps > 0 {
		return false
	}
	rec, err := record.Decode(t.Rec)
	if err != nil {
		s.Broken = fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
		return false
	}
	rec.Parents, rec.OnDead, rec.OnMissing = at.rec.Parents, at.rec.OnDead, at.rec.OnMissing
	begun := rec.MaxWait != 0 && at.rec.Leases > 0 // only its contents change: nothing bounds how often
	switch {
	case begun:
		rec.RunAt, rec.Attempts, rec.Error, rec.RetryFirst = at.rec.RunAt, at.rec.Attempts, at.rec.Error, at.rec.RetryFirst
		rec.Expired, rec.Crashes, rec.Suspect = at.rec.Expired, at.rec.Crashes, at.rec.Suspect
	case rec.MaxWait != 0:
		rec.RunAt = min(rec.RunAt, keys.Later(s.mint.Sets.Made(keys.MintedAt(id)), rec.MaxWait))
		fallthrough
	default:
		s.Suspects.freePlace(at.id)
	}
	s.withdraw(at)
	s.Leases.steps.Delete(&s.Group.Writes, id, &at.rec.Head)
	rec.Leases, rec.Rewritten, rec.History, rec.Notes = at.rec.Leases, true, at.rec.History, at.rec.Notes.OnlyLogs()
	rec.Parent = rec.Parent || at.rec.Parent
	l := s.Names.lane(t.Key)
	if v, ok := s.Ties.uniques.Get(t.Tied.Unique); ok {
		s.Ties.freeKey(t.Tied.Unique, v)
	}
	s.Ties.takeKey(id, &t.Tied.Ties)
	b := rec.Encode()
	switch {
	case begun:
		s.placeAgain(l, at, b)
	case at.state == Blocked && at.place.At == 0:
		s.Ties.blockAgain(l, at, b)
	case rec.RunAt > s.Wall:
		s.Times.schedule(l, id, rec.RunAt, b)
	case rec.MaxWait != 0 && at.state == Ready && l == at.lane: // it is not put off among others
		s.enter(l, keys.MovedSince(keys.SinceMillis(at.place.At)), id, &rec.Head, b)
	default:
		s.enter(l, s.mint.Since(), id, &rec.Head, b)
	}
	return true
}

// takeOver takes an idempotency key from a task at work, or one between two steps, if both tasks
// permit that. Its record does not change: with ReleaseOnClaim it does not have HoldsKey.
func (s *State) takeOver(id keys.ID, t *NewTask) bool {
	both := t.Tied.Flags & record.ReleaseOnClaim
	if both == 0 {
		return false
	}
	if ls := s.Leases.byID[id]; ls != nil {
		both &= ls.ties.Flags
	} else if at := s.findWaiting(id); at == nil || at.rec.Steps == 0 {
		return false
	} else {
		both &= at.rec.Flags
	}
	v, ok := s.Ties.uniques.Get(t.Tied.Unique)
	if ok = ok && both != 0; ok {
		s.Ties.freeKey(t.Tied.Unique, v)
	}
	return ok
}

// findWaiting looks up a task for a new one with its key; nil: the task does not wait. The new one
// may be its follow-up, so that it is moving.
func (s *State) findWaiting(id keys.ID) *located {
	if s.Leases.isMoving(id) {
		return nil
	}
	at, err := s.locate(id)
	if s.fails(err) || at == nil || !at.waiting() {
		return nil
	}
	return at
}

func notWaiting(at *located) error {
	return fmt.Errorf("%w: %s is %v", base.ErrNotWaiting, keys.FormatID(at.id), at.state)
}

// signal gives a signal to an unended task. If the task waits for it, it goes on; otherwise the
// signal lies beside its record until the task waits for it.
func (s *State) signal(at *located, signal record.Signal) error {
	switch {
	case at.lease == nil && !at.waiting():
		return fmt.Errorf("%w: %s is %v, and has ended", base.ErrNotFound, keys.FormatID(at.id), at.state)
	case s.Format < keys.FormatOfSteps:
		return s.Leases.noSteps()
	}
	signals, last, err := s.Leases.signalsOf(at)
	if s.fails(err) {
		return nil
	}
	if signals.Find(signal.Name) != nil {
		return &Duplicate{Signal: signal.Name, ID: at.id}
	}
	signal.At = s.mint.Now()
	if signals = append(signals, signal); signals.Sound() != nil {
		return &base.Invalid{
			Field: "signals of a task", Value: fmt.Sprintf("%d of %d bytes", len(signals), signals.Size()),
			Limit: fmt.Sprintf("at most %d of %d bytes", record.MaxSignals, record.MaxSignalBytes),
		}
	}
	steps, h := &s.Leases.steps, &at.rec.Head
	before := h.Beside
	h.Beside |= record.HasSignals
	if last.Kind == record.StepNoSignal && last.Name == signal.Name {
		h.Beside &^= record.Awaits
		last.Kind, last.At = record.StepSignal, signal.At
		last.Result, _ = signals.Take(signal.Name)
		steps.Add(&s.Group.Writes, at.id, h.Steps-1, &last)
	}
	steps.SetSignals(&s.Group.Writes, at.id, signals)
	switch {
	case at.lease != nil:
		s.Leases.stepsOf[at.id] = leaseSteps{int32(h.Steps), h.Beside}
	case before&^h.Beside != 0 && at.state == Scheduled:
		s.resumeTask(at)
	case before != h.Beside:
		s.rewrite(at)
	}
	return nil
}

// BulkAlteration is an alteration of many tasks.
type BulkAlteration struct {
	IDs []keys.ID
	How Alteration
	AlterTo
	States record.StateSet // a task is left out unless it is in one of them
	Next   int             // index in IDs of the next one
	N      int             // how many were altered
	Failed int             // how many were refused, though their state is right
	last   bucketKey
}

// AlterMany continues a BulkAlteration. It leaves out tasks in other states than its own.
func (s *State) AlterMany(b *BulkAlteration) (Verdict, error) {
	for ; b.Next < len(b.IDs) && s.Broken == nil; b.Next++ {
		id := b.IDs[b.Next]
		if s.Ties.isBehind(id) || s.Spent() {
			return Again, nil
		}
		var at *located
		var err error
		if b.States == record.SetOf(Dead) {
			at, err = s.locateDead(id, &b.last)
		} else {
			at, err = s.locate(id)
		}
		if s.fails(err) {
			break
		}
		if at == nil || !b.States.Has(at.state) {
			continue
		}
		if s.Ties.isTelling(id) {
			return Decided, ErrNoRoom
		}
		err = alterations[b.How](s, at, &b.AlterTo)
		switch {
		case err == nil:
			b.N++
		case errors.Is(err, ErrNoRoom), errors.Is(err, ErrNoLanes):
			return Decided, err
		case !errors.Is(err, base.ErrNotWaiting):
			b.Failed++
		}
	}
	return Decided, nil
}
