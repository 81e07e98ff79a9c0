package engine

import (
	"math"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// When a process dies with tasks at work, one of them may be the reason, and will be again. So they
// are suspects: they wait in a scope of their queue, and start slowly, a few at a time over the
// whole process, while all other tasks go on. A suspect that ends its attempt, well or not, has not
// killed the process, and is none any more. One that is at work when the process dies again stays
// one, and clears those that wait. The places of the slow start are with the owner
// (dispatch.SlowStart), which takes one for each call of Start; Effects.Suspects says when places
// are over.

// suspects is the memory of the suspects of a shard. Their records say that they are.
type suspects struct {
	queues   []*Queue           // some may wait there
	started  map[keys.ID]uint64 // those with a place, and the time of startedSuspect
	order    []startedSuspect   // by time, with entries that started does not have any more
	clearing bool               // those that wait are suspects no more; no lease is taken back meanwhile

	last    *crash                  // of the process that had the shard before; nil: it has not crashed
	atWork  map[string]int          // suspects that are leased, by worker; in a cluster only
	table   suspectTable            // likewise; nil: the shard counts alone
	crashes map[string]*workerCrash // of processes, by worker; in a cluster only
}

// startedSuspect is a suspect with a place of the slow start, and the time at which it passes if it
// is still at work, as instant.Now.
type startedSuspect struct {
	id keys.ID
	at uint64
}

// crash is the end of a process that had tasks at work.
type crash struct {
	Tasks    int  // at work
	Suspects int  // among them, since earlier crashes
	Others   bool // tasks were ready beside them
	Partial  bool // shards that other processes lead may have had more suspects
}

// suspectTable counts the suspects that are at work, over the shards that the process leads.
type suspectTable interface {
	// SetAtWork says how many suspects of the shard a worker has.
	SetAtWork(worker string, n int)
	// Crash returns how many suspects the process of a worker had at work when it died, and whether
	// there may have been more. The first shard that asks decides, for lasts ms; left is the rest.
	Crash(worker string, lasts uint64) (suspects int, partial bool, left uint64)
}

// shareSuspects begins to count the suspects at work in a table of all shards of the process.
func (s *State) shareSuspects(t suspectTable) {
	s.suspects.table = t
	for worker, n := range s.suspects.atWork {
		t.SetAtWork(worker, n)
	}
}

// workerCrash is the crash of a process of a cluster. Its leases end one after the other.
type workerCrash struct {
	crash
	until uint64 // no lease of the process ends later, as instant.Now
}

// suspectEffects are tasks that have come back from a crash, and places that are over.
type suspectEffects struct {
	Crashed int
	Passed  int  // their tasks have ended an attempt, or have been at work for Config.SuspectFor
	Freed   int  // their tasks were given back or canceled, or there were none
	Anew    bool // there are new suspects: the slow start begins anew
}

// IsZero reports whether there are none.
func (e *suspectEffects) IsZero() bool { return *e == suspectEffects{} }

// The price of a crash for a task that was at work.
type crashCost uint8

const (
	costCrash   crashCost = iota // a crash; crashesPerAttempt times MaxAttempts end the task
	costAttempt                  // an attempt
)

const crashesPerAttempt = 10

// costOfCrash decides the price, and whether the task is a suspect from now on. counted: the
// attempt counts already, since its Timeout had passed.
func costOfCrash(c *crash, suspect, counted bool) (cost crashCost, suspected bool) {
	if suspect && c.Suspects == 1 && !c.Partial || counted {
		cost = costAttempt
	}
	return cost, suspect || c.Suspects == 0
}

// AtWork says that the process that had the shard before has died, and returns what was at work
// there. Before the first group, the caller sets Suspects to the number of all shards.
// REQUIRES: Load, and no group since.
func (s *State) AtWork() *crash {
	c := new(crash)
	for _, ls := range s.leases.all.All() {
		if ls.over && ls.local {
			c.Tasks++
			if ls.suspect {
				c.Suspects++
			}
		}
	}
	for _, q := range s.Queues {
		c.Others = c.Others || q.Counts.Ready > 0
	}
	s.suspects.last, s.suspects.clearing = c, true
	return c
}

// CrashIsOver reports whether all tasks of the process that AtWork was told of have been taken
// back.
func (s *State) CrashIsOver() bool {
	if s.suspects.last == nil {
		return true
	}
	for _, ls := range s.leases.all.All() {
		if ls.over && ls.local {
			return false
		}
	}
	return true
}

// crashOf returns the crash that has ended a lease; nil: the lease has expired without one. In a
// cluster, a lease of Run that was not renewed stands for a process that is gone, and the leases of
// one worker for one process.
func (s *State) crashOf(ls *lease) *crash {
	c := &s.suspects
	switch {
	case !ls.local || s.Format < formatOfSuspects:
		return nil
	case !s.config.Replicated:
		if ls.over {
			return c.last
		}
		return nil
	}
	e := c.crashes[ls.worker]
	if e == nil || e.until < s.Now {
		for worker, old := range c.crashes {
			if old.until < s.Now {
				delete(c.crashes, worker)
			}
		}
		e = &workerCrash{until: s.Now + 2*ls.duration}
		if e.Suspects = c.atWork[ls.worker]; c.table != nil {
			var left uint64
			e.Suspects, e.Partial, left = c.table.Crash(ls.worker, 2*ls.duration)
			e.until = s.Now + left
		}
		if c.crashes == nil {
			c.crashes = make(map[string]*workerCrash)
		}
		c.crashes[ls.worker] = e
		s.Effects.Suspects.Anew = true
		if c.clearing = e.Suspects > 0; c.clearing {
			for _, q := range c.queues {
				s.wake(q, keys.SuspectScope(q.Name), keys.ID{}, keys.WakeUp)
			}
		}
	}
	return &e.crash
}

// formatOfSuspects is the first format with suspects in records.
const formatOfSuspects = 7

// isClearing reports whether leases wait to be taken back until suspects are cleared. Without room
// for that those that wait stay suspects, since leases end on a fuller disk, too.
func (s *State) isClearing() bool {
	c := &s.suspects
	c.clearing = c.clearing && s.HasRoom(RoomLow) && (c.last == nil || c.last.Suspects > 0) && len(s.rechecks)+len(c.queues) > 0
	return c.clearing
}

// crash takes back a task from a process that has died.
func (s *State) crash(ls *lease, c *crash) {
	rec, err := s.finishAttempt(ls, attemptEnd{how: EventExpired, cause: causeCrash})
	if err != nil {
		s.Broken = err
		return
	}
	cost, suspected := costOfCrash(c, ls.suspect, rec.Attempts == ls.attempts)
	switch rec.Suspect = suspected; cost {
	case costAttempt:
		rec.Attempts = ls.attempts
	case costCrash:
		rec.Crashes++
	}
	s.Effects.Suspects.Crashed++
	s.emit(EventExpired, ls.lane, ls.id, rec.Attempts, causeCrash)
	if s.exhausted(&rec) {
		rec.Suspect = false
		s.toDeadLetter(ls, &rec)
		return
	}
	s.giveBack(ls, &rec)
}

// causeCrash is the error of an attempt that has ended with its process.
const causeCrash = "the process died"

// hold makes a suspect wait that would be ready otherwise. It keeps the turn of its group.
func (s *State) hold(l *Lane, id keys.ID, rec []byte) {
	s.block(l, keys.SuspectScope(l.queue.Name), id, rec)
	l.queue.heldIn = s.windows.pass
	s.noteSuspects(l.queue)
}

// noteSuspects notes that suspects may wait in a queue, for claims, or to be cleared.
func (s *State) noteSuspects(q *Queue) {
	if !q.Suspects {
		q.Suspects = true
		s.suspects.queues = append(s.suspects.queues, q)
	}
	if s.isClearing() {
		s.wake(q, keys.SuspectScope(q.Name), keys.ID{}, keys.WakeUp)
		return
	}
	s.feed(q)
}

// forgetSuspects notes that none wait any more.
func (s *State) forgetSuspects(q *Queue) {
	q.Suspects = false
	for i, other := range s.suspects.queues {
		if other == q {
			last := len(s.suspects.queues) - 1
			s.suspects.queues[i] = s.suspects.queues[last]
			s.suspects.queues[last] = nil
			s.suspects.queues = s.suspects.queues[:last]
			return
		}
	}
}

// Start starts one more suspect of a queue, in the next group, if one may wait and take returns
// true: it takes a place of the slow start.
func (s *State) Start(q *Queue, take func() bool) bool {
	if !q.Suspects || q.Settings.Paused || s.isClearing() || !s.HasRoom(RoomLow) || !take() {
		return false
	}
	q.starting++
	s.wake(q, keys.SuspectScope(q.Name), keys.ID{}, keys.WakeUp)
	return true
}

// startSuspects moves suspects of a queue into their lanes: as many as have a place, or all while
// they are cleared.
func (s *State) startSuspects(q *Queue, scope uint64) error {
	room := q.starting
	clearing := s.isClearing()
	if clearing {
		room = math.MaxInt
	}
	more, cut := false, false
	err := s.waiting(q, scope, func(n int, at *located) bool {
		if more = n >= room; more {
			return false
		}
		if cut = n > 0 && s.Spent(); cut {
			return false
		}
		if clearing {
			at.rec.Suspect = false
		} else {
			q.starting--
			s.start(at.id)
		}
		s.unblock(at)
		s.place(at.lane, keys.SinceOf(keys.ID(at.id)), at.id, at.rec.Encode())
		return true
	})
	switch {
	case err != nil:
		return err
	case cut:
		s.wake(q, scope, keys.ID{}, keys.WakeUp)
		return nil
	}
	s.Effects.Suspects.Freed += q.starting
	q.starting = 0
	if q.heldIn == s.windows.pass { // perhaps after those that were read
		s.noteSuspects(q)
	} else if !more {
		s.forgetSuspects(q)
	}
	return nil
}

// start gives a suspect a place, or begins its time anew.
func (s *State) start(id keys.ID) {
	c := &s.suspects
	if c.started == nil {
		c.started = make(map[keys.ID]uint64)
	}
	at := s.Now + s.config.SuspectFor
	c.started[id] = at
	c.order = append(c.order, startedSuspect{id, at})
}

// beginSuspect notes that a suspect is at work.
func (s *State) beginSuspect(ls *lease) {
	if s.config.Replicated && ls.local {
		s.countAtWork(ls.worker, 1)
	}
	if _, ok := s.suspects.started[ls.id]; ok {
		s.start(ls.id)
	}
}

// endSuspect notes that the attempt of a suspect has ended.
func (s *State) endSuspect(ls *lease) {
	c := &s.suspects
	if s.config.Replicated && ls.local {
		s.countAtWork(ls.worker, -1)
	}
	if _, ok := c.started[ls.id]; ok {
		delete(c.started, ls.id)
		s.Effects.Suspects.Passed++
	}
}

// countAtWork adds to the suspects that a worker has.
func (s *State) countAtWork(worker string, n int) {
	c := &s.suspects
	if c.atWork == nil {
		c.atWork = make(map[string]int)
	}
	if c.atWork[worker] += n; c.table != nil {
		c.table.SetAtWork(worker, c.atWork[worker])
	}
	if c.atWork[worker] == 0 {
		delete(c.atWork, worker)
	}
}

// freePlace gives the place of a suspect back, if it has one: before its lease ends, if that tells
// nothing, or before it leaves its lane.
func (s *State) freePlace(id keys.ID) {
	if _, ok := s.suspects.started[id]; ok {
		delete(s.suspects.started, id)
		s.Effects.Suspects.Freed++
	}
}

// passSuspects ends the places of suspects that have been at work for long.
func (s *State) passSuspects() {
	c := &s.suspects
	for ; s.passSuspectsIsDue() && !s.Spent(); c.order = c.order[1:] {
		if first := c.order[0]; c.started[first.id] == first.at {
			delete(c.started, first.id)
			s.Effects.Suspects.Passed++
		}
	}
	if len(c.order) == 0 {
		c.order = nil
	}
}

func (s *State) passSuspectsIsDue() bool { return s.nextPass() <= s.Now }

// nextPass returns when passSuspects has something to do, as instant.Now; Never: never.
func (s *State) nextPass() uint64 {
	if len(s.suspects.order) == 0 {
		return Never
	}
	return s.suspects.order[0].at
}

// crashedTooOften reports whether a task has been at work in too many crashes.
func (s *State) crashedTooOften(rec *record.Record) bool {
	return uint64(rec.Crashes) >= crashesPerAttempt*uint64(s.maxAttempts(rec))
}
