package codeq

import (
	"fmt"
	"unicode/utf8"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/window"
)

// The life of a task. Every arrow is one function of this file; verbs, the
// reaper and the schedule call the same ones.
//
//	          admit                grant              complete
//	produce ---------> Ready  -------------> Leased ------------> gone, or Done
//	   |                 ^  ^                 | | |                        |
//	   | admit           |  +---- giveBack ---+ | +--- bury ---> Dead      | expireDone
//	   |                 | promote              | postpone                 v
//	   +------------> Scheduled <---------------+                        gone
//
// Each function changes the shard's memory, its counts, and adds to the group
// what makes disk say the same. None can fail halfway: records are read and
// decoded before the first change.

// newTask is a task as the caller's goroutine has prepared it.
type newTask struct {
	key   laneKey
	runAt uint64 // wall clock, ms; 0: at once
	rec   []byte // stored form; the shard keeps it
}

// admit takes in a new task.
func (s *shard) admit(t *newTask) ID {
	l := s.lane(t.key)
	id := s.mint.id(s.wall, l.number)
	if t.runAt > s.wall {
		s.schedule(l, id, t.runAt, t.rec)
		return id
	}
	s.group.setTask(l.number, keys.SinceOf(keys.ID(id)), id, t.rec)
	s.ready(l, window.Item{Pos: window.Pos{Since: keys.SinceOf(keys.ID(id)), ID: id}, Record: t.rec})
	return id
}

// ready counts a task as ready and shows it to claims; its record is in the group.
func (s *shard) ready(l *lane, it window.Item) {
	l.queue.counts.Ready++
	s.touch(l.queue)
	s.windowBytes += l.insert(it, s.opts.WindowTasks)
	if s.windowBytes > s.windowLimit {
		s.evict(l)
	}
	if l.spilled == deepLane {
		s.store.partition.add(l.number)
	}
	l.queue.join(l)
	s.feed(l.queue)
}

// place moves a task into its lane, at since.
func (s *shard) place(l *lane, since uint64, id ID, rec []byte) {
	s.group.setTask(l.number, since, id, rec)
	s.setIndex(id, keys.Place{Range: keys.Task, Group: l.number, At: since})
	s.ready(l, window.Item{Pos: window.Pos{Since: since, ID: id}, Record: rec})
}

// schedule puts a task among those that wait for their time.
func (s *shard) schedule(l *lane, id ID, due uint64, rec []byte) {
	s.scratch = keys.AppendTimed(s.scratch[:0], keys.Scheduled, due, id)
	s.group.set(s.scratch, s.withLane(l, rec))
	s.setIndex(id, keys.Place{Range: keys.Scheduled, At: due})
	l.queue.counts.Scheduled++
	s.touch(l.queue)
	s.nextDue = min(s.nextDue, due)
}

// grant is a lease as the claim's caller gets to see it.
type grant struct {
	receipt  Receipt
	lane     *lane
	attempt  uint32
	deadline uint64 // wall clock, ms
	rec      []byte
}

// grant leases the first task of a lane's window. REQUIRES: the window is not empty.
func (s *shard) grant(l *lane, duration uint64, local bool) (grant, error) {
	head, err := record.DecodeHead(l.window.FirstRecord())
	if err != nil {
		return grant{}, fmt.Errorf("%w: task %s: %w", ErrCorrupt, ID(l.window.First().ID), err)
	}
	before := l.window.Footprint()
	it := l.window.PopFirst()
	s.windowBytes -= before - l.window.Footprint()
	if l.window.Len() < s.opts.WindowTasks/4 {
		s.want(l)
	}
	if head.Lease != 0 && !local {
		duration = head.Lease
	}
	ls := s.leases.fresh()
	ls.id, ls.lane, ls.since, ls.local = it.ID, l, it.Since, local
	ls.leases, ls.attempts = head.Leases+1, head.Attempts+1
	ls.duration, ls.retention = duration, head.Retention
	s.inscribe(ls)
	s.leases.add(ls, s.now+duration)
	q := l.queue
	q.rings[l.priority] = l.ringNext // the next turn is another tenant's
	q.counts.Ready--
	q.counts.Leased++
	s.touch(q)
	return grant{
		receipt:  Receipt{ID: ls.id, Token: ls.token},
		lane:     l,
		attempt:  ls.attempts,
		deadline: s.wall + duration,
		rec:      it.Record,
	}, nil
}

// endLease ends a lease. The task's record stays where it is.
func (s *shard) endLease(ls *lease) {
	s.strike(ls)
	s.leases.remove(ls)
	ls.lane.queue.counts.Leased--
	s.touch(ls.lane.queue)
}

// unlease ends a lease and takes the task out of its lane, on its way
// elsewhere. A task in its first place and on its first lease has never been
// rewritten there; giveBack does that.
func (s *shard) unlease(ls *lease) {
	s.endLease(ls)
	once := keys.Fresh(ls.since) && ls.leases == 1
	s.group.removeTask(ls.lane.number, ls.since, ls.id, once)
}

