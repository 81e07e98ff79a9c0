package engine

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// When a process dies with tasks at work, one of them may be the reason, and will be again. So they
// are suspects: they wait in scopes of their queue, and start slowly, a few at a time over the
// whole process, while all other tasks go on. A suspect that ends its attempt, well or not, has not
// killed the process, and is no longer a suspect. A suspect that is at work when the process dies
// again stays one, and the waiting ones are cleared. The places of the slow start are with the
// owner (dispatch.SlowStart), which takes one for each call of Start; Effects.Suspects says when
// places are over.
//
// Their order is random, and different after each crash: if long good tasks always came before the
// task that kills the process, they would be at work at each crash too, and nothing would show the
// difference.
//
// A task that was at work in a crash beside suspects may be the reason as well. It is no suspect,
// since by the rule suspects come first. But suspects start after it: they wait until it has ended
// an attempt, for as long as the owner wants. If the process dies meanwhile, no suspect counts as
// the reason.

// suspects is the memory of the suspects of a shard. Their records say that they are.
type suspects struct {
	*round
	names  *names
	leases *leases
	ties   *ties

	queues   []*Queue // some may wait there
	unread   []*Queue // perhaps there, too: findSuspects looks
	started  map[keys.ID]suspectStart
	order    []startedSuspect     // by time, with entries that started does not have any more
	clearing bool                 // those that wait are suspects no more; no lease is taken back meanwhile
	beside   map[keys.ID]struct{} // tasks that were at work beside suspects in a crash, and have not ended an attempt since

	last   *crash         // of the process that had the shard before; nil: it has not crashed
	atWork map[uint64]int // suspects that are leased, by process; in a cluster only
	table  suspectTable   // likewise; nil: the shard counts alone
}

// suspectStart is the start of a suspect. It ends with the attempt, when the task leaves its lane,
// or if the suspect is at work when its place passes.
type suspectStart struct {
	queue  *Queue
	at     uint64 // when its place passes, as Instant.Now; 0: it has passed
	atWork bool
}

// startedSuspect is a suspect with a place of the slow start, and the time at which it passes.
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
	// SetAtWork says how many suspects of the shard a process has.
	SetAtWork(process uint64, n int)
	// Crash returns how many suspects a process had at work when it died, and whether there may
	// have been more. The first shard that asks decides, for lasts ms; left is the rest. If it is
	// not known yet, since other leaders are asked, ok is false.
	Crash(process, lasts uint64) (suspects int, partial bool, left uint64, ok bool)
	// Crashed sets the result of Crash for lasts ms, unless that is known: an earlier leader has
	// decided.
	Crashed(process uint64, suspects int, partial bool, lasts uint64)
}

// shareSuspects begins to count the suspects at work in a table of all shards of the process.
func (su *suspects) shareSuspects(t suspectTable) {
	su.table = t
	for process, n := range su.atWork {
		t.SetAtWork(process, n)
	}
	for process, c := range su.leases.crashes {
		t.Crashed(process, c.Suspects, c.Partial, c.until-min(su.Now, c.until))
	}
}

// processCrash is the crash of a process of a cluster. Its leases end one after the other.
type processCrash struct {
	crash
	until uint64 // no lease of the process ends later, as Instant.Now
}

// suspectEffects are tasks that have come back from a crash, and places that are over.
type suspectEffects struct {
	Crashed int
	Passed  int  // their tasks have ended an attempt, or were started Config.SuspectFor ago
	Freed   int  // their tasks were given back or canceled, or there were none
	Late    int  // suspects that take a place at work, since theirs has passed before
	Beside  int  // tasks that suspects come after from now on
	Apart   int  // of those, the ones that have ended an attempt
	Anew    bool // there are new suspects: the slow start begins anew
}

// IsZero reports whether there are none.
func (e *suspectEffects) IsZero() bool {
	return e.Crashed|e.Passed|e.Freed|e.Late|e.Beside|e.Apart == 0 && !e.Anew
}

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

// AtWork notes that the earlier process of the shard has died, and returns the counts of its tasks
// at work. Before the first group, the caller sets Suspects to the number of all shards.
// REQUIRES: Load, and no group since.
func (su *suspects) AtWork() *crash {
	c := new(crash)
	for _, ls := range su.leases.all.All() {
		if ls.over && ls.local {
			c.Tasks++
			if ls.suspect {
				c.Suspects++
			}
		}
	}
	for _, q := range su.names.Queues {
		c.Others = c.Others || q.Counts.Ready > 0
	}
	su.last, su.clearing = c, true
	return c
}

// CrashIsOver reports whether all tasks of the process of AtWork have been taken back.
func (su *suspects) CrashIsOver() bool {
	if su.last == nil {
		return true
	}
	for _, ls := range su.leases.all.All() {
		if ls.over && ls.local {
			return false
		}
	}
	return true
}

