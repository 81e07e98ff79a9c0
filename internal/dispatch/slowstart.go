package dispatch

import (
	"encoding/json"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/engine"
	"codeq/internal/wire"
)

// SlowStart bounds how many suspects begin at once in a process, over all its shards: one, then
// twice as many each time those that have begun have passed (engine.Effects). So a task that
// ends the process is soon alone, and tasks that do no harm are soon all at work again.
//
// A place is drawn among the queues of all shards that have suspects waiting. So the order of
// queues in a claim, or the age of tasks, does not put the same suspects before the others in each
// life of the process. A claim that wants the queue drawn makes its shard start one, whichever
// shard the claim has come to: a backlog of other shards does not hide suspects. If no claim wants
// it for a moment, the place is for any suspect.
//
// The first suspect leaves the others a moment, if there are tasks that are ready when the process
// begins: one of them may be the reason for an end as well, and a suspect would be taken for it.
// For the same reason it waits until those have ended an attempt that were at work beside suspects
// when the process died, for as long as it takes a suspect to pass.
//
// A SlowStart is safe for concurrent use. Its zero value is ready to use.
type SlowStart struct {
	offered atomic.Int32  // number of offers
	process atomic.Uint64 // 0: it has no number yet

	mu      sync.Mutex // guards the fields below
	width   int        // places of the current round; 0: it is the first one
	taken   int        // of them
	running int        // of those, the ones that have not passed
	passed  int
	crashed uint64                // see Counts
	passes  time.Duration         // how long it takes a suspect to pass
	moment  time.Duration         // that is left to other tasks
	asked   time.Time             // when a place was asked for; zero: it was not
	waiting map[suspects]struct{} // were refused since the last place became free
	shards  map[*Dispatcher]int   // of running, those of each shard
	beside  map[*Dispatcher]int   // tasks that suspects come after, by shard
	behind  int                   // shards that have not ended with all tasks of the crash taken back

	offers []suspects            // where suspects wait
	drawn  suspects              // of them, the one that gets the next place; zero: none was drawn
	until  time.Time             // after that, the rest of the places of the round is for all
	wanted map[suspects]struct{} // a claim in another shard waits for the start of one

	ask     func(question []byte, answered func(answers [][]byte)) // see Connect
	atWork  map[*Dispatcher]map[uint64]int                         // suspects of the shards, by process
	crashes map[uint64]*processCrash                               // in a cluster
}

// processCrash is the crash of a process, for the leases that end until a time.
type processCrash struct {
	own      int  // suspects that were at work, of the shards of this process
	suspects int  // of all others that have answered
	asking   bool // they have not answered yet
	partial  bool // some have not
	until    time.Time
}

// suspects are those of a queue in a shard.
type suspects struct {
	claims *Dispatcher
	queue  string
}

// drawnWidth is the widest round with places that are drawn: in wider ones the order of suspects
// matters less.
const drawnWidth = 16

// maxWidth is more than all tasks at work.
const maxWidth = 1 << 30

// moments is the number of moments until a suspect passes.
const moments = 240

// Begin prepares the shards of a process, before the first group: killed says that the one before
// has died. It logs the number of tasks that were at work then. REQUIRES: Join.
func (s *SlowStart) Begin(killed bool, log *slog.Logger) {
	if !killed {
		return
	}
	tasks, suspects, others := 0, 0, false
	for d := range s.atWork {
		c := d.rules.Suspects.AtWork()
		tasks, suspects, others = tasks+c.Tasks, suspects+c.Suspects, others || c.Others
		defer func() { c.Suspects = suspects }()
	}
	if tasks > 0 {
		log.Warn("tasks were at work when the process died", "tasks", tasks, "suspects", suspects)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behind = len(s.atWork)
	if others || suspects > 0 { // those that are cleared are others
		s.moment = s.passes / moments
	}
}

// Recovered reports, after the end of the shards, whether each has taken back all tasks of the
// process before that had died.
func (s *SlowStart) Recovered() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.behind == 0
}

// recovered notes that a shard ends which has.
func (s *SlowStart) recovered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behind = max(s.behind-1, 0)
}

// Counts returns how many tasks have come back to this process since theirs had died, and how many
// suspects have a place that is not over.
func (s *SlowStart) Counts() (crashed uint64, running int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.crashed, s.running
}

