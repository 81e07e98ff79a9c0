package dispatch

import (
	"log/slog"
	"maps"
	"sync"
	"time"

	"codeq/internal/engine"
)

// SlowStart bounds how many suspects begin at once in a process, over all its shards: one, then
// twice as many each time those that have begun have passed (engine.Effects). So a task that
// ends the process is soon alone, and tasks that do no harm are soon all at work again. If other
// tasks are ready when the process begins, the first suspect leaves them a moment: one of them may
// be the reason for an end as well, and a suspect would be taken for it.
//
// A SlowStart is safe for concurrent use. Its zero value is ready to use.
type SlowStart struct {
	mu      sync.Mutex // guards what follows
	width   int        // places of the current round; 0: it is the first one
	taken   int        // of them
	running int        // of those, the ones that have not passed
	passed  int
	crashed uint64                // see Counts
	moment  time.Duration         // that is left to other tasks
	begins  time.Time             // when that is over; zero: no place was asked for
	waiting map[suspects]struct{} // were refused since the last place became free
	shards  map[*Dispatcher]int   // of running, those of each shard
	behind  int                   // shards that have not ended with all tasks of the crash taken back

	atWork  map[*Dispatcher]map[string]int // suspects of the shards of the process, by worker
	crashes map[string]workerCrash         // of the processes of workers; in a cluster
}

// workerCrash is the crash of the process of a worker, for the leases that end until a time.
type workerCrash struct {
	suspects int // that were at work
	partial  bool
	until    time.Time
}

// suspects are those of a queue in a shard.
type suspects struct {
	claims *Dispatcher
	queue  string
}

// maxWidth is more than all tasks at work.
const maxWidth = 1 << 30

// moments is the number of moments until a suspect passes.
const moments = 240

// Begin prepares the shards of a process, before the first group: killed says that the one before
// has died, and a suspect passes after a time. It logs the number of tasks that were at work then.
func (s *SlowStart) Begin(shards []*engine.State, killed bool, passes time.Duration, log *slog.Logger) {
	if !killed {
		return
	}
	tasks, suspects, others := 0, 0, false
	for _, rules := range shards {
		c := rules.AtWork()
		tasks, suspects, others = tasks+c.Tasks, suspects+c.Suspects, others || c.Others
		defer func() { c.Suspects = suspects }()
	}
	if tasks > 0 {
		log.Warn("tasks were at work when the process died", "tasks", tasks, "suspects", suspects)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behind = len(shards)
	if others || suspects > 0 { // those that are cleared are others
		s.moment = passes / moments
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

// join makes a shard one of those of the process.
func (s *SlowStart) join(shard *Dispatcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.atWork == nil {
		s.atWork = make(map[*Dispatcher]map[string]int)
	}
	s.atWork[shard] = make(map[string]int)
}

// shardSuspects counts the suspects of a shard in the table of its process.
type shardSuspects Dispatcher

// SetAtWork implements the table of the rules.
func (d *shardSuspects) SetAtWork(worker string, n int) {
	s := d.slow
	s.mu.Lock()
	defer s.mu.Unlock()
	atWork := s.atWork[(*Dispatcher)(d)]
	if atWork[worker] = n; n == 0 {
		delete(atWork, worker)
	}
}

// Crash implements the table of the rules. The process knows all suspects if it leads all shards.
func (d *shardSuspects) Crash(worker string, lasts uint64) (suspects int, partial bool, left uint64) {
	s, now := d.slow, d.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.crashes, func(_ string, c workerCrash) bool { return !now.Before(c.until) })
	c, ok := s.crashes[worker]
	if !ok {
		c = workerCrash{partial: len(s.atWork) < d.shards, until: now.Add(time.Duration(lasts) * time.Millisecond)}
		for _, atWork := range s.atWork {
			c.suspects += atWork[worker]
		}
		if s.crashes == nil {
			s.crashes = make(map[string]workerCrash)
		}
		s.crashes[worker] = c
	}
	own := s.atWork[(*Dispatcher)(d)][worker] // the shard may have come later
	return max(c.suspects, own), c.partial, uint64(c.until.Sub(now) / time.Millisecond)
}

// take takes a place. If there is none, the queue is opened when there may be one, or wait is how
// long that takes.
func (s *SlowStart) take(of suspects, now time.Time) (ok bool, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begins.IsZero() {
		s.begins = now.Add(s.moment)
	}
	if now.Before(s.begins) {
		return false, s.begins.Sub(now)
	}
	if s.taken < max(s.width, 1) {
		if s.shards == nil {
			s.shards = make(map[*Dispatcher]int)
		}
		s.shards[of.claims]++
		s.taken++
		s.running++
		return true, 0
	}
	if s.waiting == nil {
		s.waiting = make(map[suspects]struct{})
	}
	s.waiting[of] = struct{}{}
	return false, 0
}

// end ends places of a shard, and returns the suspects that may begin now.
func (s *SlowStart) end(shard *Dispatcher, of *engine.Effects) (open map[suspects]struct{}) {
	e := &of.Suspects
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Anew {
		s.width, s.taken, s.passed = 1, s.running, 0
	}
	s.crashed += uint64(e.Crashed)
	s.free(shard, e.Passed+e.Freed)
	s.taken -= e.Freed
	s.passed += e.Passed
	return s.opened()
}

// leave frees the places of a shard that ends, and returns the suspects of the others that may
// begin now.
func (s *SlowStart) leave(shard *Dispatcher) (open map[suspects]struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.atWork, shard)
	maps.DeleteFunc(s.waiting, func(of suspects, _ struct{}) bool { return of.claims == shard })
	n := s.shards[shard]
	if n == 0 {
		return nil
	}
	s.free(shard, n)
	s.taken -= n
	return s.opened()
}

// free ends the run of n suspects of a shard.
func (s *SlowStart) free(shard *Dispatcher, n int) {
	if n == 0 {
		return
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
	}
	open, s.waiting = s.waiting, nil
	return open
}

// startSuspect starts a suspect of a queue for a claim, if the process has a place for it.
func (d *Dispatcher) startSuspect(q *Queue) (started bool) {
	return d.rules.Start(q.Queue, func() bool {
		ok, wait := d.slow.take(suspects{d, q.Name}, d.now())
		if wait > 0 {
			d.Throttle(q, d.rules.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
		}
		return ok
	})
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
			d.Throttle(q, d.rules.Now)
		}
	}
}

// LeaveSlowStart frees the places of the shard, which ends, for those of the other shards. It may
// be called again.
func (d *Dispatcher) LeaveSlowStart() {
	for s := range d.slow.leave(d) {
		s.claims.port.Open(s.queue)
	}
}