// crashOf returns the crash that has ended a lease; nil: the lease has expired without one. In a
// cluster, a lease of Run that was not renewed means that its process is gone. If ok is false, more
// is known about the crash in a moment.
func (su *suspects) crashOf(ls *lease) (c *crash, ok bool) {
	switch {
	case !ls.local:
		return nil, true
	case ls.over:
		return su.last, true
	case !su.config.Replicated || !ls.handled:
		return nil, true
	}
	of, process := su, ls.record.process
	e := su.leases.crashes[process]
	if e == nil || e.until < su.Now {
		maps.DeleteFunc(su.leases.crashes, func(_ uint64, old *processCrash) bool { return old.until < su.Now })
		e = &processCrash{until: su.Now + 2*ls.duration}
		if e.Suspects, e.Partial = of.atWork[process], process == 0; of.table != nil && process != 0 {
			var left uint64
			if e.Suspects, e.Partial, left, ok = of.table.Crash(process, 2*ls.duration); !ok {
				return nil, false
			}
			e.until = su.Now + left
		}
		if su.leases.crashes == nil {
			su.leases.crashes = make(map[uint64]*processCrash)
		}
		su.leases.crashes[process] = e
		su.leases.writeLeaseClock()
		su.Effects.Suspects.Anew = true
		if of.clearing = e.Suspects > 0; of.clearing {
			of.unread = append(of.unread, of.queues...)
		}
	}
	return &e.crash, true
}

// storedCrashes returns the crashes that may have leases left, for the next leader: without them,
// that leader would count only the suspects with leases that it finds.
func (le *leases) storedCrashes() (stored []keys.CrashValue) {
	for process, c := range le.crashes {
		if c.until >= le.Now {
			stored = append(stored, keys.CrashValue{Process: process, Until: c.until + le.clock.Ahead, Suspects: uint64(c.Suspects), Partial: c.Partial})
		}
	}
	slices.SortFunc(stored, func(a, b keys.CrashValue) int { return cmp.Compare(a.Process, b.Process) })
	return stored
}

// loadCrashes goes on with the crashes that an earlier leader has decided.
func (le *leases) loadCrashes(stored []keys.CrashValue) {
	for _, c := range stored {
		if c.Until < le.leaseClock() {
			continue
		}
		if le.crashes == nil {
			le.crashes = make(map[uint64]*processCrash)
		}
		le.crashes[c.Process] = &processCrash{crash{Suspects: int(c.Suspects), Partial: c.Partial}, c.Until - le.clock.Ahead}
	}
}

// isClearing reports whether leases wait to be taken back until suspects are cleared. Without room
// for that those that wait stay suspects, since leases end on a fuller disk, too.
func (su *suspects) isClearing() bool {
	c := su
	c.clearing = c.clearing && su.HasRoom(RoomLow) && (c.last == nil || c.last.Suspects > 0) && len(c.unread)+len(c.queues) > 0
	return c.clearing
}

