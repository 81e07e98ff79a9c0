package engine

import (
	"cmp"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/record"
)

// How an attempt of a task begins, with Grant, and ends: with its completion, another try, a dead
// letter, or the expiry of its lease.

// attemptEnd is how the attempt of a lease ends when the task stays.
type attemptEnd struct {
	how     EventKind
	counted bool
	suspect bool           // a suspect stays one
	policy  *record.Policy // of the handler; nil: it has none
	cause   string         // kept with the task; "" keeps the last one
}

// complete finishes a task. Its record is read only if it is kept.
func (s *State) complete(ls *lease, result []byte) error {
	if retention := s.Times.retention(ls.lane.queue, ls.retention); retention == 0 {
		if err := s.Leases.dropSteps(ls); err != nil {
			return err
		}
		s.finish(ls)
		s.endings.add(ls.id, s.Uptime, Done, ls.attempts, result, "")
	} else if err := s.finishAndKeep(ls, retention, result); err != nil {
		return err
	}
	if ls.tied || s.Wanted&WantOutcomes != 0 {
		s.end(ls.lane.queue, ls.id, &ls.ties, Outcome{State: Done, Result: result, Attempts: int(ls.attempts)})
	}
	return nil
}

// finish ends the lease of a completed task, and removes the task.
func (s *State) finish(ls *lease) {
	s.Names.emit(EventCompleted, ls.lane, ls.id, ls.attempts, "")
	s.unlease(ls)
	if !isFirstPlace(ls.lane, ls.since, ls.id) {
		s.unindex(ls.id)
	}
}

// finishAndKeep is finish for a task that is kept for a while.
func (s *State) finishAndKeep(ls *lease, retention int64, result []byte) error {
	rec, err := s.Leases.recordOf(ls)
	if err != nil {
		return err
	}
	if err = s.Leases.noteSteps(ls, &rec.Head); err == nil {
		err = s.Leases.keepSteps(ls.id, &rec)
	}
	if err != nil {
		return err
	}
	rec.Attempts, rec.Leases, rec.Suspect = ls.attempts, ls.leases, false
	rec.Retention, rec.RetryFirst = ls.retention, false
	s.Leases.noteAttempt(ls, &rec, attemptEnd{how: EventCompleted})
	s.finish(ls)
	until := s.retainedUntil(retention)
	if ls.ties.Parent {
		until = s.Ties.pinForChildren(ls.id, until)
	}
	s.Times.keep(ls.lane.queue, keys.Done, ls.id, until, keys.EndedValue{Lane: ls.lane.number, At: s.mint.Stamp(), Result: result}, &rec)
	return nil
}

// finishAttempt reads the record of a leased task and adds the result of the attempt.
func (le *leases) finishAttempt(ls *lease, end attemptEnd) (record.Record, error) {
	rec, err := le.recordOf(ls)
	if err == nil {
		err = le.noteSteps(ls, &rec.Head)
	}
	if err != nil {
		return rec, err
	}
	rec.Leases = ls.leases
	if end.counted {
		rec.Attempts = ls.attempts
	}
	rec.Suspect = rec.Suspect && end.suspect
	if end.cause != "" {
		rec.Error = record.Clip(end.cause, record.MaxCause)
	}
	rec.RetryFirst = false
	if end.how == EventRetried && le.config.exhausted(ls, &rec, end.policy) {
		end.how = EventDeadLettered
	}
	le.noteAttempt(ls, &rec, end)
	return rec, nil
}

// retry ends a counted attempt: the task is tried again after a wait, or becomes a dead letter when
// it has no attempts left. A negative wait stands for the backoff. policy is that of the handler;
// nil: it has none.
func (s *State) retry(ls *lease, policy *record.Policy, cause string, wait int64) error {
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: EventRetried, counted: true, policy: policy, cause: cause})
	if err != nil {
		return err
	}
	if s.config.exhausted(ls, &rec, policy) {
		s.toDeadLetter(ls, &rec)
		return nil
	}
	queue := &ls.lane.queue.Settings.Policy
	if policy == nil {
		policy = queue
	}
	if wait < 0 {
		wait = int64(record.Millis(s.backoff(int(rec.Attempts), policy, queue)))
	}
	s.Names.emit(EventRetried, ls.lane, ls.id, rec.Attempts, rec.Error)
	rec.RetryFirst = (policy.RetryFirst || queue.RetryFirst) && s.Format >= keys.FormatOfSteps
	s.postpone(ls, &rec, uint64(wait))
	return nil
}

