package dispatch

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"codeq/internal/engine"
)

// Gateway limits the claims of a queue in all its shards. It is a gate, or in a cluster, where
// nodes share the limits, a table of permits. The owner of a shard uses it.
type Gateway interface {
	// Look reports whether Enter has a place. When it has none, wait is how long until the rate has
	// one, or 0 if the queue will be opened when there may be one.
	Look(d *Dispatcher, now time.Time) (ok bool, wait time.Duration)
	// Enter takes a place.
	Enter(d *Dispatcher, now time.Time) (ok bool, wait time.Duration)
	// Leave gives n places back, and returns the Dispatchers that wait for them.
	Leave(n int) (wake []*Dispatcher)
	// MayAsk reports whether Ask may find a place. The result never changes.
	MayAsk() bool
	// Ask begins to find out whether there is a place for a claim that does not wait. If it returns
	// true, the claim is tried again, or refused, when that is known.
	Ask(c *Claim) bool
}

// next returns the lane whose first task a claim of the queue gets, and takes a place in the limits
// for it: Grant follows, or leaveGate. pending is as in engine.State.Next, and so is rank: a batch
// ends before a task of a lower rank, since other shards have one of that rank, and more urgent
// tasks here may have been parked.
func (d *Dispatcher) next(q *Queue, rank uint64) (l *engine.Lane, pending bool) {
	if q.Gated && !q.Settings.Paused && !d.mayPass(q) {
		return nil, false // without State.Next, which might refill lanes in vain
	}
	started := q.Suspects && d.startSuspect(q)
	l, pending = d.rules.Next(q.Queue, rank)
	if l == nil && started {
		return nil, true
	}
	if l != nil && q.Gated && !d.passGate(q) {
		return nil, false
	}
	return l, pending
}

// passGate takes a place for a claim. If there is none, the queue's claims are served when there
// may be one.
func (d *Dispatcher) passGate(q *Queue) bool {
	ok, wait := q.gate.Enter(d, d.now())
	return d.passes(q, ok, wait)
}

// mayPass is passGate without taking the place.
func (d *Dispatcher) mayPass(q *Queue) bool {
	ok, wait := q.gate.Look(d, d.now())
	return d.passes(q, ok, wait)
}

