package codeq

import (
	"math"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"golang.org/x/time/rate"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// limitTable is how many tasks of each LimitKey are leased, by scope. All
// tasks of a key lie in one shard, so that its owner alone decides.
type limitTable map[uint64]*limitState

type limitState struct {
	leased int
	parked bool // tasks may wait for room
}

// at returns the state of a scope, which it makes if need be.
func (t limitTable) at(scope uint64) *limitState {
	st := t[scope]
	if st == nil {
		st = new(limitState)
		t[scope] = st
	}
	return st
}

func (t limitTable) enter(scope uint64) { t.at(scope).leased++ }

// full reports whether no further task of a key may be leased.
func (s *shard) full(q *queueState, scope uint64) bool {
	limit := q.settings.ConcurrencyPerKey
	st := s.limits[scope]
	return limit > 0 && st != nil && st.leased >= limit
}

// leaveLimit is the end of a lease of a key.
func (s *shard) leaveLimit(q *queueState, scope uint64) {
	st := s.limits[scope]
	st.leased--
	switch {
	case st.parked:
		s.wake(q, scope, ID{}, wakeUp)
	case st.leased == 0:
		delete(s.limits, scope)
	}
}

// passLimit is for a task that could be leased and will not be: another one of
// its key may have its room.
func (s *shard) passLimit(q *queueState, scope uint64) {
	if st := s.limits[scope]; st != nil && st.parked {
		s.wake(q, scope, ID{}, wakeUp)
	}
}

// next returns the lane whose first task a claim of the queue gets, with room
// in the limits taken for it: grant follows, or leaveGate. Pending is as in head,
// or says that the group has parked as many tasks as it can.
func (s *shard) next(q *queueState) (l *lane, pending bool) { return s.nextOf(q, 0) }

// nextOf is next for a batch that ends before a task of a lower rank, since other shards have
// one of that rank: what was more urgent here may have been parked.
func (s *shard) nextOf(q *queueState, rank uint64) (l *lane, pending bool) {
	if q.settings.Paused || q.gate != nil && !s.mayPass(q) {
		return nil, false // without a look at the lanes, which might have them refilled in vain
	}
	for {
		l, pending = s.head(q)
		if l != nil && rankOf(l.priority) < rank {
			return nil, false
		}
		if l == nil || q.settings.ConcurrencyPerKey == 0 {
			break
		}
		head, err := record.DecodeHead(l.window.FirstRecord())
		if err != nil || head.Limit == 0 || !s.full(q, head.Limit) { // grant reports err
			break
		}
		if s.spent() {
			s.throttle(q, s.now)
			return nil, true
		}
		s.park(l)
		if s.broken != nil {
			return nil, false
		}
	}
	if l != nil && q.gate != nil && !s.passGate(q) {
		return nil, false
	}
	return l, pending
}

// park has the first task of a lane wait for room in the limit of its key.
func (s *shard) park(l *lane) {
	it := s.popFirst(l)
	rec, err := record.Decode(it.Record)
	if err != nil {
		s.broken = err
		return
	}
	s.removeTask(l.number, it.Since, it.ID, false)
	s.rested(l)
	l.queue.counts.Ready--
	rec.Rewritten = true
	s.block(l, rec.Limit, it.ID, rec.Encode())
	s.limits[rec.Limit].parked = true
}

// fillLimit lets as many of the tasks that wait for room go on as there is.
func (s *shard) fillLimit(q *queueState, scope uint64) error {
	room := math.MaxInt
	st := s.limits[scope]
	if limit := q.settings.ConcurrencyPerKey; limit > 0 {
		room = limit
		if st != nil {
			room -= st.leased
		}
	}
	more, cut := false, false
	err := s.waiting(q, scope, func(n int, at *located) bool {
		if n >= room {
			more = true
			return false
		}
		if cut = n > 0 && s.spent(); cut { // its mark was a unit already
			return false
		}
		s.unblock(at)
		s.place(at.lane, keys.SinceOf(keys.ID(at.id)), at.id, at.rec.Encode())
		return true
	})
	if err != nil {
		return err
	}
	if cut {
		s.wake(q, scope, ID{}, wakeUp)
	}
	switch {
	case more || cut:
		s.limits.at(scope).parked = true
	case st != nil:
		if st.parked = false; st.leased == 0 {
			delete(s.limits, scope)
		}
	}
	return nil
}

// recheck walks the scopes of a queue whose limit has changed.
type recheck struct {
	queue *queueState
	from  []byte // nil: all have been walked
}

func (s *shard) recheck(q *queueState) {
	if q.counts.Blocked > 0 {
		q.rechecks++
		s.rechecks = append(s.rechecks, &recheck{q, keys.AppendNumbered(nil, keys.Blocked, q.number)})
	}
}

// recheckLimits marks the limits of queues that may have room now. Marks of
// scopes that are still full do no harm.
func (s *shard) recheckLimits() {
	for len(s.rechecks) > 0 && !s.spent() {
		r := s.rechecks[0]
		if s.broken = s.recheckNext(r); s.broken != nil {
			return
		}
		if r.from == nil {
			s.rechecks[0], s.rechecks = nil, s.rechecks[1:]
			r.queue.rechecks--
			s.rest(r.queue)
		}
	}
}

// recheckNext marks the next scope of a queue in which tasks wait.
func (s *shard) recheckNext(r *recheck) error {
	from, upper := r.from, keys.GroupEnd(keys.AppendNumbered(nil, keys.Blocked, r.queue.number))
	r.from = nil
	return s.walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		_, scope, _, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return false, err
		}
		if scope != 0 && scope&groupBit == 0 {
			s.wake(r.queue, scope, ID{}, wakeUp)
		}
		r.from = keys.GroupEnd(keys.AppendGroup(nil, keys.Blocked, r.queue.number, scope))
		return false, nil
	})
}