// crash takes back a task from a process that has died.
func (s *State) crash(ls *lease, c *crash) {
	rec, err := s.Leases.finishAttempt(ls, attemptEnd{how: EventExpired, cause: causeCrash})
	if s.fails(err) {
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
	s.Names.emit(EventExpired, ls.lane, ls.id, rec.Attempts, causeCrash)
	// what does not count as an attempt ends no task, though the process before has allowed more
	most := s.config.maxAttempts(ls, &rec, nil)
	if cost == costAttempt && rec.Attempts >= most || crashedTooOften(&rec, most) {
		rec.Suspect = false
		s.toDeadLetter(ls, &rec)
		return
	}
	if s.giveBack(ls, &rec); !suspected {
		s.Suspects.noteBeside(ls.id)
	}
}

// causeCrash is the error of an attempt that has ended with its process.
const causeCrash = "the process died"

// hold makes a suspect wait that would be ready otherwise. It keeps the turn of its group.
func (su *suspects) hold(l *Lane, id keys.ID, leases uint32, rec []byte) {
	part := keys.SuspectPartOf(id, leases)
	su.ties.block(l, keys.SuspectScope(l.queue.Name, part), id, rec)
	l.queue.heldIn = su.begun
	su.noteSuspects(l.queue, part)
}

// noteSuspects notes that suspects may wait in a scope of a queue, for claims, or to be cleared.
func (su *suspects) noteSuspects(q *Queue, part int) {
	if q.Suspects == 0 {
		su.queues = append(su.queues, q)
	}
	if q.Suspects |= 1 << part; su.isClearing() {
		su.wakeSuspects(q)
	} else {
		su.feed(q)
	}
}

// findSuspects notes the scopes that may have waiting suspects: in queues with blocked tasks when
// the shard is loaded, and in queues with suspects when these are cleared.
func (su *suspects) findSuspects() {
	c := su
	for ; len(c.unread) > 0 && su.Broken == nil && !su.Spent(); c.unread = c.unread[1:] {
		if q := c.unread[0]; su.names.Queues[q.Name] == q {
			if su.Broken = su.findSuspectsOf(q); q.Suspects != 0 && su.isClearing() {
				su.wakeSuspects(q) // though none may be left in its scopes: that ends the clearing of q
			}
		}
		c.unread[0] = nil
	}
	if len(c.unread) == 0 {
		c.unread = nil
	}
}

// findSuspectsOf is findSuspects for a queue. Its scopes of suspects follow each other.
func (su *suspects) findSuspectsOf(q *Queue) error {
	scopeOf := func(part int) uint64 { return keys.SuspectScope(q.Name, part) }
	return su.Scopes(q.Number, scopeOf(0), scopeOf(keys.SuspectParts-1), func(scope uint64) {
		if part := keys.SuspectPart(scope); scope == scopeOf(part) {
			su.noteSuspects(q, part)
		}
	})
}

// wakeSuspects makes the next group start or clear suspects of a queue. REQUIRES: some may wait.
func (su *suspects) wakeSuspects(q *Queue) {
	su.ties.wake(q, keys.SuspectScope(q.Name, bits.TrailingZeros16(q.Suspects)), keys.ID{}, keys.WakeUp)
}

// forgetSuspects notes that none wait any more.
func (su *suspects) forgetSuspects(q *Queue) {
	q.Suspects = 0
	for i, other := range su.queues {
		if other == q {
			last := len(su.queues) - 1
			su.queues[i] = su.queues[last]
			su.queues[last] = nil
			su.queues = su.queues[:last]
			return
		}
	}
}

// Start starts one more suspect of a queue, in the next group, if one may wait, none is stale, and
// take returns true: it takes a place of the slow start.
func (su *suspects) Start(q *Queue, take func() bool) bool {
	if q.Suspects == 0 || q.Stale > 0 || q.Settings.Paused || su.isClearing() || !su.HasRoom(RoomLow) || !take() {
		return false
	}
	q.starting++
	su.wakeSuspects(q)
	return true
}

// startSuspects moves suspects into their lanes: those with a place, or all while they are cleared.
func (su *suspects) startSuspects(q *Queue) error {
	for left := q.Suspects; left != 0; left &= left - 1 {
		part := bits.TrailingZeros16(left)
		done, err := su.startSuspectsOf(q, part)
		if err != nil || !done {
			return err
		}
		if q.heldIn != su.begun { // or else one may wait after those that were read
			q.Suspects &^= 1 << part
		}
	}
	su.Effects.Suspects.Freed += q.starting
	q.starting = 0
	if q.Suspects == 0 {
		su.forgetSuspects(q)
	} else if su.isClearing() {
		su.wakeSuspects(q)
	} else {
		su.feed(q)
	}
	return nil
}

// startSuspectsOf is startSuspects for one of the scopes. done: none waits there any more.
func (su *suspects) startSuspectsOf(q *Queue, part int) (done bool, err error) {
	room := q.starting
	clearing := su.isClearing()
	if clearing {
		room = math.MaxInt
	}
	more, cut := false, false
	err = su.ties.waiting(q, keys.SuspectScope(q.Name, part), func(n int, at *located) bool {
		if more = n >= room; more {
			return false
		}
		if cut = n > 0 && su.Spent(); cut {
			return false
		}
		if clearing {
			at.rec.Suspect = false
		} else {
			q.starting--
			su.start(at.id, suspectStart{queue: q})
		}
		su.names.unblock(at)
		su.names.place(at.lane, keys.SinceOf(keys.ID(at.id)), at.id, at.rec.Encode())
		return true
	})
	if cut {
		su.wakeSuspects(q)
	}
	return !more && !cut, err
}

// start gives a suspect a place, or begins its time anew.
func (su *suspects) start(id keys.ID, st suspectStart) {
	c := su
	if c.started == nil {
		c.started = make(map[keys.ID]suspectStart)
	}
	st.at = su.Now + su.config.SuspectFor
	c.started[id] = st
	c.order = append(c.order, startedSuspect{id, st.at})
}

// beginSuspect notes that a suspect is at work. It returns false if the lease is of none: the task
// was started in an earlier life of the process, and was not at work when that ended.
func (su *suspects) beginSuspect(ls *lease) bool {
	st, ok := su.started[ls.id]
	if !ok {
		ls.suspect = false
		return false
	}
	if st.at == 0 {
		st.queue.Stale--
		su.Effects.Suspects.Late++
		su.feed(st.queue)
	}
	su.countAtWork(ls, 1)
	su.start(ls.id, suspectStart{queue: st.queue, atWork: true})
	return true
}

// clearSuspect removes the suspicion from the record of a leased task.
func (s *State) clearSuspect(ls *lease) error {
	rec, err := s.Leases.recordOf(ls)
	if err != nil {
		return err
	}
	rec.Suspect = false
	place := keys.Place{Range: keys.Task, Group: ls.lane.number, At: ls.since}
	s.rewrite(&located{id: ls.id, lane: ls.lane, place: place, rec: rec, lease: ls})
	return nil
}

// endSuspect notes that the attempt of a suspect has ended.
func (su *suspects) endSuspect(ls *lease) {
	su.countAtWork(ls, -1)
	if su.endStart(ls.id) {
		su.Effects.Suspects.Passed++
	}
}

// endStart ends the start of a suspect. It returns true if it had a place.
func (su *suspects) endStart(id keys.ID) bool {
	st, ok := su.started[id]
	if !ok {
		return false
	}
	delete(su.started, id)
	if st.at == 0 {
		st.queue.Stale--
		su.feed(st.queue)
	}
	return st.at != 0
}

// noteBeside notes a task that suspects come after, until it has ended an attempt.
func (su *suspects) noteBeside(id keys.ID) {
	if su.beside == nil {
		su.beside = make(map[keys.ID]struct{})
	}
	su.beside[id] = struct{}{}
	su.Effects.Suspects.Beside++
}

// endBeside notes that suspects do not come after a task any more.
func (su *suspects) endBeside(id keys.ID) {
	if _, ok := su.beside[id]; ok {
		delete(su.beside, id)
		su.Effects.Suspects.Apart++
	}
}

// countAtWork adds to the suspects that the process of a lease has.
func (su *suspects) countAtWork(ls *lease, n int) {
	if !su.config.Replicated || !ls.local {
		return
	}
	c, process := su, ls.record.process
	if c.atWork == nil {
		c.atWork = make(map[uint64]int)
	}
	if c.atWork[process] += n; c.table != nil {
		c.table.SetAtWork(process, c.atWork[process])
	}
	if c.atWork[process] == 0 {
		delete(c.atWork, process)
	}
}

// crashRetry is how often it is asked whether a crash is known, ms.
const crashRetry = 50

// freePlace gives the place of a suspect back, if it has one: before its lease ends, if that tells
// nothing, or before it leaves its lane. Suspects do not come after such a task, either.
func (su *suspects) freePlace(id keys.ID) {
	if su.endStart(id) {
		su.Effects.Suspects.Freed++
	}
	su.endBeside(id)
}

// passSuspects ends the places of suspects that have been at work for long, or were not leased for
// as long.
func (su *suspects) passSuspects() {
	c := su
	for ; su.passSuspectsIsDue() && !su.Spent(); c.order = c.order[1:] {
		first := c.order[0]
		st := c.started[first.id]
		if st.at != first.at {
			continue
		}
		if su.Effects.Suspects.Passed++; st.atWork {
			delete(c.started, first.id)
			continue
		}
		st.queue.Stale++
		st.at = 0
		c.started[first.id] = st
	}
	if len(c.order) == 0 {
		c.order = nil
	}
}

func (su *suspects) passSuspectsIsDue() bool { return su.nextPass() <= su.Now }

// nextPass returns when passSuspects has something to do, as Instant.Now; Never: never.
func (su *suspects) nextPass() uint64 {
	if len(su.order) == 0 {
		return Never
	}
	return su.order[0].at
}

// crashedTooOften reports whether a task with so many attempts was at work in too many crashes.
func crashedTooOften(rec *record.Record, maxAttempts uint32) bool {
	return uint64(rec.Crashes) >= crashesPerAttempt*uint64(maxAttempts)
}

func (su *suspects) recheckIsDue() bool { return len(su.names.rechecks)+len(su.unread) > 0 }

// recheckLimits finds suspects, as leases may wait for them, and adds wakeups for the limits of
// queues that may have room now. Wakeups of limits that are still full do no harm.
func (su *suspects) recheckLimits() {
	su.findSuspects()
	for len(su.names.rechecks) > 0 && su.Broken == nil && !su.Spent() {
		r := su.names.rechecks[0]
		if su.Broken = su.ties.recheckNext(r); su.Broken != nil {
			return
		}
		if r.from == nil {
			su.names.rechecks[0], su.names.rechecks = nil, su.names.rechecks[1:]
			r.queue.rechecks--
			su.names.Rest(r.queue)
		}
	}
}

func (su *suspects) reapIsDue() bool {
	return su.leasesEnd(su.Reap) || su.leases.leaseClockIsDue()
}