func (d *Dispatcher) passes(q *Queue, ok bool, wait time.Duration) bool {
	if !ok {
		q.shut = true
		d.Publish(q.Queue)
	}
	if wait > 0 {
		d.Throttle(q, d.rules.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
	}
	return ok
}

// asks reports whether a claim that does not wait will be tried again, since it lacks only a place.
func (d *Dispatcher) asks(q *Queue, c *Claim) bool { return q.gate != nil && q.gate.Ask(c) }

// leaveGate gives a place back.
func (d *Dispatcher) leaveGate(q *Queue) {
	if q.gate == nil {
		return
	}
	for _, w := range q.gate.Leave(1) {
		if w == d {
			d.Throttle(q, d.rules.Now)
		} else {
			w.port.Open(q.Name)
		}
	}
}

// LeaveGates gives back the places of the leases that have ended since its last call.
func (d *Dispatcher) LeaveGates() {
	freed := d.rules.Effects.Freed
	for i, q := range freed {
		freed[i] = nil
		d.leaveGate(d.Of(q))
	}
	d.rules.Effects.Freed = freed[:0]
}

// atWork returns how many handlers and other workers have tasks of a queue, as far as its limits
// count them.
func (q *Queue) atWork() int { return int(q.Counts.Leased) + q.Orphans }

// HasGates reports whether the process has all shards, so that Limit has an effect.
func (d *Dispatcher) HasGates() bool { return d.gates != nil }

// Gateway returns the gateway of a queue; nil: none.
func (q *Queue) Gateway() Gateway { return q.gate }

// SetGateway sets the gateway of a queue; nil: none.
func (d *Dispatcher) SetGateway(q *Queue, g Gateway) {
	q.gate = g
	q.Gated = g != nil
}

// Limit applies the settings of a queue to its gate, if the process has all shards. known is false
// if the queue may have used tokens before the process began.
func (d *Dispatcher) Limit(q *Queue, known bool) {
	if q.Version == 0 {
		d.dropGate(q)
		return
	}
	if g := d.gates.set(q.Name, q.Configured, known, d.sinceGrant(q), d.now(), q.gate == nil); g != nil && q.gate == nil {
		q.gate = g
		g.join(q.atWork())
	}
	q.Gated = q.gate != nil
}

// dropGate leaves the gate of a queue whose settings were removed. The last shard that does so
// removes the gate.
func (d *Dispatcher) dropGate(q *Queue) {
	g, _ := q.gate.(*gate)
	if g == nil {
		return
	}
	d.SetGateway(q, nil)
	for _, w := range d.gates.leave(q.Name, g, q.Removed, q.atWork(), d.now()) {
		if w != d {
			w.port.Open(q.Name)
		}
	}
}

// sinceGrant is how long ago the rate of a queue has let the last task pass, at least. Of a rate
// above one a second, not every grant is stored.
func (d *Dispatcher) sinceGrant(q *Queue) time.Duration {
	ago := min(d.rules.SinceGrant(q.Queue), uint64(longAgo/time.Millisecond))
	if ago *= uint64(time.Millisecond); q.Settings.Rate > 1 && ago < uint64(longAgo) {
		ago -= min(ago, uint64(time.Second))
	}
	return time.Duration(ago)
}

// longAgo is how long a rate can take for its whole burst, at most.
const longAgo = 100 * 365 * 24 * time.Hour

// Open serves the claims of a queue when more of its tasks can be leased than before.
func (d *Dispatcher) Open(q *Queue) {
	q.shut = false
	d.feed(q)
	d.Publish(q.Queue)
}

// OpenNamed is Open for a queue by name, if the rules know it.
func (d *Dispatcher) OpenNamed(queue string) {
	if q := d.known(queue); q != nil {
		d.Open(q)
	}
}

// Throttle opens a queue at a time of the monotonic clock, or sooner: NextOpening.
func (d *Dispatcher) Throttle(q *Queue, at uint64) {
	if q.throttledAt >= 0 {
		if q.opensAt <= at {
			return
		}
		d.throttled.Remove(q)
	}
	q.opensAt = at
	d.throttled.Push(q)
}

// NextOpening returns when Opening has something to do; engine.Never: never.
func (d *Dispatcher) NextOpening() uint64 { return d.throttled.Next() }

// Opening opens the next queue whose time has come, and returns it; nil: none, or the budget of the
// rules is spent.
func (d *Dispatcher) Opening() *Queue {
	if d.throttled.Next() > d.rules.Now || d.rules.Spent() {
		return nil
	}
	q := d.throttled.Pop()
	d.Open(q)
	return q
}

// Gates holds the gates of the queues that have ever needed one, for a process that has all shards.
// It is safe for concurrent use.
type Gates struct {
	mu      sync.Mutex // guards byQueue; locked before that of a gate
	byQueue map[string]*gate
}

// NewGates returns an empty table.
func NewGates() *Gates { return &Gates{byQueue: make(map[string]*gate)} }

// set applies settings to the gate of a queue, and returns it; nil if there is none. joins: the
// shard does not have it yet.
func (t *Gates) set(queue string, c engine.Configured, known bool, ago time.Duration, now time.Time, joins bool) *gate {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.byQueue[queue]
	if g == nil && (c.Settings.Concurrency > 0 || c.Settings.Rate > 0) {
		g = new(gate)
		t.byQueue[queue] = g
	}
	if g != nil {
		if g.set(c, known, ago, now); joins {
			g.shards++
		}
	}
	return g
}

// leave gives back what a shard has of a gate whose settings were removed, by a version, and
// returns the Dispatchers that wait for places.
func (t *Gates) leave(queue string, g *gate, version uint64, leased int, now time.Time) []*Dispatcher {
	t.mu.Lock()
	defer t.mu.Unlock()
	g.set(engine.Configured{Version: version, Settings: new(engine.Settings)}, true, 0, now)
	if g.shards--; g.shards == 0 {
		delete(t.byQueue, queue)
	}
	return g.Leave(leased)
}

// gate limits the claims of a queue in all shards of a process, by concurrency and by rate. Each
// shard enters its leases when it first applies settings that need the gate, or later ones.
type gate struct {
	shards int // that have it; guarded by Gates.mu

	mu      sync.Mutex // guards what follows
	version uint64     // of the settings that it applies
	limit   int        // 0: none
	leased  int
	rate    *rate.Limiter
	drained time.Time     // when the rate had no token, as shards have found when they were loaded
	waiting []*Dispatcher // those that had to refuse claims for want of room
}

// Enter takes a place. When there is none, wait is how long until the rate has one, or 0 if a lease
// has to end first.
func (g *gate) Enter(d *Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if ok, wait = g.room(d, now); ok {
		g.leased++
		if g.rate != nil {
			g.rate.AllowN(now, 1)
		}
	}
	return ok, wait
}

// Look is Enter without taking the place.
func (g *gate) Look(d *Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.room(d, now)
}

// room returns the result of Enter. REQUIRES: mu is held.
func (g *gate) room(d *Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	if g.limit > 0 && g.leased >= g.limit {
		g.waitFor(d)
		return false, 0
	}
	if g.rate != nil {
		r := g.rate.ReserveN(now, 1)
		wait = r.DelayFrom(now)
		r.CancelAt(now)
	}
	return wait == 0, wait
}

func (g *gate) waitFor(d *Dispatcher) {
	for _, w := range g.waiting {
		if w == d {
			return
		}
	}
	g.waiting = append(g.waiting, d)
}

// join enters the leases that a shard has granted before it had the gate.
func (g *gate) join(leased int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leased += leased
}

// Leave gives n places back, and returns the Dispatchers that wait for them.
func (g *gate) Leave(n int) (wake []*Dispatcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leased -= n
	if g.limit == 0 || g.leased < g.limit {
		wake, g.waiting = g.waiting, nil
	}
	return wake
}

func (g *gate) MayAsk() bool    { return false }
func (g *gate) Ask(*Claim) bool { return false }

// set changes the limits; the first shard that applies a version does so for all.
func (g *gate) set(c engine.Configured, known bool, ago time.Duration, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.Version <= g.version {
		if !known && g.rate != nil { // another shard may have used the last token
			g.drain(now.Add(-ago))
		}
		return
	}
	set := c.Settings
	g.version, g.limit = c.Version, set.Concurrency
	limit := rate.Limit(set.Rate)
	switch {
	case set.Rate == 0:
		g.rate = nil
	case g.rate == nil:
		g.rate = rate.NewLimiter(limit, set.BurstSize())
		if g.drained = (time.Time{}); !known { // tokens have been used before a restart
			g.drain(now.Add(-ago))
		}
	default:
		g.rate.SetLimitAt(now, limit)
		g.rate.SetBurstAt(now, set.BurstSize())
	}
}

// drain lets the rate have had no token at a time, unless it had none later.
// REQUIRES: no token has been used since the rate was set.
func (g *gate) drain(at time.Time) {
	if at.After(g.drained) {
		g.drained, g.rate = at, rate.NewLimiter(g.rate.Limit(), g.rate.Burst())
		g.rate.AllowN(at, g.rate.Burst())
	}
}
