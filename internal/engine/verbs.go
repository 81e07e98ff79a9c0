package engine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// The requests of callers. Each verb is decided completely, or not at all.

// Verdict is the result of a verb.
type Verdict uint8

const (
	Decided Verdict = iota // its error, if any, is for the caller
	Again                  // nothing was done: disk has the data once the group has persisted
	Full                   // nothing was done: there is no room for the writes
)

// Errors of verbs.
var (
	ErrNoRoom  = errors.New("there is no room for what is to be written")
	ErrNoLanes = fmt.Errorf("a shard has no more than %d combinations of queue, tenant and priority", keys.MaxLane)
)

// Produced is the result of a produce.
type Produced struct {
	IDs        []keys.ID // of the tasks; if the key of a task was taken, that of the key's holder
	Duplicates []int     // indexes of the tasks with an idempotency key that was taken
}

// Produce takes in tasks, all or none. A call that was decided before has the same outcome again.
func (s *State) Produce(tasks []NewTask, call *keys.CallNumber, out *Produced) (Verdict, error) {
	if call.Seq != 0 {
		if done, err := s.Mail.Sessions.Outcome(call); err != nil {
			return Decided, err
		} else if done != nil {
			out.IDs = append(out.IDs, done.IDs...)
			out.Duplicates = append(out.Duplicates, done.Duplicates...)
			return Decided, nil
		}
	}
	if s.looksUp(tasks) && s.Spent() || !s.Ties.canAdmit(tasks) {
		return Again, nil
	}
	if err := s.Names.canHave(tasks); err != nil {
		return Decided, err
	}
	out.IDs, out.Duplicates = s.admitAll(tasks, out.IDs, out.Duplicates)
	if call.Seq != 0 {
		s.Mail.Sessions.Note(call, out.IDs, out.Duplicates)
	}
	return Decided, nil
}

// Complete finishes a task, and takes in its follow-ups. retention is for a task that has none, ms.
// stillRuns: the handler goes on, or may do so; when it has returned, Complete or Fail is called
// again.
func (s *State) Complete(r Receipt, result []byte, retention int64, next []NewTask, stillRuns bool) (Verdict, error) {
	if s.Leases.isRewritten(r.ID) || s.looksUp(next) && s.Spent() || !s.Ties.canAdmit(next) {
		return Again, nil
	}
	ls := s.Leases.held(r)
	if ls == nil {
		if !stillRuns {
			s.Ties.returned(r)
		}
		return Decided, s.Leases.leaseLost(r)
	}
	retention = cmp.Or(ls.retention, retention)
	if !s.HasRoom(RoomScarce) && s.Times.retention(ls.lane.queue, retention) != 0 {
		return Full, nil
	}
	if err := s.Names.canHave(next); err != nil {
		return Decided, err
	}
	ls.goesOn, ls.retention = stillRuns && ls.handled, retention
	if s.Broken = s.complete(ls, result); s.Broken == nil && len(next) > 0 {
		for i := range next {
			if t := next[i].Tied; t != nil {
				t.done = r.ID
			}
		}
		s.admitAll(next, nil, nil)
	}
	return Decided, nil
}

// Failure is how an attempt fails.
type Failure int

const (
	FailRetry     Failure = iota // counts; waits, or dies when out of attempts
	FailRelease                  // does not count
	FailReturn                   // does not count; the task keeps its place
	FailDead                     // counts; the last one
	FailOverdue                  // counts, as the handler goes on after its Timeout; the lease goes on
	FailSuspend                  // does not count; Suspend takes it
	FailUnhandled                // does not count: no handler knows the kind of the task
)

// StillRuns is added to a Failure if the handler goes on, or may do so. When it has returned, Fail
// is called again.
const StillRuns Failure = 1 << 6

