package engine

import (
	"fmt"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/window"
)

// The life of a task. Each arrow is one function of this file, which verbs and upkeep call.
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

// admit takes in a new task.
func (s *State) admit(t *NewTask) keys.ID {
	l := s.lane(t.Key)
	id := s.mint.id(l.number)
	s.emit(EventProduced, l, id, 0, "")
	if t.RunAt > s.Wall {
		s.schedule(l, id, t.RunAt, t.Rec)
		return id
	}
	s.placeFirst(l, id, t.Rec)
	return id
}

// placeFirst makes a task ready in its first place, a key that has not been written before.
func (s *State) placeFirst(l *Lane, id keys.ID, rec []byte) {
	since := keys.SinceOf(keys.ID(id))
	s.Group.setNew(l.number, since, id, rec)
	s.ready(l, window.Item{Pos: window.Pos{Since: since, ID: id}, Record: rec})
}

// ready counts a task as ready and offers it to claims; its record is in the group.
func (s *State) ready(l *Lane, it window.Item) {
	l.queue.Counts.Ready++
	s.touch(l.queue)
	before := l.spilled
	if s.cache(l, it); before < deepLane && l.spilled >= deepLane {
		s.Store.AddDeepLane(l.number)
	}
	s.joinRing(l)
	s.feed(l.queue)
}

// cache adds a ready task to its lane's window if it belongs there, and memory has room for it.
func (s *State) cache(l *Lane, it window.Item) {
	if !l.reaches(it.Pos) {
		l.weigh(len(it.Record))
		return // on disk, where the window reaches it later
	}
	w := &l.window
	last := w.IsLast(it.Pos)
	if l.complete && last && (w.Len() >= s.config.WindowTasks || !s.windows.admits(l, cap(it.Record))) {
		l.spill(it.Pos, len(it.Record))
		return
	}
	before := w.Footprint()
	if last {
		w.Append(it)
	} else {
		w.Insert(it)
	}
	if w.Len() > s.config.WindowTasks {
		last := w.PopLast()
		l.spill(last.Pos, len(last.Record))
	}
	s.windows.resized(l, before)
	s.windows.shrink()
}

// place moves a task into its lane, at since.
func (s *State) place(l *Lane, since uint64, id keys.ID, rec []byte) {
	s.Group.setTask(l.number, since, id, rec)
	p := keys.Place{Range: keys.Task, Group: l.number, At: since}
	if isFirstPlace(l, since, id) {
		s.unindex(id)
		s.Group.put(id, l, p, rec)
	} else {
		s.setIndex(id, l, p, rec)
	}
	s.ready(l, window.Item{Pos: window.Pos{Since: since, ID: id}, Record: rec})
}

// isFirstPlace reports whether a task that is in a lane needs no index entry.
func isFirstPlace(l *Lane, since uint64, id keys.ID) bool {
	return keys.IsFirstPlace(since) && l.number == keys.LaneOf(id)
}

// enter makes a task ready whose time has come, or makes it wait for its turn in its group.
func (s *State) enter(l *Lane, since uint64, id keys.ID, group uint64, rec []byte) {
	if group != 0 && !s.takeTurn(group, id) {
		s.block(l, group, id, rec)
		return
	}
	s.place(l, since, id, rec)
}

// proceed lets a task go on that was waiting for its parents.
func (s *State) proceed(l *Lane, id keys.ID, head *record.Head, rec []byte) {
	if head.RunAt > s.Wall {
		s.schedule(l, id, head.RunAt, rec)
		return
	}
	s.enter(l, keys.SinceOf(keys.ID(id)), id, head.Group, rec)
}

// schedule adds a task to those that wait for their time.
func (s *State) schedule(l *Lane, id keys.ID, due uint64, rec []byte) {
	s.scratch = keys.AppendScheduled(s.scratch[:0], due, id)
	s.Group.set(s.scratch, s.withLane(l, rec))
	s.setIndex(id, l, keys.Place{Range: keys.Scheduled, At: due}, rec)
	l.queue.Counts.Scheduled++
	s.touch(l.queue)
	s.nextDue.lower(due, id)
}

// Grant is a lease as the claimer sees it.
type Grant struct {
	Receipt Receipt
	*LaneKey
	Attempt  uint32
	Deadline uint64 // wall clock, ms
	Rec      []byte
}