// join makes a shard one of those of the process. A suspect passes after a time.
func (s *SlowStart) join(shard *Dispatcher, passes time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.passes = passes
	if s.atWork == nil {
		s.atWork = make(map[*Dispatcher]map[uint64]int)
	}
	s.atWork[shard] = make(map[uint64]int)
}

// shardSuspects counts the suspects of a shard in the table of its process.
type shardSuspects Dispatcher

// SetAtWork implements the table of the rules.
func (d *shardSuspects) SetAtWork(process uint64, n int) {
	s := d.slow
	s.mu.Lock()
	defer s.mu.Unlock()
	atWork := s.atWork[(*Dispatcher)(d)]
	if atWork[process] = n; n == 0 {
		delete(atWork, process)
	}
}

// Crash implements the table of the rules. Unless the process leads all shards, it asks the leaders
// of the others.
func (d *shardSuspects) Crash(process, lasts uint64) (suspects int, partial bool, left uint64, ok bool) {
	s, now := d.slow, d.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.crashes, func(_ uint64, c *processCrash) bool { return !now.Before(c.until) && !c.asking })
	c, known := s.crashes[process]
	if !known {
		c = &processCrash{own: s.suspectsOf(process), until: now.Add(time.Duration(lasts) * time.Millisecond)}
		if s.crashes == nil {
			s.crashes = make(map[uint64]*processCrash)
		}
		s.crashes[process] = c
		led := len(s.atWork)
		if c.partial = led < d.shards; c.partial && s.ask != nil {
			c.asking = true
			s.ask(wire.AppendJSON(nil, suspectsQuestion{askForSuspects, process}), func(answers [][]byte) {
				s.mu.Lock()
				defer s.mu.Unlock()
				for _, body := range answers {
					var of suspectsAnswer
					if json.Unmarshal(body, &of) == nil {
						led += of.Shards
						c.suspects += of.Suspects
					}
				}
				c.asking, c.partial = false, led < d.shards
			})
		}
	}
	if c.asking {
		return 0, false, 0, false
	}
	own := s.atWork[(*Dispatcher)(d)][process] // the shard may have come later
	return max(c.own, own) + c.suspects, c.partial, uint64(max(c.until.Sub(now), 0) / time.Millisecond), true
}

// Crashed implements the table of the rules.
func (d *shardSuspects) Crashed(process uint64, suspects int, partial bool, lasts uint64) {
	s := d.slow
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.crashes[process]; known {
		return
	}
	if s.crashes == nil {
		s.crashes = make(map[uint64]*processCrash)
	}
	until := d.now().Add(time.Duration(lasts) * time.Millisecond)
	s.crashes[process] = &processCrash{own: suspects, partial: partial, until: until}
}

// suspectsOf returns how many suspects of the shards of this process a process has.
func (s *SlowStart) suspectsOf(process uint64) (n int) {
	for _, atWork := range s.atWork {
		n += atWork[process]
	}
	return n
}

// Connect connects the processes of a cluster. ask asks the others for their Answer, and calls
// answered with those that have come, in a while and on another goroutine.
func (s *SlowStart) Connect(ask func(question []byte, answered func(answers [][]byte))) { s.ask = ask }

// suspectsQuestion asks a process for the suspects of another one that has died. It is JSON, and so
// is the answer. Do has the kind, as in all questions of nodes.
type suspectsQuestion struct {
	Do      string
	Process uint64
}

const askForSuspects = "suspects"

// suspectsAnswer is about the tasks of the shards that a process leads.
type suspectsAnswer struct {
	Suspects int // at work, or when the process died
	Shards   int // their number
}