// Fail ends a lease without completing the task, which waits for wait ms; negative: by the backoff.
// For FailUnhandled wait is how long the task may go without a handler; 0: for ever. policy is that
// of the handler; nil: it has none.
func (s *State) Fail(r Receipt, how Failure, policy *record.Policy, wait int64, cause string) (Verdict, error) {
	if s.Leases.isRewritten(r.ID) {
		return Again, nil
	}
	ls := s.Leases.held(r)
	if ls == nil {
		if how&StillRuns == 0 && how != FailOverdue {
			s.Ties.returned(r)
		}
		return Decided, s.Leases.leaseLost(r)
	}
	goesOn := how&StillRuns != 0 && ls.handled
	how &^= StillRuns
	switch {
	case how == FailOverdue && s.Leases.isMoving(r.ID):
		return Again, nil
	case how == FailOverdue:
		s.Broken = s.countOverdue(ls)
		return Decided, nil
	case how == FailReturn && ls.overdue:
		how, wait, cause = FailRetry, -1, causeOverdue
	}
	ls.goesOn = goesOn
	switch how {
	case FailRetry:
		s.Broken = s.retry(ls, policy, cause, wait)
		return Decided, nil
	case FailReturn:
		s.returnTask(ls, cause)
		return Decided, nil
	case FailUnhandled:
		s.Broken = s.unhandled(ls, uint64(max(wait, 0)), cause)
		return Decided, nil
	default: // FailRelease, FailDead
	}
	end := attemptEnd{how: EventReleased, cause: cause}
	if how == FailDead {
		end.how, end.counted = EventDeadLettered, true
	}
	rec, err := s.Leases.finishAttempt(ls, end)
	if s.fails(err) {
		return Decided, nil
	}
	if how == FailDead {
		s.toDeadLetter(ls, &rec)
		return Decided, nil
	}
	rec.Attempts = ls.attempts - 1 // also if it is overdue
	s.Names.emit(EventReleased, ls.lane, ls.id, rec.Attempts, "")
	s.postpone(ls, &rec, uint64(wait))
	return Decided, nil
}

// Suspend ends a lease whose task waits for some ms between two steps. The attempt does not count,
// and its task keeps its turn and its key. step is the step that the task waits in: for a signal,
// unless it has come, or for the end of a task.
func (s *State) Suspend(r Receipt, wait int64, number uint32, step *record.Step) (Verdict, error) {
	if s.Leases.isRewritten(r.ID) {
		return Again, nil
	}
	ls := s.Leases.held(r)
	if ls == nil {
		s.Ties.returned(r)
		return Decided, s.Leases.leaseLost(r)
	}
	in := *step
	n, err := s.Leases.countSteps(ls)
	if s.fails(err) {
		return Decided, nil
	}
	if in.Kind != record.StepChild || number+1 != n { // else the task waits for the same child again
		if err := s.Leases.addStep(ls, number, &in); err != nil || s.Broken != nil {
			return Decided, err
		}
	}
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: eventSuspended})
	if s.fails(err) {
		return Decided, nil
	}
	rec.Attempts = ls.attempts - 1 // also if it is overdue
	if s.Wanted>>eventSuspended&1 != 0 {
		s.collect(eventSuspended, ls.lane, ls.id, rec.Attempts, "")
	}
	switch in.Kind {
	case record.StepSignal:
		wait = 0
	case record.StepNoSignal:
		rec.Beside |= record.Awaits
	case record.StepChild:
		rec.Beside |= record.Awaits
		child := keys.ID(in.Result)
		s.Mail.send(keys.ShardOf(child, s.config.Shards), &keys.Message{Kind: keys.MsgDepend, Parent: child, Child: ls.id, Outcome: keys.AtAnyEnd})
	}
	s.postpone(ls, &rec, uint64(max(wait, 0)))
	return Decided, nil
}

// Extend moves the deadline of a lease to duration ms from now.
func (le *leases) Extend(r Receipt, duration uint64) error {
	ls := le.held(r)
	if ls == nil {
		return le.leaseLost(r)
	}
	le.renew(ls, duration)
	return nil
}

// find finds the task of a verb.
func (s *State) find(id keys.ID) (*located, Verdict, error) {
	if s.Ties.isBehind(id) {
		return nil, Again, nil
	}
	at, err := s.locate(id)
	switch {
	case err != nil:
		s.Broken = err
		return nil, Decided, nil
	case at == nil:
		return nil, Decided, fmt.Errorf("%w: %s", base.ErrNotFound, keys.FormatID(id))
	}
	return at, Decided, nil
}

// Outcome returns how a task has ended; nil if it has not. late: also how one has that is not kept,
// if that is remembered.
func (s *State) Outcome(id keys.ID, late bool) (*Outcome, Verdict, error) {
	at, v, err := s.find(id)
	if at == nil {
		if late && errors.Is(err, base.ErrNotFound) {
			if o := s.endings.find(id, s.Uptime); o != nil {
				return o, Decided, nil
			}
		}
		return nil, v, err
	}
	switch at.state {
	case Done:
		return &Outcome{State: Done, Result: at.ended.Result, Attempts: int(at.rec.Attempts)}, Decided, nil
	case Dead, Canceled:
		return &Outcome{State: at.state, Result: at.ended.Result, LastError: at.rec.Error, Attempts: int(at.rec.Attempts)}, Decided, nil
	default:
		return nil, Decided, nil
	}
}