// Holder is the holder of a lease.
type Holder struct {
	Local  bool   // the lease ends with the process
	Runner uint32 // the owner's number, which CanceledLease returns
}

// CanceledLease is a lease that ended because its task was canceled.
type CanceledLease struct {
	Receipt
	Runner uint32
}

// Grant leases the first task of a lane's window for duration ms, and adds the lease to grants.
// REQUIRES: the window is not empty.
func (s *State) Grant(l *Lane, duration uint64, to Holder, grants []Grant) ([]Grant, error) {
	ls := s.leases.newLease()
	ls.leases, ls.attempts, ls.duration = 1, 1, duration
	it := s.popFirst(l)
	if _, plain := record.Plain(it.Record); !plain {
		head, err := record.DecodeHead(it.Record)
		if err != nil {
			return grants, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(it.ID), err)
		}
		if head.Lease != 0 && !to.Local {
			ls.duration = head.Lease
		}
		ls.leases, ls.attempts = head.Leases+1, head.Attempts+1
		ls.rewritten, ls.retention = head.Rewritten, head.Retention
		s.tieLease(ls, &head)
	}
	s.noteRead(len(it.Record))
	ls.id, ls.lane, ls.since, ls.local, ls.runner = it.ID, l, it.Since, to.Local, to.Runner
	s.addToRecord(ls, 0)
	s.leases.add(ls, s.Now+ls.duration)
	s.leases.copyRecord(ls, it.Record)
	s.emit(EventClaimed, l, ls.id, ls.attempts, "")
	q := l.queue
	s.turn(l)
	q.Counts.Ready--
	q.Counts.Leased++
	s.touch(q)
	return append(grants, Grant{
		Receipt:  ls.receipt(),
		LaneKey:  &l.LaneKey,
		Attempt:  ls.attempts,
		Deadline: s.Wall + ls.duration,
		Rec:      it.Record,
	}), nil
}

// popFirst takes the first task out of a lane's window.
func (s *State) popFirst(l *Lane) window.Item {
	before := l.window.Footprint()
	it := l.window.PopFirst()
	l.used = true
	s.windows.resized(l, before)
	l.trail.take(it.Since)
	s.consumed(l, len(it.Record))
	return it
}

// tieLease copies a task's ties to its lease.
func (s *State) tieLease(ls *lease, head *record.Head) {
	ls.ties, ls.tied = head.Ties, head.Ties != record.Ties{}
	if head.Limit != 0 {
		s.limits.enter(head.Limit)
	}
}

// endLease ends a lease. The task's record stays where it is.
func (s *State) endLease(ls *lease) {
	s.removeFromRecord(ls)
	s.leases.remove(ls)
	s.noteIdle(ls.lane)
	if ls.lane.trail.ripe() >= s.config.TrimLane {
		s.trimSoon(ls.lane)
	}
	q := ls.lane.queue
	q.Counts.Leased--
	s.touch(q)
	if ls.tied && ls.ties.Limit != 0 {
		s.leaveLimit(q, ls.ties.Limit)
	}
	s.free(q)
}

// unlease ends a lease and removes the task from its lane, to move it elsewhere. A task in its
// first place and on its first lease has never been rewritten there, unless its record says so;
// giveBack rewrites it.
func (s *State) unlease(ls *lease) {
	s.endLease(ls)
	once := keys.IsFirstPlace(ls.since) && ls.leases == 1 && !ls.rewritten
	s.removeTask(ls.lane.number, ls.since, ls.id, once)
}

// removeTask takes a task from its place in a lane.
func (s *State) removeTask(lane uint32, since uint64, id keys.ID, once bool) {
	if !once {
		s.Group.change(id)
	}
	s.Group.removeTask(lane, since, id, once)
}

