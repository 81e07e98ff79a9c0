package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/ticks"
)

// What callers ask for. Each verb is decided completely, or not at all.

// Verdict is the result of a verb.
type Verdict uint8

const (
	Decided Verdict = iota // its error, if any, is for the caller
	Again                  // nothing was done: disk has what is needed once the group has persisted
	Full                   // nothing was done: there is no room for what would be written
)

// Errors of verbs.
var (
	ErrNoRoom  = errors.New("there is no room for what is to be written")
	ErrNoLanes = fmt.Errorf("a shard has no more than %d combinations of queue, tenant and priority", keys.MaxLane)
)

// Produced is the result of a produce.
type Produced struct {
	IDs        []keys.ID // of the tasks; for a task whose key was taken, that of the key's holder
	Duplicates []int     // indexes of those whose idempotency key was taken
}

// Produce takes in tasks, all or none. A call that was decided before has the same outcome again.
func (s *State) Produce(tasks []NewTask, call *CallNumber, out *Produced) (Verdict, error) {
	if call.Seq != 0 {
		if done, err := s.sessions.outcome(call); err != nil {
			return Decided, err
		} else if done != nil {
			out.IDs = append(out.IDs, done.IDs...)
			out.Duplicates = append(out.Duplicates, done.Duplicates...)
			return Decided, nil
		}
	}
	if !s.canAdmit(tasks) {
		return Again, nil
	}
	if err := s.hasLanes(len(tasks)); err != nil {
		return Decided, err
	}
	out.IDs, out.Duplicates = s.admitAll(tasks, out.IDs, out.Duplicates)
	if call.Seq != 0 {
		s.sessions.note(call, out.IDs, out.Duplicates)
	}
	return Decided, nil
}

// Complete finishes a task, and takes in its follow-ups.
func (s *State) Complete(r Receipt, result []byte, next []NewTask) (Verdict, error) {
	if s.isRewritten(r.ID) || !s.canAdmit(next) {
		return Again, nil
	}
	ls := s.held(r)
	if ls == nil {
		return Decided, s.leaseLost(r)
	}
	if !s.HasRoom(RoomScarce) && s.retention(ls.lane.queue, ls.retention) != 0 {
		return Full, nil
	}
	if err := s.hasLanes(len(next)); err != nil {
		return Decided, err
	}
	if s.Broken = s.complete(ls, result); s.Broken == nil && len(next) > 0 {
		s.admitAll(next, nil, nil)
	}
	return Decided, nil
}

// Failure is how an attempt fails.
type Failure int

const (
	FailRetry   Failure = iota // counts; waits, or dies when out of attempts
	FailRelease                // does not count
	FailReturn                 // does not count; the task keeps its place
	FailDead                   // counts; the last one
)

// Fail ends a lease without completing the task, which waits for wait ms; negative: by the backoff.
func (s *State) Fail(r Receipt, how Failure, wait int64, cause string) (Verdict, error) {
	if s.isRewritten(r.ID) {
		return Again, nil
	}
	ls := s.held(r)
	if ls == nil {
		return Decided, s.leaseLost(r)
	}
	if how == FailRetry {
		s.Broken = s.retry(ls, cause, wait)
		return Decided, nil
	}
	rec, err := s.finishAttempt(ls, attemptEnd{counted: how == FailDead, cause: cause})
	if err != nil {
		s.Broken = err
		return Decided, nil
	}
	switch how {
	case FailRelease:
		s.emit(EventReleased, ls.lane, ls.id, rec.Attempts, "")
		s.postpone(ls, &rec, uint64(wait))
	case FailReturn:
		s.emit(EventReleased, ls.lane, ls.id, rec.Attempts, "")
		s.giveBack(ls, &rec)
	default:
		s.toDeadLetter(ls, &rec)
	}
	return Decided, nil
}

// Extend moves the deadline of a lease to duration ms from now.
func (s *State) Extend(r Receipt, duration uint64) error {
	ls := s.held(r)
	if ls == nil {
		return s.leaseLost(r)
	}
	s.renew(ls, duration)
	return nil
}