// backoff returns the wait after an attempt, by the first policy that sets it, or the options.
func (s *State) backoff(attempt int, policies ...*record.Policy) time.Duration {
	chance := s.mint.Rand.Float64()
	for _, p := range policies {
		if wait, ok := p.Delay(attempt, chance); ok {
			return wait
		}
	}
	return s.config.Backoff(attempt, chance)
}

// exhausted reports whether a task has no attempt left.
func (c *Config) exhausted(ls *lease, rec *record.Record, policy *record.Policy) bool {
	most := c.maxAttempts(ls, rec, policy)
	return rec.Attempts >= most || crashedTooOften(rec, most)
}

// maxAttempts returns how often a task is tried: by itself, its handler, its queue, or the options.
func (c *Config) maxAttempts(ls *lease, rec *record.Record, handler *record.Policy) uint32 {
	queue := &ls.lane.queue.Settings.Policy
	if handler == nil {
		handler = queue
	}
	return cmp.Or(rec.MaxAttempts, uint32(handler.MaxAttempts), uint32(queue.MaxAttempts), uint32(c.MaxAttempts))
}

// postpone returns a leased task that has to wait. Without a wait it becomes ready now, behind the
// tasks that are ready already, or before them.
func (s *State) postpone(ls *lease, rec *record.Record, wait uint64) {
	s.unlease(ls)
	if wait == 0 {
		since := s.mint.Since()
		if rec.RetryFirst {
			since = keys.FrontSince(ls.id)
		}
		s.Names.place(ls.lane, since, ls.id, rec.Encode())
		return
	}
	s.Times.scheduleWait(ls.lane, ls.id, s.after(wait), rec.Encode())
}

// The shortest and the longest wait of a task that no handler knows, ms.
const minUnhandled, maxUnhandled = 1000, 60_000

// unhandled postpones a leased task without a handler for as long as it has gone without one so
// far. If that is bound ms or more, it becomes a dead letter; 0: never.
func (s *State) unhandled(ls *lease, bound uint64, cause string) error {
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: eventUnhandled})
	if err != nil {
		return err
	}
	rec.Attempts = ls.attempts - 1 // also if it is overdue
	q := ls.lane.queue
	s.Names.touch(q)
	q.totals.All[keys.Unhandled]++
	q.totals.OfDay[keys.Unhandled]++
	if s.Wanted>>eventUnhandled&1 != 0 {
		s.collect(eventUnhandled, ls.lane, ls.id, rec.Attempts, "")
	}
	last := rec.History.Last()
	waited := last.End - last.Start
	if bound > 0 && waited >= bound {
		last.Become(uint8(EventDeadLettered), cause)
		rec.Error = record.Clip(cause, record.MaxCause)
		s.toDeadLetter(ls, &rec)
		return nil
	}
	wait := min(max(waited, minUnhandled), maxUnhandled)
	if bound > 0 {
		wait = min(wait, bound-waited)
	}
	s.postpone(ls, &rec, wait)
	return nil
}

// causeOverdue is the error of a task with a handler that was still running after the Timeout.
const causeOverdue = "handler still running after its timeout"

// countOverdue counts the attempt of a running lease in the record of the task. So the attempt
// counts however the lease ends, even if the process dies.
func (s *State) countOverdue(ls *lease) error {
	rec, err := s.Leases.recordOf(ls)
	if err != nil || ls.overdue {
		return err
	}
	ls.overdue, rec.Attempts = true, ls.attempts
	place := keys.Place{Range: keys.Task, Group: ls.lane.number, At: ls.since}
	s.rewrite(&located{id: ls.id, lane: ls.lane, place: place, rec: rec, lease: ls})
	return nil
}