// complete finishes a task. Its record is read only if it is kept.
func (s *shard) complete(ls *lease, result []byte) error {
	retention := ls.retention
	if retention == 0 {
		retention = retentionMillis(s.opts.Retention)
	}
	if retention == 0 {
		s.unlease(ls)
		if !keys.Fresh(ls.since) {
			s.unindex(ls.id)
		}
		return nil
	}
	rec, err := s.recordOf(ls)
	if err != nil {
		return err
	}
	expiry := uint64(neverExpires)
	if retention > 0 {
		expiry = s.wall + uint64(retention)
	}
	s.unlease(ls)
	rec.Attempts, rec.Leases = ls.attempts, ls.leases
	done := keys.DoneValue{Lane: ls.lane.number, At: s.wall, Result: result}
	s.scratch = keys.AppendTimed(s.scratch[:0], keys.Done, expiry, ls.id)
	s.group.set(s.scratch, append(done.Append(nil), rec.Encode()...))
	s.setIndex(ls.id, keys.Place{Range: keys.Done, At: expiry})
	ls.lane.queue.counts.Done++
	s.nextExpiry = min(s.nextExpiry, expiry)
	return nil
}

// neverExpires is the expiry of what is kept for ever.
const neverExpires = 1<<64 - 1

// attemptOver is how the attempt of a lease ends when the task goes on.
type attemptOver struct {
	counted bool
	cause   string // kept with the task; "" keeps what it has
}

// reckon reads the record of a leased task and adds what has become of the attempt.
func (s *shard) reckon(ls *lease, end attemptOver) (record.Record, error) {
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

// retry ends a counted attempt: the task is tried again after a wait, or
// becomes a dead letter when it is out of attempts. A negative wait is by the
// backoff of the options.
func (s *shard) retry(ls *lease, cause string, wait int64) error {
	rec, err := s.reckon(ls, attemptOver{counted: true, cause: cause})
	if err != nil {
		return err
	}
	if s.exhausted(&rec) {
		s.bury(ls, &rec)
		return nil
	}
	if wait < 0 {
		wait = int64(millis(s.opts.Backoff.Delay(int(rec.Attempts), s.mint.rand.Float64())))
	}
	s.postpone(ls, &rec, uint64(wait))
	return nil
}

func (s *shard) exhausted(rec *record.Record) bool {
	limit := rec.MaxAttempts
	if limit == 0 {
		limit = uint32(s.opts.MaxAttempts)
	}
	return rec.Attempts >= limit
}

// postpone returns a leased task that is to wait. Without a wait it becomes
// ready now, behind what is ready already.
func (s *shard) postpone(ls *lease, rec *record.Record, wait uint64) {
	s.unlease(ls)
	if wait == 0 {
		s.place(ls.lane, keys.MovedSince(s.wall), ls.id, rec.Encode())
		return
	}
	s.schedule(ls.lane, ls.id, s.wall+wait, rec.Encode())
}

// giveBack returns a leased task to where it stands in its lane: its record is
// rewritten in place.
func (s *shard) giveBack(ls *lease, rec *record.Record) {
	s.endLease(ls)
	b := rec.Encode()
	s.group.setTask(ls.lane.number, ls.since, ls.id, b)
	s.ready(ls.lane, window.Item{Pos: window.Pos{Since: ls.since, ID: ls.id}, Record: b})
}

// bury makes a leased task a dead letter.
func (s *shard) bury(ls *lease, rec *record.Record) {
	s.unlease(ls)
	q := ls.lane.queue
	s.scratch = keys.AppendDead(s.scratch[:0], q.number, s.wall, ls.id)
	s.group.set(s.scratch, s.withLane(ls.lane, rec.Encode()))
	s.setIndex(ls.id, keys.Place{Range: keys.Dead, Group: q.number, At: s.wall})
	q.counts.Dead++
}

// expire takes back a task whose lease has run out: the attempt counts.
func (s *shard) expire(ls *lease) {
	rec, err := s.reckon(ls, attemptOver{counted: true, cause: "lease expired"})
	if err != nil {
		s.broken = err
		return
	}
	if s.exhausted(&rec) {
		s.bury(ls, &rec)
		return
	}
	s.giveBack(ls, &rec)
}

// promote makes a scheduled task ready. key is where it was found.
func (s *shard) promote(key []byte, due uint64, id ID, l *lane, rec []byte) {
	s.group.delete(key)
	l.queue.counts.Scheduled--
	s.place(l, keys.MovedSince(due), id, rec)
}

// expireDone forgets a completed task. key is where it was found.
func (s *shard) expireDone(key []byte, id ID, l *lane) {
	s.group.delete(key)
	s.unindex(id)
	l.queue.counts.Done--
	s.touch(l.queue)
}

// setIndex stores where a task lies that is not in its first place.
func (s *shard) setIndex(id ID, p keys.Place) {
	var key [1 + keys.IDLen]byte
	var value [keys.PlaceLen]byte
	s.group.set(keys.AppendIndex(key[:0], id), p.Append(value[:0]))
}

func (s *shard) unindex(id ID) {
	var key [1 + keys.IDLen]byte
	s.group.delete(keys.AppendIndex(key[:0], id))
}

// withLane prefixes a record with its lane, for places that do not tell it.
// The result is good until the next call.
func (s *shard) withLane(l *lane, rec []byte) []byte {
	s.value = append(keys.AppendLaneNumber(s.value[:0], l.number), rec...)
	return s.value
}

// touch has the group store the counts of a queue.
func (s *shard) touch(q *queueState) {
	if !q.touched {
		q.touched = true
		s.group.touched = append(s.group.touched, q)
	}
}

// maxCause bounds the text of an error that is kept with a task, in bytes.
const maxCause = 8 << 10

func clip(text string) string {
	if len(text) <= maxCause {
		return text
	}
	n := maxCause
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}