// find finds the task of a verb.
func (s *State) find(id keys.ID) (*located, Verdict, error) {
	if s.isBehind(id) {
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

// Outcome returns how a task has ended; nil if it has not.
func (s *State) Outcome(id keys.ID) (*Outcome, Verdict, error) {
	at, v, err := s.find(id)
	if at == nil {
		return nil, v, err
	}
	switch at.state {
	case Done:
		return &Outcome{State: Done, Result: at.ended.Result, Attempts: int(at.rec.Attempts)}, Decided, nil
	case Dead, Canceled:
		return &Outcome{State: at.state, Result: at.ended.Result, LastError: at.rec.Error, Attempts: int(at.rec.Attempts)}, Decided, nil
	}
	return nil, Decided, nil
}

// Alteration is what may be done to a task by its ID.
type Alteration byte

const (
	AlterPriority Alteration = iota
	AlterRunAt
	AlterRedrive
	AlterPurge
	AlterCancel
	EndOfAlterations
)

// alterations carry them out; arg is a priority or a time, ms.
var alterations = [EndOfAlterations]func(s *State, at *located, arg uint64) error{
	AlterPriority: (*State).setPriority,
	AlterRunAt:    (*State).setRunAt,
	AlterRedrive:  func(s *State, at *located, _ uint64) error { return s.redrive(at) },
	AlterPurge:    func(s *State, at *located, _ uint64) error { return s.purge(at) },
	AlterCancel:   func(s *State, at *located, _ uint64) error { return s.cancelUnended(at) },
}

// Alter alters a task.
func (s *State) Alter(id keys.ID, how Alteration, arg uint64) (Verdict, error) {
	at, v, err := s.find(id)
	switch {
	case at == nil:
		return v, err
	case s.isTelling(id):
		return Decided, ErrNoRoom
	}
	return Decided, alterations[how](s, at, arg)
}

// cancelUnended is cancel for a task that may have ended.
func (s *State) cancelUnended(at *located) error {
	if at.state == Done || at.state == Canceled {
		return notWaiting(at)
	}
	// the canceled task would be kept
	if !s.HasRoom(RoomScarce) && s.retention(at.lane.queue, at.rec.Retention) != 0 {
		return ErrNoRoom
	}
	s.cancel(at)
	return nil
}

// BulkAlteration is an alteration of many dead letters.
type BulkAlteration struct {
	IDs  []keys.ID
	How  Alteration
	Next int       // index in IDs of the next one
	N    int       // how many were altered
	last bucketKey // the last bucket in which one was found
}

// AlterDead continues a BulkAlteration. It leaves out tasks that are not found, or for which the
// alteration is refused.
func (s *State) AlterDead(b *BulkAlteration) (Verdict, error) {
	for ; b.Next < len(b.IDs) && s.Broken == nil; b.Next++ {
		id := b.IDs[b.Next]
		if s.isBehind(id) || s.Spent() {
			return Again, nil
		}
		at, err := s.locateDead(id, &b.last)
		if err != nil {
			s.Broken = err
			break
		}
		if at != nil && s.isTelling(id) {
			return Decided, ErrNoRoom
		}
		if at != nil && alterations[b.How](s, at, 0) == nil {
			b.N++
		}
	}
	return Decided, nil
}

// ReleaseKey frees an idempotency key; name is used in the error.
func (s *State) ReleaseKey(hash [keys.UniqueLen]byte, name string) (Verdict, error) {
	v, ok := s.uniques.get(s, hash)
	if ok && s.isHolderMoving(hash, v.ID) {
		return Again, nil
	}
	if !ok {
		return Decided, fmt.Errorf("%w: nobody has idempotency key %q", base.ErrNotFound, name)
	}
	at, err := s.locateUnended(v.ID)
	if err != nil {
		s.Broken = err
		return Decided, nil
	}
	if at != nil && at.rec.Flags&record.HoldsKey != 0 {
		if !s.HasRoom(RoomScarce) {
			return Decided, ErrNoRoom
		}
		at.rec.Flags &^= record.HoldsKey
		s.rewrite(at)
	}
	s.freeKey(hash, v)
	return Decided, nil
}

// SetSchedule stores a schedule; v has no position in time.
func (s *State) SetSchedule(name string, v keys.ScheduleValue, times ticks.Sequence) error {
	old := s.recurring.find(name)
	fresh := old == nil || v.Cron != old.value.Cron || v.Every != old.value.Every || v.TimeZone != old.value.TimeZone
	if fresh {
		v.Start, v.After = s.Wall, s.Wall
	} else {
		v.Start, v.After, v.Last = old.value.Start, old.value.After, old.value.Last
		if old.Err == nil && bytes.Equal(v.Append(nil), old.value.Append(nil)) {
			return nil
		}
	}
	if v.Every != 0 { // the start was not known before
		times = ticks.Every{Start: v.Start, Interval: v.Every}
	}
	if err := s.hasLanes(1); err != nil {
		return err
	}
	// so that no tick lacks a lane
	s.lane(LaneKey{Queue: v.Queue, Tenant: v.Tenant, Priority: v.Priority})
	r, err := newRecurring(name, v)
	if err != nil { // it was encoded just now
		return err
	}
	r.begin(times)
	s.recurring.put(r)
	s.storeRecurring(r)
	return nil
}

// DeleteSchedule removes a schedule.
func (s *State) DeleteSchedule(name string) error {
	if s.recurring.find(name) == nil {
		return fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
	}
	s.recurring.remove(name)
	s.Group.delete(keys.AppendSchedule(nil, name))
	return nil
}

// ScheduleInfo is the current state of a schedule.
type ScheduleInfo struct {
	Name  string
	Value keys.ScheduleValue
	Next  uint64 // wall clock, ms; Never: it does not tick
	Err   error  // why its ticks are not known
}

// Schedules visits the schedules after a name in the order of their names, until visit returns
// false.
func (s *State) Schedules(after string, visit func(ScheduleInfo) (more bool)) {
	from, found := s.recurring.search(after)
	if found {
		from++
	}
	for _, r := range s.recurring.list[from:] {
		if !visit(ScheduleInfo{r.Name, r.value, r.next, r.Err}) {
			return
		}
	}
}

// SettingsOf returns the stored settings of a queue; nil: there are none.
func (s *State) SettingsOf(queue string) []byte {
	if q := s.Queues[queue]; q != nil {
		return q.Value
	}
	return nil
}

// Configure adopts settings of a queue, and sends them to the other shards, if their version
// follows the current one; late: other settings were faster.
func (s *State) Configure(queue string, value []byte) (late bool, err error) {
	c, err := ParseSettings(value)
	if err != nil {
		return false, fmt.Errorf("settings of queue %q: %w", queue, err)
	}
	version := uint64(0)
	if q := s.Queues[queue]; q != nil {
		version = q.Version
	}
	if c.Version != version+1 {
		return true, nil
	}
	s.adopt(queue, c, true)
	for to := range s.config.Shards {
		if to != s.config.Shard {
			s.send(to, &keys.Message{Kind: keys.MsgSettings, Queue: queue, Settings: value})
		}
	}
	return false, nil
}

// SetInterest stores what a node wants to know; gone: the node was removed from the cluster.
func (s *State) SetInterest(node string, kinds KindSet, gone bool) {
	key := keys.AppendNamed(nil, keys.Interest, node)
	if gone {
		s.sessions.endNode(node, s.Wall)
	}
	if kinds == 0 {
		delete(s.interests, node)
		s.Group.delete(key)
	} else {
		s.interests[node] = kinds
		s.Group.set(key, keys.AppendNumber(nil, uint64(kinds)))
	}
	s.mergeInterests()
}

// Place is a position in the list of a shard's queues: first those that have a number, then those
// that have only settings. A queue that has got its number since the beginning had no tasks then,
// or was seen under another number.
type Place struct {
	Unnumbered bool
	Next       int
	Begun      uint64 // 1 + the largest Seq of the catalogue at the beginning
}

type QueueCounts struct {
	Queue  string
	Counts keys.Counts
}

// Counts appends the counts of the queues after a place, at most so many, and advances the place.
// more says that more queues follow.
func (s *State) Counts(p *Place, most int, dst []QueueCounts) (_ []QueueCounts, more bool) {
	queues := &s.numbers
	if p.Unnumbered {
		queues = &s.settled
	}
	if p.Begun == 0 {
		p.Begun = 1 + s.catalogue.seq
	}
	end := min(p.Next+most, queues.Len())
	for i := p.Next; i < end; i++ {
		if q := queues.At(i); q != nil && p.Unnumbered == (q.number == 0 || q.since >= p.Begun) && (q.Counts != keys.Counts{} || q.Version > 0) {
			dst = append(dst, QueueCounts{q.Name, q.Counts})
		}
	}
	p.Next, more = end, true
	if end == queues.Len() {
		more = !p.Unnumbered && s.settled.Len() > 0
		p.Unnumbered, p.Next = true, 0
	}
	return dst, more
}

// Idleness is the question whether queues are idle, all queues if none is named. It is asked
// repeatedly.
type Idleness struct {
	Queues  []string
	Arrived uint64 // tasks of the queues that had come from other shards
	busy    *Queue // one of the named queues that was not idle; nil: none
}

// Idle answers it. Its cost grows with the number of named queues only after the one that was not
// idle has become so.
func (s *State) Idle(i *Idleness) bool {
	// tasks may be on their way to other shards
	if s.out.busy() || i.busy != nil && i.busy.isBusy() {
		return false
	}
	if i.busy = nil; len(i.Queues) == 0 {
		s.noteTouched()
		i.Arrived = s.arrived
		return s.busy == 0
	}
	c := &s.catalogue
	i.Arrived = 0
	for _, name := range i.Queues {
		i.Arrived += c.gone[c.slot(name)]
		if q := s.Queues[name]; q != nil {
			if q.isBusy() {
				i.busy = q
				return false
			}
			i.Arrived += q.arrived
		}
	}
	return true
}

// FirstTask is what a claim of a queue would get here, as far as memory shows.
type FirstTask struct {
	Priority uint8
	Since    uint64 // the task is not older
	Tenant   string
	Alone    bool // no other tenant has a task of the priority
}

func (s *State) First(q *Queue) (f FirstTask, ok bool) {
	if q.Settings.Paused {
		return f, false
	}
	for mask := q.Mask; mask != 0; {
		p := bits.Len16(mask) - 1
		mask &^= 1 << p
		first := q.rings[p].first
		for l := first; ; {
			if pos, ok := l.first(); ok {
				return FirstTask{l.Priority, pos.Since, l.Tenant, l.ringNext == l}, true
			}
			if l = l.ringNext; l == first {
				break
			}
		}
	}
	return f, false
}

// Reconcile makes the shards of a process agree with each other. Below DurabilityDisk, a power loss
// may have taken from some of them which messages they had taken, and which settings were the
// latest. A queue may also have older settings here than in its other shards.
// REQUIRES: all are loaded, and nothing is decided yet.
func (s *State) Reconcile(peers []*State) {
	for to, peer := range peers {
		s.out.countFrom(to, peer.inbound[s.config.Shard])
		for name, q := range peer.Queues {
			if q.Version > 0 {
				s.adopt(name, q.Configured, false)
			}
		}
	}
	for _, q := range s.numbers.All() {
		if q != nil {
			s.show(q)
			s.recheck(q)
		}
	}
	for _, st := range s.limits { // perhaps; the end of a lease finds out
		st.parked = true
	}
}

// NextTime returns when something is due by the wall clock, ms; Never: nothing is.
func (s *State) NextTime() uint64 {
	at := uint64(Never)
	if s.HasRoom(RoomNone) {
		at = s.nextDeletion()
	}
	if s.HasRoom(RoomLow) {
		at = min(at, s.nextDue.at)
	}
	if s.HasRoom(Roomy) {
		at = min(at, s.recurring.next())
	}
	return at
}

// NextDue returns when something is due by Uptime, and when by Now: the deadline of a lease, or
// that the clock of leases is stored.
func (s *State) NextDue() (uptime, now uint64) {
	uptime, now = Never, Never
	if at, ok := s.leases.wheel.Next(); ok && s.HasRoom(RoomScarce) {
		now = uint64(at)
		if s.config.Replicated {
			now = min(now, s.clock.stored+leaseClockEvery-s.clock.ahead)
		}
	}
	if s.HasRoom(RoomNone) {
		uptime = s.trimAt()
	}
	return uptime, now
}