func (s *shard) recheckIsDue() bool { return len(s.rechecks) > 0 }

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
func (t *gateTable) set(queue string, c configured, fresh bool) *gate {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.byQueue[queue]
	if g == nil && (c.settings.Concurrency > 0 || c.settings.Rate > 0) {
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
func (g *gate) set(c configured, fresh bool, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.version <= g.version {
		return
	}
	set := c.settings
	g.version, g.limit = c.version, set.Concurrency
	limit := rate.Limit(set.Rate)
	switch {
	case set.Rate == 0:
		g.rate = nil
	case g.rate == nil:
		g.rate = rate.NewLimiter(limit, set.burst())
		if !fresh { // what was spent before a restart is not known
			g.rate.AllowN(now, set.burst())
		}
	default:
		g.rate.SetLimitAt(now, limit)
		g.rate.SetBurstAt(now, set.burst())
	}
}

// passGate takes a place for a claim, or sees to it that the queue's claims
// are served when there may be one.
func (s *shard) passGate(q *queueState) bool { return s.tryGate(q, q.gate.enter) }

// mayPass is passGate without taking the place.
func (s *shard) mayPass(q *queueState) bool { return s.tryGate(q, q.gate.look) }

func (s *shard) tryGate(q *queueState, try func(*shard, time.Time) (bool, time.Duration)) bool {
	ok, wait := try(s, time.Now())
	if !ok {
		q.shut = true
		s.publish(q)
	}
	if wait > 0 {
		s.throttle(q, s.now+uint64((wait+time.Millisecond-1)/time.Millisecond))
	}
	return ok
}

// leaveGate gives a place back.
func (s *shard) leaveGate(q *queueState) {
	if q.gate == nil {
		return
	}
	for _, w := range q.gate.leave(1) {
		s.openGate(w, q)
	}
}

// openGate has a shard serve the claims that wait for a queue.
func (s *shard) openGate(w *shard, q *queueState) {
	if w == s {
		s.throttle(q, s.now)
		return
	}
	_ = w.inbox.pass(&serveOp{queue: q.name}) // one that is closing serves nobody
}

// throttle has the claims that wait for a queue served at a time of the
// monotonic clock, or sooner.
func (s *shard) throttle(q *queueState, at uint64) {
	if q.throttledAt >= 0 {
		if q.opensAt <= at {
			return
		}
		s.throttled.remove(q)
	}
	q.opensAt = at
	s.throttled.push(q)
}

func (s *shard) openGates() {
	for s.gatesAreDue() && !s.spent() {
		q := s.throttled.pop()
		s.open(q)
		if q.warden != nil {
			s.allot(q.warden)
		}
	}
}

func (s *shard) gatesAreDue() bool { return s.throttled.next() <= s.now }

// serveOp serves the claims that wait for a queue.
type serveOp struct{ queue string }

func (op *serveOp) resolve(s *shard) {
	if q := s.queues[op.queue]; q != nil {
		s.open(q)
	}
}

func (op *serveOp) settle(error) {}