// giveBack writes a leased task to its place in its lane. A suspect waits for its start.
func (s *State) giveBack(ls *lease, rec *record.Record) {
	s.Suspects.freePlace(ls.id)
	s.endLease(ls)
	if rec.Suspect {
		rec.Rewritten = true
		s.removeTask(ls.lane.number, ls.since, ls.id, false)
		s.Suspects.hold(ls.lane, ls.id, rec.Leases, rec.Encode())
		return
	}
	b := rec.Encode()
	s.Group.Put(ls.id, ls.lane, keys.Place{Range: keys.Task, Group: ls.lane.number, At: ls.since}, b)
	s.Group.SetTask(ls.lane.number, ls.since, ls.id, b)
	s.Names.offer(ls.lane, ready.Item{Pos: ready.Pos{Since: ls.since, ID: ls.id}, Record: b})
}

// returnTask gives a task back. The attempt does not count.
func (s *State) returnTask(ls *lease, cause string) {
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: EventReleased, suspect: true, cause: cause})
	if s.fails(err) {
		return
	}
	s.Names.emit(EventReleased, ls.lane, ls.id, rec.Attempts, "")
	s.giveBack(ls, &rec)
}

// keptForParents is how long at least a dead letter is kept for a task that asks how it ended, ms.
const keptForParents = 7 * 24 * 60 * 60 * 1000

// toDeadLetter makes a leased task a dead letter. If children or its group still wait for the task,
// it is kept until a caller redrives, purges or cancels it.
func (s *State) toDeadLetter(ls *lease, rec *record.Record) {
	if s.Broken = s.Leases.keepSteps(ls.id, rec); s.Broken != nil {
		return
	}
	s.Names.emit(EventDeadLettered, ls.lane, ls.id, rec.Attempts, rec.Error)
	s.unlease(ls)
	if !isFirstPlace(ls.lane, ls.since, ls.id) {
		s.unindex(ls.id)
	}
	set, ties := ls.lane.queue.Settings, ls.ties
	if rec.HoldsTurn = set.HoldGroups && ties.Group != 0; rec.HoldsTurn {
		ties.Group = 0
	}
	retention := record.Retention(set.DeadRetention)
	switch {
	case retention == 0 || rec.HoldsTurn || rec.Parent && (s.Format < keys.FormatOfSteps || s.Ties.isAwaited(ls.id)):
		retention = -1
	case rec.Parent && retention > 0:
		retention = max(retention, keptForParents)
	}
	until := s.retainedUntil(retention)
	s.Times.keep(ls.lane.queue, keys.Dead, ls.id, until, keys.EndedValue{Lane: ls.lane.number, At: s.mint.Stamp()}, rec)
	if rec.Child && until != keys.Forever {
		s.Ties.releaseParents(ls.id, until)
	}
	s.end(ls.lane.queue, ls.id, &ties, Outcome{State: Dead, LastError: rec.Error, Attempts: int(rec.Attempts)})
	if set.DeadLetterQueue != "" {
		s.followDeath(ls, rec)
	}
}

