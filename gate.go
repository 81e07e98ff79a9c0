package codeq

import (
	"codeq/internal/engine"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// next returns the lane whose first task a claim of the queue gets, with room
// in the limits taken for it: grant follows, or leaveGate. Pending is as in state.next.
func (s *shard) next(q *engine.Queue) (l *engine.Lane, pending bool) { return s.nextOf(q, 0) }

// nextOf is next for a batch that ends before a task of a lower rank, since other shards have
// one of that rank: what was more urgent here may have been parked.
func (s *shard) nextOf(q *engine.Queue, rank uint64) (l *engine.Lane, pending bool) {
	if q.Gated && !q.Settings.Paused && !s.mayPass(s.claimsOf(q)) {
		return nil, false // without a look at the lanes, which might have them refilled in vain
	}
	l, pending = s.State.Next(q, rank)
	if l != nil && q.Gated && !s.passGate(s.claimsOf(q)) {
		return nil, false
	}
	return l, pending
}

// gateway is what the claims of a queue have to pass in all its shards: a gate, or
// in a cluster permits.
type gateway interface {
	// look reports whether enter has a place. When it has none, wait is how long
	// until the rate has one, or 0 if the shard's claims of the queue are fed
	// when there may be one.
	look(s *shard, now time.Time) (ok bool, wait time.Duration)
	enter(s *shard, now time.Time) (ok bool, wait time.Duration)
	// leave gives n places back, and returns who waits for them.
	leave(n int) (wake []*shard)
}

// gateTable is the gates of the queues that have ever needed one, for all
// shards of a process that has them all.
type gateTable struct {
	mu      sync.Mutex // guards byQueue; taken before that of a gate
	byQueue map[string]*gate
}

func newGateTable() *gateTable { return &gateTable{byQueue: make(map[string]*gate)} }

// set has the gate of a queue go by its settings, and returns it; nil if there
// is none. Fresh is as for gate.set.
func (t *gateTable) set(queue string, c engine.Configured, fresh bool) *gate {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.byQueue[queue]
	if g == nil && (c.Settings.Concurrency > 0 || c.Settings.Rate > 0) {
		g = new(gate)
		t.byQueue[queue] = g
	}
	if g != nil {
		g.set(c, fresh, time.Now())
	}
	return g
}

// gate is what the claims of a queue have to pass in all shards of a process:
// its limit of concurrency, and its rate. Each shard enters its leases when it
// first goes by settings that need the gate, or by later ones.
type gate struct {
	mu      sync.Mutex // guards what follows
	version uint64     // of the settings that it goes by
	limit   int        // 0: none
	leased  int
	rate    *rate.Limiter
	waiting []*shard // had to turn claims away for want of room
}

// enter takes a place. When there is none, wait is how long until the rate has
// one, or 0 if the end of a lease will tell.
func (g *gate) enter(s *shard, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ok, wait = g.room(s, now); ok {
		g.leased++
		if g.rate != nil {
			g.rate.AllowN(now, 1)
		}
	}
	return ok, wait
}

// look is enter without taking the place.
func (g *gate) look(s *shard, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.room(s, now)
}

// room tells what enter does. REQUIRES: mu is held.
func (g *gate) room(s *shard, now time.Time) (ok bool, wait time.Duration) {
	if g.limit > 0 && g.leased >= g.limit {
		g.waitFor(s)
		return false, 0
	}
	if g.rate != nil {
		r := g.rate.ReserveN(now, 1)
		wait = r.DelayFrom(now)
		r.CancelAt(now)
	}
	return wait == 0, wait
}

func (g *gate) waitFor(s *shard) {
	for _, w := range g.waiting {
		if w == s {
			return
		}
	}
	g.waiting = append(g.waiting, s)
}

// leave gives n places back, and returns who waits for them. A negative n is
// for leases that were granted before there was a gate.
func (g *gate) leave(n int) (wake []*shard) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leased -= n
	if g.limit == 0 || g.leased < g.limit {
		wake, g.waiting = g.waiting, nil
	}
	return wake
}

// set changes the limits; the first shard that goes by a version does so for all.
// Fresh is for a queue that has been open since before.
func (g *gate) set(c engine.Configured, fresh bool, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.Version <= g.version {
		return
	}
	set := c.Settings
	g.version, g.limit = c.Version, set.Concurrency
	limit := rate.Limit(set.Rate)
	switch {
	case set.Rate == 0:
		g.rate = nil
	case g.rate == nil:
		g.rate = rate.NewLimiter(limit, burstOf(set))
		if !fresh { // what was spent before a restart is not known
			g.rate.AllowN(now, burstOf(set))
		}
	default:
		g.rate.SetLimitAt(now, limit)
		g.rate.SetBurstAt(now, burstOf(set))
	}
}

// passGate takes a place for a claim, or sees to it that the queue's claims
// are served when there may be one.
func (s *shard) passGate(c *queueClaims) bool { return s.tryGate(c, c.gate.enter) }

// mayPass is passGate without taking the place.
func (s *shard) mayPass(c *queueClaims) bool { return s.tryGate(c, c.gate.look) }

func (s *shard) tryGate(c *queueClaims, try func(*shard, time.Time) (bool, time.Duration)) bool {
	ok, wait := try(s, time.Now())
	if !ok {
		c.shut = true
		s.publish(c.queue)
	}
	if wait > 0 {
		s.throttle(c, s.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
	}
	return ok
}

// leaveGate gives a place back.
func (s *shard) leaveGate(c *queueClaims) {
	if c.gate == nil {
		return
	}
	for _, w := range c.gate.leave(1) {
		s.openGate(w, c)
	}
}

// limitClaims has claims of a queue go by its settings. Fresh is as for gate.set.
func (s *shard) limitClaims(c *queueClaims, fresh bool) {
	q := c.queue
	if s.gates != nil {
		if g := s.gates.set(q.Name, q.Configured, fresh); g != nil && c.gate == nil {
			c.gate = g
			g.leave(-int(q.Counts.Leased))
		}
	} else {
		s.permit(c)
		if s.index == 0 {
			s.allocate(c, fresh)
		}
	}
	q.Gated = c.gate != nil
	s.open(c)
}

// openGate has a shard serve the claims that wait for a queue.
func (s *shard) openGate(w *shard, c *queueClaims) {
	if w == s {
		s.throttle(c, s.Now)
		return
	}
	_ = w.inbox.pass(&serveOp{queue: c.queue.Name}) // one that is closing serves nobody
}

// throttle has the claims that wait for a queue served at a time of the
// monotonic clock, or sooner.
func (s *shard) throttle(c *queueClaims, at uint64) {
	if c.throttledAt >= 0 {
		if c.opensAt <= at {
			return
		}
		s.throttled.Remove(c)
	}
	c.opensAt = at
	s.throttled.Push(c)
}

func (s *shard) openGates() {
	for s.gatesAreDue() && !s.Spent() {
		c := s.throttled.Pop()
		s.open(c)
		if c.allocator != nil {
			s.allot(c.allocator)
		}
	}
}

func (s *shard) gatesAreDue() bool { return s.throttled.Next() <= s.Now }

// serveOp serves the claims that wait for a queue.
type serveOp struct{ queue string }

func (op *serveOp) resolve(s *shard) {
	if c := s.knownClaims(op.queue); c != nil {
		s.open(c)
	}
}

func (op *serveOp) settle(error) {}