// complete finishes a task. Its record is read only if it is kept.
func (s *State) complete(ls *lease, result []byte) error {
	retention := s.retention(ls.lane.queue, ls.retention)
	var rec record.Record
	if retention != 0 {
		var err error
		if rec, err = s.recordOf(ls); err != nil {
			return err
		}
		rec.Attempts, rec.Leases = ls.attempts, ls.leases
	}
	s.emit(EventCompleted, ls.lane, ls.id, ls.attempts, "")
	s.unlease(ls)
	if !isFirstPlace(ls.lane, ls.since, ls.id) {
		s.unindex(ls.id)
	}
	if retention != 0 {
		until := BucketOf(s.Wall, retention)
		if ls.ties.Parent {
			until = s.pinForChildren(ls.id, until)
		}
		s.keep(ls.lane.queue, keys.Done, ls.id, until, keys.EndedValue{Lane: ls.lane.number, At: s.Wall, Result: result}, &rec)
	}
	if ls.tied || s.Wanted&WantOutcomes != 0 {
		s.end(ls.lane.queue, ls.id, &ls.ties, Outcome{State: Done, Result: result, Attempts: int(ls.attempts)})
	}
	return nil
}

// retention returns how long a completed or canceled task is kept, in ms: as the task says, or else
// its queue, or else the options.
func (s *State) retention(q *Queue, task int64) int64 {
	if task == 0 {
		task = record.Retention(q.Settings.Retention)
	}
	if task == 0 {
		task = record.Retention(s.config.Retention)
	}
	return task
}

// end is the last step of a task that is completed, dead or canceled: tasks that are tied to it go
// on.
func (s *State) end(q *Queue, id keys.ID, t *record.Ties, o Outcome) {
	if t.Unique != [keys.UniqueLen]byte{} {
		var release uint8
		switch o.State {
		case Done:
			release = record.ReleaseOnComplete
		case Dead:
			release = record.ReleaseOnDead
		}
		s.endKey(id, t, release)
	}
	if t.Group != 0 {
		s.passTurn(q, t.Group, id)
	}
	if t.Parent {
		s.tellChildren(id, o.State)
	}
	if t.Child && o.State != Dead {
		s.releaseParents(id, 0)
	}
	if s.Wanted&WantOutcomes != 0 {
		s.Effects.Endings = append(s.Effects.Endings, Ending{id, o})
	}
}

// attemptEnd is how the attempt of a lease ends when the task stays.
type attemptEnd struct {
	counted bool
	cause   string // kept with the task; "" keeps the last one
}

// finishAttempt reads the record of a leased task and adds the result of the attempt.
func (s *State) finishAttempt(ls *lease, end attemptEnd) (record.Record, error) {
	rec, err := s.recordOf(ls)
	if err != nil {
		return rec, err
	}
	rec.Leases = ls.leases
	if end.counted {
		rec.Attempts = ls.attempts
	}
	if end.cause != "" {
		rec.Error = clip(end.cause)
	}
	return rec, nil
}

// retry ends a counted attempt: the task is tried again after a wait, or becomes a dead letter when
// it has no attempts left. A negative wait stands for the backoff of the options.
func (s *State) retry(ls *lease, cause string, wait int64) error {
	rec, err := s.finishAttempt(ls, attemptEnd{counted: true, cause: cause})
	if err != nil {
		return err
	}
	if s.exhausted(&rec) {
		s.toDeadLetter(ls, &rec)
		return nil
	}
	if wait < 0 {
		wait = int64(record.Millis(s.config.Backoff(int(rec.Attempts), s.mint.rand.Float64())))
	}
	s.emit(EventRetried, ls.lane, ls.id, rec.Attempts, rec.Error)
	s.postpone(ls, &rec, uint64(wait))
	return nil
}

func (s *State) exhausted(rec *record.Record) bool {
	limit := rec.MaxAttempts
	if limit == 0 {
		limit = uint32(s.config.MaxAttempts)
	}
	return rec.Attempts >= limit
}

// postpone returns a leased task that has to wait. Without a wait it becomes ready now, behind the
// tasks that are ready already.
func (s *State) postpone(ls *lease, rec *record.Record, wait uint64) {
	s.unlease(ls)
	if wait == 0 {
		s.place(ls.lane, s.mint.since(), ls.id, rec.Encode())
		return
	}
	s.schedule(ls.lane, ls.id, s.Wall+wait, rec.Encode())
}