// Answer answers a question of another process of the cluster; nil: it is for others.
func (s *SlowStart) Answer(question []byte) []byte {
	var of suspectsQuestion
	if err := json.Unmarshal(question, &of); err != nil || of.Do != askForSuspects {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.suspectsOf(of.Process)
	if c := s.crashes[of.Process]; c != nil {
		n = max(n, c.own)
	}
	return wire.AppendJSON(nil, suspectsAnswer{n, len(s.atWork)})
}

// Process returns the number of this process, which no other has.
func (s *SlowStart) Process() uint64 {
	for s.process.Load() == 0 {
		s.process.CompareAndSwap(0, rand.Uint64())
	}
	return s.process.Load()
}

// take takes a place. If there is none, the queue is opened when there may be one, or wait is how
// long that takes at most.
func (s *SlowStart) take(of suspects, now time.Time) (ok bool, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait = s.holds(now); wait > 0 || s.taken >= max(s.width, 1) {
		s.refuse(of)
		return false, wait
	}
	if s.draw(now); of != s.drawn && now.Before(s.until) {
		s.refuse(of)
		return false, s.until.Sub(now)
	}
	if s.shards == nil {
		s.shards = make(map[*Dispatcher]int)
	}
	s.shards[of.claims]++
	s.taken++
	s.running++
	delete(s.wanted, of)
	if of == s.drawn && now.Before(s.until) {
		s.drawNone()
	}
	return true, 0
}

// holds returns how long the first suspect waits for other tasks.
func (s *SlowStart) holds(now time.Time) time.Duration {
	if s.asked.IsZero() {
		s.asked = now
	}
	hold := s.moment
	if len(s.beside) > 0 {
		hold = max(hold, s.passes)
	}
	return max(s.asked.Add(hold).Sub(now), 0)
}

// refuse notes suspects that wait for a place.
func (s *SlowStart) refuse(of suspects) {
	if s.waiting == nil {
		s.waiting = make(map[suspects]struct{})
	}
	s.waiting[of] = struct{}{}
}

// draw draws the suspects that get the next place, unless some were drawn, or the place is for all.
func (s *SlowStart) draw(now time.Time) {
	switch {
	case s.drawn.claims != nil && slices.Contains(s.offers, s.drawn), len(s.offers) == 0:
		return
	case s.width > drawnWidth, !s.until.IsZero() && !now.Before(s.until):
		return
	}
	s.drawn = s.offers[rand.IntN(len(s.offers))]
	s.until = now.Add(s.passes / moments)
	if _, ok := s.waiting[s.drawn]; ok { // claims wait there
		delete(s.waiting, s.drawn)
		s.drawn.claims.port.Open(s.drawn.queue)
	}
}

// drawNone ends a draw.
func (s *SlowStart) drawNone() { s.drawn, s.until = suspects{}, time.Time{} }

// want asks for the start of a suspect of a queue, for a claim that is tried in a shard. If it may
// start in another shard, that is opened.
func (s *SlowStart) want(queue string, in *Dispatcher, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds(now) > 0 || s.taken >= max(s.width, 1) {
		return
	}
	s.draw(now)
	to := s.drawn
	if !now.Before(s.until) {
		to = suspects{}
		n := 0
		for _, o := range s.offers {
			if o.queue == queue {
				if n++; rand.IntN(n) == 0 {
					to = o
				}
			}
		}
	}
	if to.queue != queue || to.claims == nil || to.claims == in {
		return
	}
	if _, ok := s.wanted[to]; !ok {
		if s.wanted == nil {
			s.wanted = make(map[suspects]struct{})
		}
		s.wanted[to] = struct{}{}
		to.claims.port.Open(queue)
	}
}

// offeredQueues returns the queues of the offers.
func (s *SlowStart) offeredQueues() (queues []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.offers {
		queues = append(queues, o.queue)
	}
	slices.Sort(queues)
	return slices.Compact(queues)
}

// isWanted reports whether a claim in another shard waits for the start of a suspect.
func (s *SlowStart) isWanted(of suspects) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.wanted[of]
	delete(s.wanted, of)
	return ok
}

// offer says whether suspects wait for places.
func (s *SlowStart) offer(of suspects, waits bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if waits {
		s.offers = append(s.offers, of)
	} else {
		s.offers = slices.DeleteFunc(s.offers, func(o suspects) bool { return o == of })
		if delete(s.wanted, of); of == s.drawn {
			s.drawNone()
		}
	}
	s.offered.Store(int32(len(s.offers)))
}