// expire takes back a task after its lease has expired. The attempt counts. The task keeps its
// place in the lane, so that a restart does not delay it. But a task with hanging workers would
// hold up the others: after the second expiry it goes behind them. A local lease that is over
// without a crash counts no attempt and makes no suspect: its process has closed the queue, or this
// shard is a copy of a running one (checkpoint).
func (s *State) expire(ls *lease) {
	if ls.goesOn {
		s.Ties.endOrphan(ls)
		return
	}
	c, known := s.Suspects.crashOf(ls)
	if !known {
		s.Leases.wheel.Add(&ls.expiry, int64(s.Now+crashRetry))
		return
	}
	if c != nil {
		if s.Suspects.isClearing() {
			s.Leases.wheel.Add(&ls.expiry, int64(s.Now)) // until the suspects are cleared
		} else {
			s.crash(ls, c)
		}
		return
	}
	if ls.local && ls.over && !ls.overdue {
		s.returnTask(ls, "")
		return
	}
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: EventExpired, counted: true, suspect: true, cause: "lease expired"})
	if s.fails(err) {
		return
	}
	s.Names.emit(EventExpired, ls.lane, ls.id, rec.Attempts, "")
	if s.config.exhausted(ls, &rec, nil) {
		rec.Suspect = false
		s.toDeadLetter(ls, &rec)
		return
	}
	if ls.over || rec.Suspect {
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

// endLease ends a lease. The task's record stays where it is.
func (s *State) endLease(ls *lease) {
	if ls.suspect {
		s.Suspects.endSuspect(ls)
	} else if len(s.Suspects.beside) > 0 {
		s.Suspects.endBeside(ls.id)
	}
	s.Leases.removeFromRecord(ls)
	s.Leases.removeLease(ls)
	q := ls.lane.queue
	q.Counts.Leased--
	s.Names.touch(q)
	if ls.goesOn {
		s.Leases.orphan(ls)
		return
	}
	s.Ties.leave(q, &ls.ties)
}

func (le *leases) removeLease(ls *lease) {
	le.remove(ls)
	if len(le.stepsOf) > 0 {
		delete(le.stepsOf, ls.id)
	}
	le.names.ready.EndLease(&ls.lane.tasks, ls.since)
}

// unlease ends a lease and removes the task from its lane, to move it elsewhere. A task in its
// first place and on its first lease was never rewritten there, unless its record says so: giveBack
// rewrites the record, but the next lease is then not the first one.
func (s *State) unlease(ls *lease) {
	s.endLease(ls)
	once := keys.IsFirstPlace(ls.since) && ls.leases == 1 && !ls.rewritten
	s.removeTask(ls.lane.number, ls.since, ls.id, once)
}

// recordOf returns the record of a leased task. It is valid until the next lease is granted, or the
// record is rewritten.
func (le *leases) recordOf(ls *lease) (record.Record, error) {
	var b []byte
	var err error
	if len(ls.copied) > 0 {
		b = ls.copied
	} else if t := le.Group.Find(ls.id); t != nil {
		b = t.Rec
	} else {
		le.scratch = keys.AppendTask(le.scratch[:0], ls.lane.number, ls.since, ls.id)
		if b, err = le.Lookup(le.scratch); err == nil && b == nil {
			err = fmt.Errorf("%w: key %x is missing", base.ErrCorrupt, le.scratch)
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

// isRewritten reports whether the group rewrites the record of a leased task, or adds its children.
func (le *leases) isRewritten(id keys.ID) bool {
	g := &le.Group
	return g.HasAny() && (g.IsChanged(id) || g.HasChildren(id)) || le.steps.HasAdded(id)
}

// reapLeases ends expired leases, and stores the clock of leases if it is time.
func (s *State) reapLeases() {
	s.Leases.storeLeaseClock()
	for more := true; more && s.Broken == nil && !s.Suspects.isClearing() && !s.Spent(); {
		more = s.Leases.wheel.Advance(int64(s.Reap), 1, s.expire)
	}
}

// Grant is a lease as the claimer sees it.
type Grant struct {
	Receipt Receipt
	*LaneKey
	Attempt  uint32
	Wait     uint32 // for how long the task was ready, ms; at most 49 days
	Deadline uint64 // wall clock, ms
	Timeout  uint64 // of a task that has none, ms; 0: none
	Rec      []byte
}

// Holder is the holder of a lease.
type Holder struct {
	Local  bool   // the lease ends with the process
	Runner uint32 // the owner's number, which CanceledLease returns
	// Handled: a handler of Run works on the task. If the lease ends before the handler returns,
	// Run calls Fail as soon as it has returned.
	Handled bool
	Worker  string // name of the worker, for people; "": no name
	Process uint64 // a number that no other process has; 0: not known
}

// CanceledLease is a lease that ended because its task was canceled.
type CanceledLease struct {
	Receipt
	Runner uint32
}

// Grant leases the first task of a lane's window for duration ms, and adds the lease to grants.
// REQUIRES: the window is not empty.
func (s *State) Grant(l *Lane, duration uint64, to Holder, grants []Grant) ([]Grant, error) {
	ls := s.Leases.newLease()
	ls.leases, ls.attempts, ls.duration = 1, 1, duration
	it := s.Names.ready.Pop(&l.tasks)
	if _, plain := record.Plain(it.Record); !plain {
		head, err := record.DecodeHead(it.Record)
		if err != nil {
			return grants, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(it.ID), err)
		}
		if head.Lease != 0 && !to.Local {
			ls.duration = head.Lease
		}
		ls.leases, ls.attempts = head.Leases+1, head.Attempts+1
		ls.rewritten, ls.retention, ls.suspect = head.Rewritten, head.Retention, head.Suspect
		if head.Steps > 0 || head.Beside != 0 {
			s.Leases.stepsOf[it.ID] = leaseSteps{int32(head.Steps), head.Beside &^ record.Awaits}
		}
		s.Ties.tieLease(ls, &head)
	}
	s.NoteRead(len(it.Record))
	ls.id, ls.lane, ls.since = it.ID, l, it.Since
	ls.local, ls.handled, ls.runner, ls.worker = to.Local, to.Handled, to.Runner, to.Worker
	process := uint64(0)
	if s.config.Replicated {
		process = to.Process
	}
	s.Leases.addToRecord(ls, process, 0)
	cleared := ls.suspect && !s.Suspects.beginSuspect(ls)
	s.Leases.add(ls, s.Now+ls.duration)
	s.Leases.copyRecord(ls, it.Record)
	if cleared {
		if err := s.clearSuspect(ls); err != nil {
			return grants, err
		}
	}
	s.Names.emit(EventClaimed, l, ls.id, ls.attempts, "")
	q := l.queue
	s.Names.ready.Turn(&l.tasks)
	q.Counts.Ready--
	q.Counts.Leased++
	if q.Gated && q.Settings.Rate > 0 {
		s.Names.noteGrant(q)
	}
	s.Names.touch(q)
	return append(grants, Grant{
		Receipt: ls.receipt(), LaneKey: &l.LaneKey, Attempt: ls.attempts, Wait: s.mint.Age(it.Since), Deadline: s.Wall + ls.duration,
		Timeout: q.timeout, Rec: it.Record,
	}), nil
}

// tieLease copies a task's ties to its lease.
func (ti *ties) tieLease(ls *lease, head *record.Head) {
	ls.ties, ls.tied = head.Ties, head.Ties != record.Ties{}
	if head.Limit != 0 {
		ti.limits.enter(head.Limit)
	}
}

// The history of attempts in a task's record, and the notes of its handlers. Both are written only
// when the record is written anyway: at the end of an attempt after which the task stays.

// noteAttempt adds the attempt of a lease that ends, and the notes of its handler, to the record of
// the task.
func (le *leases) noteAttempt(ls *lease, rec *record.Record, end attemptEnd) {
	if ls.notes != nil {
		rec.Notes = ls.notes.After(rec.Notes)
	}
	if rec.History == nil {
		rec.History = new(record.History)
		if ls.leases == 1 {
			rec.History.FirstReady = keys.SinceMillis(ls.since)
		}
	}
	start := keys.GrantedAt(ls.token)
	a := record.Attempt{Number: ls.attempts, How: uint8(end.how), Start: start, End: max(start, le.mint.Stamp()), Worker: ls.worker}
	if end.how != EventExpired || end.cause == causeCrash {
		a.Error = end.cause
	}
	if (end.how == eventSuspended || end.how == eventUnhandled) && rec.History.Fold(a) {
		return
	}
	rec.History.Add(a)
}

// Note keeps the notes of a lease's handler in memory. They are written at the end of the attempt,
// if the task stays. If the shard loses its memory before, the notes are lost.
func (le *leases) Note(r Receipt, n *record.Notes) error {
	ls := le.held(r)
	if ls == nil {
		return le.leaseLost(r)
	}
	if ls.notes == nil || n.At > ls.notes.At {
		le.emitProgress(ls, n)
	}
	ls.notes = n
	return nil
}

func (le *leases) emitProgress(ls *lease, n *record.Notes) {
	if n.At == 0 || le.Wanted>>EventProgress&1 == 0 {
		return
	}
	le.Effects.Events = append(le.Effects.Events, Event{
		Kind: EventProgress, ID: ls.id, Queue: ls.lane.queue.Name, Tenant: ls.lane.Tenant, Attempt: ls.attempts,
		Time: time.UnixMilli(int64(le.Wall)).UTC(), Progress: n,
	})
}