// giveBack returns a leased task to its place in its lane: its record is rewritten there.
func (s *State) giveBack(ls *lease, rec *record.Record) {
	s.endLease(ls)
	b := rec.Encode()
	s.Group.put(ls.id, ls.lane, keys.Place{Range: keys.Task, Group: ls.lane.number, At: ls.since}, b)
	s.Group.setTask(ls.lane.number, ls.since, ls.id, b)
	s.ready(ls.lane, window.Item{Pos: window.Pos{Since: ls.since, ID: ls.id}, Record: b})
}

// toDeadLetter makes a leased task a dead letter. One for which its children or its group wait is
// kept until somebody redrives, purges or cancels it.
func (s *State) toDeadLetter(ls *lease, rec *record.Record) {
	s.emit(EventDeadLettered, ls.lane, ls.id, rec.Attempts, rec.Error)
	s.unlease(ls)
	if !isFirstPlace(ls.lane, ls.since, ls.id) {
		s.unindex(ls.id)
	}
	set, ties := ls.lane.queue.Settings, ls.ties
	if rec.HoldsTurn = set.HoldGroups && ties.Group != 0; rec.HoldsTurn {
		ties.Group = 0
	}
	retention := record.Retention(set.DeadRetention)
	if retention == 0 || rec.Parent || rec.HoldsTurn {
		retention = -1
	}
	until := BucketOf(s.Wall, retention)
	s.keep(ls.lane.queue, keys.Dead, ls.id, until, keys.EndedValue{Lane: ls.lane.number, At: s.Wall}, rec)
	if rec.Child && until != keys.Forever {
		s.releaseParents(ls.id, until)
	}
	s.end(ls.lane.queue, ls.id, &ties, Outcome{State: Dead, LastError: rec.Error, Attempts: int(rec.Attempts)})
}

// expire takes back a task whose lease has expired: the attempt counts. The task keeps its place in
// the lane, so that a restart does not delay it. But one whose workers hang would hold up the
// others: the second time it goes behind them.
func (s *State) expire(ls *lease) {
	rec, err := s.finishAttempt(ls, attemptEnd{counted: true, cause: "lease expired"})
	if err != nil {
		s.Broken = err
		return
	}
	s.emit(EventExpired, ls.lane, ls.id, rec.Attempts, "")
	if s.exhausted(&rec) {
		s.toDeadLetter(ls, &rec)
		return
	}
	if ls.over {
		s.giveBack(ls, &rec)
		return
	}
	hung := rec.Expired
	if rec.Expired = true; hung {
		s.postpone(ls, &rec, 0)
		return
	}
	s.giveBack(ls, &rec)
}

// promote moves on a scheduled task whose time has come. key is where it was found.
func (s *State) promote(key []byte, due uint64, id keys.ID, l *Lane, rec []byte) error {
	head, err := record.DecodeHead(rec)
	if err != nil {
		return err
	}
	s.Group.delete(key)
	s.notePromoted(len(rec))
	l.queue.Counts.Scheduled--
	s.touch(l.queue)
	s.enter(l, s.mint.sinceDue(due, s.Wall), id, head.Group, rec)
	return nil
}

// cancel ends a task in any state.
func (s *State) cancel(at *located) {
	retention := s.retention(at.lane.queue, at.rec.Retention)
	gone := at.state == Dead && !at.rec.HoldsTurn // the turn of its group was passed on
	at.rec.HoldsTurn = false
	if at.lease != nil {
		s.unlease(at.lease)
		if !isFirstPlace(at.lane, at.lease.since, at.id) {
			s.unindex(at.id)
		}
		at.rec.Attempts, at.rec.Leases = at.lease.attempts, at.lease.leases
		s.canceled.Add(at.lease.receipt())
		if s.Wanted&WantCancels != 0 && at.lease.local {
			s.Effects.Canceled = append(s.Effects.Canceled, CanceledLease{at.lease.receipt(), at.lease.runner})
		}
	} else {
		s.withdraw(at)
	}
	ties := at.rec.Ties
	if retention != 0 {
		s.keep(at.lane.queue, keys.Canceled, at.id, BucketOf(s.Wall, retention), keys.EndedValue{Lane: at.lane.number, At: s.Wall}, &at.rec)
	}
	s.emit(EventCanceled, at.lane, at.id, at.rec.Attempts, "")
	if gone {
		ties.Group = 0
	}
	s.end(at.lane.queue, at.id, &ties, Outcome{State: Canceled, LastError: at.rec.Error, Attempts: int(at.rec.Attempts)})
}