// end ends places of a shard, and returns the suspects that may begin now.
func (s *SlowStart) end(shard *Dispatcher, of *engine.Effects) (open map[suspects]struct{}) {
	e := &of.Suspects
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Anew {
		s.width, s.taken, s.passed = 1, s.running, 0
		s.asked, s.moment = time.Time{}, s.passes/moments
		s.drawNone()
	}
	s.crashed += uint64(e.Crashed)
	if n := e.Beside - e.Apart; n != 0 {
		if s.beside == nil {
			s.beside = make(map[*Dispatcher]int)
		}
		if s.beside[shard] += n; s.beside[shard] <= 0 {
			delete(s.beside, shard)
		}
	}
	s.free(shard, e.Passed+e.Freed-e.Late)
	s.taken += e.Late - e.Freed
	s.passed += e.Passed
	return s.opened()
}

// leave frees the places of a shard that ends, and returns the suspects of the others that may
// begin now.
func (s *SlowStart) leave(shard *Dispatcher) (open map[suspects]struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.atWork, shard)
	delete(s.beside, shard)
	ofShard := func(of suspects, _ struct{}) bool { return of.claims == shard }
	maps.DeleteFunc(s.waiting, ofShard)
	maps.DeleteFunc(s.wanted, ofShard)
	s.offers = slices.DeleteFunc(s.offers, func(of suspects) bool { return of.claims == shard })
	if s.offered.Store(int32(len(s.offers))); s.drawn.claims == shard {
		s.drawNone()
	}
	n := s.shards[shard]
	s.free(shard, n)
	s.taken -= n
	return s.opened()
}

// free ends the run of n suspects of a shard.
func (s *SlowStart) free(shard *Dispatcher, n int) {
	if n == 0 {
		return
	}
	if s.shards == nil {
		s.shards = make(map[*Dispatcher]int)
	}
	s.running -= n
	if s.shards[shard] -= n; s.shards[shard] == 0 {
		delete(s.shards, shard)
	}
}

// opened begins the next round if it is time, and returns the suspects that may begin now.
func (s *SlowStart) opened() (open map[suspects]struct{}) {
	if s.taken >= max(s.width, 1) && s.running > 0 {
		return nil
	}
	if s.running == 0 && s.passed > 0 && s.taken >= max(s.width, 1) {
		s.width, s.taken, s.passed = min(2*max(s.width, 1), maxWidth), 0, 0
		s.drawNone()
	}
	open, s.waiting = s.waiting, nil
	return open
}

// startSuspect starts a suspect of a queue for a claim, if the process has a place for it.
func (d *Dispatcher) startSuspect(q *Queue) (started bool) {
	return d.rules.Suspects.Start(q.Queue, func() bool {
		ok, wait := d.slow.take(suspects{d, q.Name}, d.now())
		if wait > 0 {
			d.throttleFor(q, wait)
		}
		return ok
	})
}

// mayStart reports whether suspects of the queue may wait for startSuspect.
func (q *Queue) mayStart() bool { return q.Suspects != 0 && q.Stale == 0 && !q.Settings.Paused }

// offer says to the slow start whether suspects of a queue wait for places.
func (d *Dispatcher) offer(q *Queue) {
	if waits := q.mayStart(); waits != q.offered {
		q.offered = waits
		d.slow.offer(suspects{d, q.Name}, waits)
	}
}

// wantSuspect asks other shards to start a suspect of a queue.
func (d *Dispatcher) wantSuspect(queue string) {
	if d.slow.offered.Load() > 0 {
		d.slow.want(queue, d, d.now())
	}
}

// EndSuspects ends the places of suspects of the shard.
func (d *Dispatcher) EndSuspects() {
	e := &d.rules.Effects
	open := d.slow.end(d, e)
	e.Suspects = engine.Effects{}.Suspects
	for s := range open {
		if s.claims != d {
			s.claims.port.Open(s.queue)
		} else if q := d.known(s.queue); q != nil {
			d.throttle(q, d.rules.Now)
		}
	}
}

// EndInOrder is called when the shard ends with all that it has decided stored, and before Close:
// memory says then whether a crash is over.
func (d *Dispatcher) EndInOrder() {
	if d.rules.Suspects.CrashIsOver() {
		d.slow.recovered()
	}
}

// LeaveSlowStart frees the places of the shard, which ends, for those of the other shards. It may
// be called again.
func (d *Dispatcher) LeaveSlowStart() {
	for s := range d.slow.leave(d) {
		s.claims.port.Open(s.queue)
	}
}
