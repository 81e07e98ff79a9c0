package dispatch

import (
	"time"

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

// next returns the lane with the next task for a claim of the queue, and takes a place in the
// limits for it: Grant follows, or leaveGate. pending is as in engine.State.Next, and so is rank: a
// batch ends before a task of a lower rank, since other shards have one of that rank, and more
// urgent tasks here may have been parked. c is the claim if it has tasks already, or nil: it may
// lack room for the next one.
func (d *Dispatcher) next(q *Queue, rank uint64, c *Claim) (l *engine.Lane, pending bool) {
	if q.Gated && !q.Settings.Paused && !d.mayPass(q) {
		return nil, false // without State.Next, which might refill lanes without use
	}
	started := q.mayStart() && d.startSuspect(q)
	if l, pending = d.rules.Next(q.Queue, rank); l == nil && started {
		pending = true
	}
	if l != nil && c != nil && !d.fits(c, l) {
		return nil, false
	}
	if q.Gated {
		if pending {
			q.isRead = true
		}
		if l != nil && !d.passGate(q) {
			return nil, false
		}
	}
	return l, pending
}

// passGate takes a place for a claim. If there is none, the queue's claims are served when there
// may be one.
func (d *Dispatcher) passGate(q *Queue) bool {
	ok, wait := q.gate.Enter(d, d.now())
	return d.passes(q, ok, wait)
}

// mayPass is passGate without taking the place. A claim that waits gets one only if it is kept for
// this shard, or for none.
func (d *Dispatcher) mayPass(q *Queue) bool {
	g := q.sharedGate()
	if !d.isServing || g == nil {
		ok, wait := q.gate.Look(d, d.now())
		return d.passes(q, ok, wait)
	}
	h, share := d.headAndShare(q)
	ok, wait, wake := g.turn(d, q.heads, h, share, d.now())
	d.wake(q, wake)
	if ok {
		d.noteTurn(q)
	}
	return d.passes(q, ok, wait)
}

// passes follows the answer of the gate. Other shards see by themselves whether a gate that they
// share is closed.
func (d *Dispatcher) passes(q *Queue, ok bool, wait time.Duration) bool {
	if !ok && q.sharedGate() == nil {
		q.shut = true
		d.Publish(q.Queue)
	}
	if wait > 0 {
		d.throttleFor(q, wait)
	}
	return ok
}

// sharedGate is the gate of the queue that all shards of the process share; nil: it has none.
func (q *Queue) sharedGate() *gate {
	g, _ := q.gate.(*gate)
	return g
}

// wake makes shards serve the claims that wait for a place of a queue.
func (d *Dispatcher) wake(q *Queue, shards []*Dispatcher) {
	for _, w := range shards {
		if w == d {
			d.throttle(q, d.rules.Now)
		} else {
			w.port.Open(q.Name)
		}
	}
}

// noteTurn notes that a place of a queue may be kept for this shard: see endTurns.
func (d *Dispatcher) noteTurn(q *Queue) {
	if !q.hasTurn {
		q.hasTurn = true
		d.turns = append(d.turns, q)
	}
}

// endTurns passes on the places that are kept for this shard and that it has not used. It keeps
// them while the group has not served all claims, or these wait for tasks to be read.
func (d *Dispatcher) endTurns() {
	if len(d.turns) == 0 {
		return
	}
	kept := d.turns[:0]
	for _, q := range d.turns {
		q.hasTurn = d.rules.HasRoom(engine.RoomLow) && (q.servable || q.isRead || q.isServableInSet())
		q.isRead = false
		if q.hasTurn {
			kept = append(kept, q)
		} else if g := q.sharedGate(); g != nil {
			d.wake(q, g.decline(d))
		}
	}
	clear(d.turns[len(kept):])
	d.turns = kept
}

// asks reports whether a claim that does not wait will be tried again, since it lacks only a place.
func (d *Dispatcher) asks(q *Queue, c *Claim) bool { return q.gate != nil && q.gate.Ask(c) }

// leaveGate gives a place back.
func (d *Dispatcher) leaveGate(q *Queue) {
	if q.gate == nil {
		return
	}
	d.wake(q, q.gate.Leave(1))
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

// Gateway returns the gateway of a queue; nil: none.
func (q *Queue) Gateway() Gateway { return q.gate }

// SetGateway sets the gateway of a queue; nil: none.
func (d *Dispatcher) SetGateway(q *Queue, g Gateway) {
	q.gate = g
	q.SetGated(g != nil)
}

// limit applies the settings of a queue to its gate. known is false if the queue may have used
// tokens before the process began. REQUIRES: the process has all shards.
func (d *Dispatcher) limit(q *Queue, known bool) {
	if q.Version == 0 {
		d.dropGate(q)
		return
	}
	if g := d.gates.set(q.Name, q.Configured, known, d.sinceGrant(q), d, q.gate == nil); g != nil && q.gate == nil {
		q.gate = g
		g.join(q.atWork())
	}
	q.SetGated(q.gate != nil)
}

// dropGate leaves the gate of a queue that has lost its settings. The last shard that does so
// removes the gate.
func (d *Dispatcher) dropGate(q *Queue) {
	g, _ := q.gate.(*gate)
	if g == nil {
		return
	}
	d.SetGateway(q, nil)
	d.wake(q, d.gates.leave(q.Name, d, g, q.Removed, q.atWork()))
}

// sinceGrant returns a lower bound of the time since the rate of a queue passed its last task. Of a
// rate above one a second, not every grant is stored.
func (d *Dispatcher) sinceGrant(q *Queue) time.Duration {
	ago := min(d.rules.Names.SinceGrant(q.Queue), uint64(longAgo/time.Millisecond))
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
	if q.sharedGate() != nil {
		d.noteTurn(q)
	}
	d.feed(q)
	d.Publish(q.Queue)
}

// OpenNamed is Open for a queue by name, if the rules know it.
func (d *Dispatcher) OpenNamed(queue string) {
	if q := d.known(queue); q != nil {
		if d.Open(q); q.offered && d.slow.isWanted(suspects{d, queue}) {
			d.startSuspect(q)
		}
	}
}

// throttle opens a queue at a time of the monotonic clock, or sooner: NextOpening.
func (d *Dispatcher) throttle(q *Queue, at uint64) {
	if q.throttledAt >= 0 {
		if q.opensAt <= at {
			return
		}
		d.throttled.Remove(q)
	}
	q.opensAt = at
	d.throttled.Push(q)
}

// throttleFor opens a queue after a time, or sooner.
func (d *Dispatcher) throttleFor(q *Queue, wait time.Duration) {
	d.throttle(q, d.rules.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
}

// NextOpening returns when opening has something to do; engine.Never: never.
func (d *Dispatcher) NextOpening() uint64 { return d.throttled.Next() }

// opening opens the next throttled queue that is due, and returns it; nil: none, or the budget of
// the rules is spent.
func (d *Dispatcher) opening() *Queue {
	if d.throttled.Next() > d.rules.Now || d.rules.Spent() {
		return nil
	}
	q := d.throttled.Pop()
	d.Open(q)
	return q
}