// withdraw removes a task that is not leased from its place. When its record is stored again, it
// says that its first place has been used.
func (s *State) withdraw(at *located) {
	q := at.lane.queue
	s.Group.change(at.id)
	switch at.state {
	case Ready:
		pos := window.Pos{Since: at.place.At, ID: at.id}
		before := at.lane.window.Footprint()
		at.lane.window.Remove(pos)
		s.windows.resized(at.lane, before)
		s.Group.removeTask(at.lane.number, at.place.At, at.id, false)
		s.noteIdle(at.lane)
		s.consumed(at.lane, len(at.rec.Payload))
		q.Counts.Ready--
		if at.rec.Limit != 0 {
			s.passLimit(q, at.rec.Limit)
		}
	case Scheduled:
		s.Group.delete(at.place.AppendKey(nil, at.id))
		q.Counts.Scheduled--
	case Blocked:
		s.Group.delete(at.place.AppendKey(nil, at.id))
		s.cursors.forget(at.place.At)
		q.Counts.Blocked--
		if at.place.At == 0 {
			s.pending.drop(s, at.id)
			// it may have been the last task that used the limit
		} else if st := s.limits[at.place.At]; st != nil && st.leased == 0 {
			s.passLimit(q, at.place.At)
		}
	case Dead:
		s.unkeep(at)
	}
	s.touch(q)
	if at.indexed {
		s.unindex(at.id)
	}
	at.rec.Rewritten = true
}

// setIndex stores the place of a task that is not in its first place. The group keeps rec.
func (s *State) setIndex(id keys.ID, l *Lane, p keys.Place, rec []byte) {
	var key [1 + keys.IDLen]byte
	var value [keys.PlaceLen]byte
	s.Group.put(id, l, p, rec)
	s.Group.set(keys.AppendByID(key[:0], keys.Index, id), p.Append(value[:0]))
}

func (s *State) unindex(id keys.ID) {
	var key [1 + keys.IDLen]byte
	s.Group.change(id)
	s.Group.delete(keys.AppendByID(key[:0], keys.Index, id))
}

// withLane prefixes a record with its lane, for places whose keys do not contain it. The result is
// valid until the next call.
func (s *State) withLane(l *Lane, rec []byte) []byte {
	s.value = append(keys.AppendLaneNumber(s.value[:0], l.number), rec...)
	return s.value
}

// touch adds the counts of a queue to what the group stores.
func (s *State) touch(q *Queue) {
	if !q.touched {
		q.touched = true
		s.Group.Touched = append(s.Group.Touched, q)
	}
}

// MaxCause limits the text of an error that is kept with a task, in bytes.
const MaxCause = 8 << 10

func clip(text string) string {
	if len(text) <= MaxCause {
		return text
	}
	n := MaxCause
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

// replace gives a waiting task the contents of a new one; its ID stays, and so do the tasks that
// wait for it. It returns false if the task does not wait any more.
// REQUIRES: the task is not moving, or the group has completed it.
func (s *State) replace(id keys.ID, t *NewTask) bool {
	if s.isMoving(id) { // t is its follow-up
		return false
	}
	at, err := s.locate(id)
	if err != nil {
		s.Broken = err
		return false
	}
	if at == nil || !at.waiting() {
		return false
	}
	rec, err := record.Decode(t.Rec)
	if err != nil {
		s.Broken = fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
		return false
	}
	rec.Parents, rec.OnDead = at.rec.Parents, at.rec.OnDead
	s.withdraw(at)
	rec.Leases, rec.Rewritten = at.rec.Leases, true
	rec.Parent = rec.Parent || at.rec.Parent
	l := s.lane(t.Key)
	if v, ok := s.uniques.get(s, t.Tied.Unique); ok {
		s.freeKey(t.Tied.Unique, v)
	}
	s.takeKey(id, &t.Tied.Ties, max(s.Wall, mintedAt(id)))
	b := rec.Encode()
	switch {
	case at.state == Blocked && at.place.At == 0:
		s.blockAgain(l, at, b)
	case rec.RunAt > s.Wall:
		s.schedule(l, id, rec.RunAt, b)
	default:
		s.enter(l, s.mint.since(), id, rec.Group, b)
	}
	return true
}

// recordOf returns the record of a leased task. It is valid until the next lease is granted, or the
// record is rewritten.
func (s *State) recordOf(ls *lease) (record.Record, error) {
	var b []byte
	var err error
	if len(ls.copied) > 0 {
		b = ls.copied
	} else if t := s.Group.find(ls.id); t != nil {
		b = t.rec
	} else {
		s.scratch = keys.AppendTask(s.scratch[:0], ls.lane.number, ls.since, ls.id)
		if b, err = s.read(s.scratch); err == nil && b == nil {
			err = fmt.Errorf("%w: key %x is missing", base.ErrCorrupt, s.scratch)
		}
	}
	if err != nil {
		return record.Record{}, fmt.Errorf("record of leased task %s: %w", keys.FormatID(ls.id), err)
	}
	rec, err := record.Decode(b)
	if err != nil {
		return record.Record{}, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(ls.id), err)
	}
	return rec, nil
}