// Configure adopts settings of a queue, and sends them to the other shards, if their version
// follows the current one; late: other settings were faster.
func (s *State) Configure(queue string, value []byte) (late bool, err error) {
	c, err := ParseSettings(value)
	if err != nil {
		return false, fmt.Errorf("settings of queue %q: %w", queue, err)
	}
	if s.Format < keys.FormatOfSteps && c.Settings.HasPolicy() {
		return false, fmt.Errorf("%w: the shard has format %d, and policies need %d", base.ErrFormat, s.Format, keys.FormatOfSteps)
	}
	if c.Version != s.Names.versionOf(queue)+1 {
		return true, nil
	}
	if c.Settings.IsZero() {
		none := keys.SettingsValue{Version: c.Version, JSON: keys.NoSettings}
		if bytes.HasSuffix(value, keys.DeleteQueue) {
			none.JSON = keys.QueueIsGone
		}
		s.Names.removeSettings(queue, none)
		value = none.Append(nil)
		c.Value = value
	}
	s.Names.adopt(queue, c)
	for to := range s.config.Shards {
		if to != s.config.Shard {
			s.Mail.send(to, &keys.Message{Kind: keys.MsgSettings, Queue: queue, Settings: value})
		}
	}
	return false, nil
}

// ReleaseKey frees an idempotency key; name is used in the error.
func (s *State) ReleaseKey(hash [keys.UniqueLen]byte, name string) (Verdict, error) {
	v, ok := s.Ties.uniques.Get(hash)
	if ok && s.Ties.isHolderMoving(hash, v.ID) {
		return Again, nil
	}
	if !ok {
		return Decided, fmt.Errorf("%w: nobody has idempotency key %q", base.ErrNotFound, name)
	}
	at, err := s.locateUnended(v.ID)
	if s.fails(err) {
		return Decided, nil
	}
	if at != nil && at.rec.Flags&record.HoldsKey != 0 {
		if !s.HasRoom(RoomScarce) {
			return Decided, ErrNoRoom
		}
		at.rec.Flags &^= record.HoldsKey
		s.rewrite(at)
	}
	s.Ties.freeKey(hash, v)
	return Decided, nil
}

// Next returns the lane with the first task for a claim of the queue that takes no rank below rank;
// nil: there is none. pending is as in head, or says that the budget was spent on parking tasks;
// the queue is then fed again.
func (s *State) Next(q *Queue, rank uint64) (l *Lane, pending bool) {
	if q.Settings.Paused {
		return nil, false
	}
	for {
		l, pending = s.Names.head(q)
		if l != nil && Rank(l.Priority) < rank {
			return nil, false
		}
		if l == nil || q.Settings.ConcurrencyPerKey == 0 && len(s.Leases.heldTurns) == 0 {
			return l, pending
		}
		head, err := record.DecodeHead(l.tasks.FirstRecord())
		if err != nil || s.Ties.mayLease(q, &head) { // Grant reports err
			return l, pending
		}
		if s.Spent() {
			s.feed(q)
			return nil, true
		}
		s.Ties.park(l)
		if s.Broken != nil {
			return nil, false
		}
	}
}

// Idleness is the repeated question whether queues are idle, all queues if none is named.
type Idleness struct {
	Queues  []string
	Arrived uint64 // tasks of the queues that had come from other shards
	busy    *Queue // one of the named queues that was not idle; nil: none
}

// Idle answers it. While the queue that was busy the last time still is, the cost does not depend
// on how many queues are named.
func (s *State) Idle(i *Idleness) bool {
	// tasks may be on their way to other shards
	if s.Mail.IsBusy() || i.busy != nil && i.busy.isBusy() {
		return false
	}
	if i.busy = nil; len(i.Queues) == 0 {
		s.Names.noteTouched()
		i.Arrived = s.Mail.arrived
		return s.Names.busy == 0
	}
	c := &s.Names.catalogue
	i.Arrived = 0
	for _, name := range i.Queues {
		i.Arrived += c.gone[c.slot(name)]
		if q := s.Names.Queues[name]; q != nil {
			if q.isBusy() {
				i.busy = q
				return false
			}
			i.Arrived += q.arrived
		}
	}
	return true
}