// blockAgain returns a task to the scope from which it was withdrawn.
func (s *State) blockAgain(l *Lane, at *located, rec []byte) {
	if at.place.At == 0 && at.pending > 0 {
		s.pending.put(s, at.id, at.pending)
	}
	s.block(l, at.place.At, at.id, rec)
}

func (s *State) setPriority(at *located, priority uint64) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	if err := s.hasLanes(1); err != nil {
		return err
	}
	l := s.lane(LaneKey{at.lane.queue.Name, at.lane.Tenant, uint8(priority)})
	s.withdraw(at)
	rec := at.rec.Encode()
	switch at.state {
	case Ready:
		s.place(l, keys.MovedSince(keys.SinceMillis(at.place.At)), at.id, rec)
	case Scheduled:
		s.schedule(l, at.id, at.place.At, rec)
	default:
		s.blockAgain(l, at, rec)
	}
	return nil
}

func (s *State) setRunAt(at *located, runAt uint64) error {
	if !at.waiting() {
		return notWaiting(at)
	}
	s.withdraw(at)
	at.rec.RunAt = runAt
	rec := at.rec.Encode()
	switch due := runAt > s.Wall; {
	case at.state == Blocked && (at.place.At == 0 || !due):
		s.blockAgain(at.lane, at, rec)
	case due:
		s.schedule(at.lane, at.id, runAt, rec)
	default:
		s.enter(at.lane, s.mint.since(), at.id, at.rec.Group, rec)
	}
	return nil
}

func (s *State) redrive(at *located) error {
	if at.state != Dead {
		return notDead(at)
	}
	if hash := at.rec.Unique; hash != [keys.UniqueLen]byte{} {
		holder, taken := s.holder(hash)
		if taken && holder != at.id {
			return &Duplicate{Key: at.rec.UniqueKey, ID: holder}
		}
		if !taken {
			s.takeKey(at.id, &at.rec.Ties, mintedAt(at.id))
		}
		at.rec.Flags |= record.HoldsKey
	}
	s.withdraw(at)
	at.rec.Attempts, at.rec.RunAt, at.rec.Expired, at.rec.HoldsTurn = 0, 0, false, false
	s.enter(at.lane, s.mint.since(), at.id, at.rec.Group, at.rec.Encode())
	return nil
}

func (s *State) purge(at *located) error {
	if at.state != Dead {
		return notDead(at)
	}
	s.withdraw(at)
	ties := record.Ties{Parent: at.rec.Parent, Child: at.rec.Child}
	if at.rec.HoldsTurn {
		ties.Group = at.rec.Group
	}
	s.end(at.lane.queue, at.id, &ties, Outcome{State: Canceled})
	return nil
}

func notWaiting(at *located) error {
	return fmt.Errorf("%w: %s is %v", base.ErrNotWaiting, keys.FormatID(at.id), at.state)
}

func notDead(at *located) error {
	return fmt.Errorf("%w: %s is %v, not dead", base.ErrNotFound, keys.FormatID(at.id), at.state)
}

// isRewritten reports whether the group rewrites the record of a leased task, or adds children to
// it.
func (s *State) isRewritten(id keys.ID) bool {
	_, ok := s.Group.changed[id]
	return ok || s.Group.hasChildren(id)
}
