package dispatch

import (
	"slices"
	"sync/atomic"

	"codeq/internal/chunked"
	"codeq/internal/engine"
	"codeq/internal/timeheap"
)

// Dispatcher gives the ready tasks of a shard to claims.
type Dispatcher struct {
	// Served is the claims that have been served since the owner emptied it. Those that waited have
	// void tickets in the other shards: CountVoid.
	Served []Served

	rules  *engine.State
	index  int
	shards int
	port   Port
	gates  *Gates // nil: gateways are given by SetGateway
	board  *Board // nil: no other shard of the process has tasks

	queues    chunked.List[*Queue] // by handle; nil: nobody has asked
	throttled timeheap.Heap[*Queue]
	hungry    []*Queue             // have waiters, and perhaps ready tasks
	listed    chunked.List[*Queue] // for which claims wait
	sets      setTable
	setsFirst bool         // Serve has begun with sets
	giving    *Claim       // taken by this shard, and not served yet; nil: none
	void      atomic.Int64 // tickets that others have made void since the last sweep, less those that it left
	sweep     sweep

	lots  []int    // for order
	names []string // likewise
}

// Config is what a Dispatcher is made of.
type Config struct {
	Index, Shards int
	Port          Port
	Gates         *Gates // of the process; nil: places in limits are given by gateways that the owner sets
}

// Port is the way from a shard's owner, or from others, to the owner of a shard. Its methods are safe
// for concurrent use and do not wait.
type Port interface {
	// Open makes the owner call Open for a queue.
	Open(queue string)
	// Sweep makes the owner call Sweep.
	Sweep()
}

// Served is a claim that has got tasks.
type Served struct {
	Claim  *Claim
	Waited bool // it has tickets in other shards, which are void
}

// New returns a Dispatcher for the rules of a shard.
func New(rules *engine.State, c Config) *Dispatcher {
	return &Dispatcher{rules: rules, index: c.Index, shards: c.Shards, port: c.Port, gates: c.Gates}
}

// Join makes the shard tell the others of the process what it has, and be told by them.
func (d *Dispatcher) Join(b *Board) { d.board = b }

// Queue is what a Dispatcher knows of a queue: the claims that wait for its tasks, and the limits
// that those have to pass.
type Queue struct {
	*engine.Queue
	lines
	sets     []setEntry // that have the queue
	hungry   bool       // its waiters may be served
	listedAt int        // 1 + the place in the list of those with tickets; 0: it has none

	heads *queueHeads // nil: the shard has published none
	gate  Gateway     // nil: neither a rate nor a limit of concurrency
	shut  bool        // the gate has turned a claim away, and has not been opened since

	opensAt     uint64 // when it is no longer held back; monotonic clock of the shard, ms
	throttledAt int    // the place among those that are held back; negative: it is none
}

// Due is for the heap of queues that are held back.
func (q *Queue) Due() uint64 { return q.opensAt }

// Spot is for the heap of queues that are held back.
func (q *Queue) Spot() *int { return &q.throttledAt }

// Of returns what the Dispatcher knows of a queue.
// REQUIRES: the rules have not forgotten it, since another queue may have its handle then.
func (d *Dispatcher) Of(q *engine.Queue) *Queue {
	if c := d.queues.At(q.Handle); c != nil {
		return c
	}
	for d.queues.Len() <= q.Handle {
		d.queues.Append(nil)
	}
	c := &Queue{Queue: q, throttledAt: -1}
	d.queues.Set(q.Handle, c)
	return c
}

// known is Of for a queue by name; nil if the rules do not know the queue.
func (d *Dispatcher) known(queue string) *Queue {
	if q := d.rules.Queues[queue]; q != nil {
		return d.Of(q)
	}
	return nil
}

// isNeeded reports whether the Dispatcher could not do without a queue.
func (q *Queue) isNeeded() bool {
	return q.gate != nil || q.throttledAt >= 0 || q.listedAt != 0 || len(q.sets) > 0 || q.hungry
}

// Forget drops a queue that the rules need no more, unless the Dispatcher needs it: what ends that lets
// the rules ask again.
func (d *Dispatcher) Forget(q *engine.Queue) (forgotten bool) {
	if c := d.queues.At(q.Handle); c != nil {
		if c.isNeeded() {
			return false
		}
		d.unpublish(c)
		d.queues.Set(q.Handle, nil)
	}
	return true
}

// Close settles the claims that wait: those of this process with local, or if it is nil not at all,
// and those of other nodes with remote.
func (d *Dispatcher) Close(local, remote error) {
	for _, q := range d.queues.All() {
		if q != nil {
			d.unpublish(q)
			q.refuse(local, remote)
		}
	}
	for _, set := range d.sets.byDigest {
		set.refuse(local, remote)
	}
}

// Giving is the claim that the Dispatcher was about to serve when it panicked; nil: none.
func (d *Dispatcher) Giving() *Claim { return d.giving }

// Outcome is what Try has come to.
type Outcome int

const (
	Nothing   Outcome = iota // no task is ready for the claim
	Done                     // the claim is among Served, or somebody else has taken it
	Pending                  // the answer depends on a refill of windows, or on a set that is being built
	Asks                     // a gateway will have the claim tried again
	Elsewhere                // another shard has something more urgent: Claim.To
)

// Try takes tasks for a claim, in the order of its queues. Queues where others wait already are left
// to them.
func (d *Dispatcher) Try(c *Claim) Outcome {
	if c.List != nil {
		return d.trySet(c)
	}
	for _, name := range d.order(c) {
		q := d.known(name)
		if d.isElsewhere(c, name, q) {
			return Elsewhere
		}
		if q == nil || !c.NoWait && d.isAwaited(q, c.Remote) {
			continue
		}
		l, pending := d.next(q, 0)
		if pending {
			return Pending
		}
		if d.isPassedOver(c, name, q, l) {
			return Elsewhere
		}
		if l == nil {
			if c.NoWait && d.asks(q, c) {
				return Asks
			}
			continue
		}
		if d.takes(c.Ticket()) {
			d.give(c, q, l, c.Visited && !c.NoWait)
		} else {
			d.leaveGate(q)
		}
		return Done
	}
	return Nothing
}

// order is the order of the queues of a claim: as given, or drawn by lot in proportion to the weights.
// It is good until the next call: a claim that waits may be looked at by several shards at once, so
// that it has no memory for this.
func (d *Dispatcher) order(c *Claim) []string {
	if len(c.Weights) == 0 {
		return c.Queues
	}
	d.names = append(d.names[:0], c.Queues...)
	d.lots = append(d.lots[:0], c.Weights...)
	drawOrder(d.names, d.lots)
	return d.names
}

// takes takes a claim, which is served next.
func (d *Dispatcher) takes(t Ticket) bool {
	if !t.Take() {
		return false
	}
	d.giving = t.claim
	return true
}

// served ends the service of a claim that has been taken.
func (d *Dispatcher) served(c *Claim, waited bool) {
	d.Served = append(d.Served, Served{c, waited})
	d.giving = nil
}

// give serves a claim that has been taken: with tasks of q, l's first to begin with, and if there is
// room, with those of its other queues.
func (d *Dispatcher) give(c *Claim, q *Queue, l *engine.Lane, waited bool) {
	if d.giveOf(c, q, l) && len(c.Queues) > 1 {
		d.fillUp(c, q)
	}
	d.served(c, waited)
}

// giveOf leases tasks of a queue to a claim, as far as they are ready and other shards have no more
// urgent ones. It is true if the queue has no more, and there is room.
func (d *Dispatcher) giveOf(c *Claim, q *Queue, l *engine.Lane) bool {
	limit := uint64(0)
	if c.Max > 1 {
		limit = d.highestElsewhere(q)
	}
	pending := false
	for l != nil {
		g, err := d.rules.Grant(l, c.Duration, c.Holder)
		if err != nil {
			d.rules.Broken = err
			return false
		}
		c.Grants = append(c.Grants, g)
		if len(c.Grants) == c.Max {
			return false
		}
		l, pending = d.next(q, limit)
	}
	return !pending && d.rules.Broken == nil && d.headOf(q).rank() >= limit
}

// fillLooks is at how many queues a batch looks to be filled.
const fillLooks = 64

// fillUp fills a batch that has all that q has to give. In strict order, the queues after q follow,
// until one has tasks that this shard cannot give; else all that lots draw.
func (d *Dispatcher) fillUp(c *Claim, q *Queue) {
	strict := len(c.Weights) == 0
	names := c.Queues
	if strict {
		if d.highestElsewhere(q) > 0 {
			return
		}
		names = names[slices.Index(names, q.Name)+1:]
	} else {
		names = d.order(c)
	}
	for _, name := range names[:min(len(names), fillLooks)] {
		q := d.known(name)
		if q != nil && (c.NoWait || !d.isAwaited(q, c.Remote)) {
			limit := d.highestElsewhere(q)
			if h := d.headOf(q); h != 0 && h.rank() >= limit {
				if l, _ := d.next(q, limit); l != nil && !d.giveOf(c, q, l) {
					return
				}
			}
		}
		if strict && (q != nil && d.headOf(q) != 0 || d.board.of(name).best(d.index) >= 0) {
			return
		}
	}
}

// EndVisit ends the visit of a claim that has got nothing: it may visit another shard next. Unless
// NoWait, it waits here.
func (d *Dispatcher) EndVisit(c *Claim) {
	c.drawn = 0
	if !c.NoWait {
		d.WaitBy(c.Ticket(), c.Queues, c.List, c.Remote)
	}
}

// WaitBy lets a claim wait, of which the caller has a ticket only, and knows the queues.
func (d *Dispatcher) WaitBy(t Ticket, queues []string, list *List, remote bool) {
	if list != nil {
		set := d.buildSet(list)
		for set == nil { // without room on the disk, nobody has looked for tasks
			set = d.buildSet(list)
		}
		set.line(remote).Push(t)
		d.feedSet(set)
		return
	}
	for _, name := range queues {
		q := d.Of(d.rules.QueueNamed(name))
		q.line(remote).Push(t)
		if q.listedAt == 0 {
			d.listed.Append(q)
			q.listedAt = d.listed.Len()
		}
		d.feed(q)
	}
}

// unlist is for a queue for which, perhaps, nobody waits any more.
func (d *Dispatcher) unlist(q *Queue) {
	if q.front().Len() > 0 {
		return
	}
	defer d.rules.Rest(q.Queue)
	if q.listedAt == 0 {
		return
	}
	if moved, ok := d.listed.Remove(q.listedAt - 1); ok {
		moved.listedAt = q.listedAt
	}
	q.listedAt = 0
}

// isAwaited reports whether claims wait for a queue that are served before one that comes now;
// remote, if another node made that.
func (d *Dispatcher) isAwaited(q *Queue, remote bool) bool {
	for _, e := range q.sets {
		if e.set.isAwaited(remote) {
			return true
		}
	}
	return d.isAwaitedAlone(q, remote)
}

// isAwaitedAlone is isAwaited for claims that name few queues.
func (d *Dispatcher) isAwaitedAlone(q *Queue, remote bool) bool {
	if q.listedAt == 0 {
		return false
	}
	if q.lines.isAwaited(remote) {
		return true
	}
	d.unlist(q)
	return false
}

// Wants is how many tasks the claims want that wait for a queue, as far as it is less than most.
func (d *Dispatcher) Wants(q *Queue, most int) int {
	n := q.wants(most)
	for _, e := range q.sets {
		n += e.set.wants(most - n)
	}
	return n
}

// feed serves the waiters of a queue of which something may be ready, at the next Serve.
func (d *Dispatcher) feed(q *Queue) {
	if q.Mask == 0 {
		return
	}
	if len(q.sets) > 0 {
		d.feedSets(q)
	}
	if !q.hungry && q.front().Len() > 0 {
		q.hungry = true
		d.hungry = append(d.hungry, q)
	}
}

// AreHungry reports whether claims wait for what may be ready.
func (d *Dispatcher) AreHungry() bool {
	return len(d.rules.Effects.Fed)+len(d.hungry)+len(d.sets.hungry) > 0
}

// Serve gives ready tasks to the claims that wait, first come, first served. What is beyond the
// budget of the rules is served next time. Claims for one queue and those for a list of them come
// first in turn.
func (d *Dispatcher) Serve() {
	served := 0
	if d.setsFirst = !d.setsFirst; d.setsFirst {
		d.serveSets(&served)
	}
	serveInTurn(&d.hungry, &served, func(q *Queue) (all bool) {
		all = d.serveQueue(q, &served)
		q.hungry = !all
		return all
	})
	d.serveSets(&served)
}

// serveInTurn serves all that are hungry, until the budget is spent: serve says so, and served counts
// claims. Who was served when that happened comes last.
func serveInTurn[T any](hungry *[]T, served *int, serve func(T) (all bool)) {
	n := 0
	for ; n < len(*hungry); n++ {
		before := *served
		if serve((*hungry)[n]) {
			continue
		}
		if *served > before {
			*hungry = append(*hungry, (*hungry)[n])
			n++
		}
		break
	}
	*hungry = slices.Delete(*hungry, 0, n)
}

// serveQueue is Serve for one queue; served counts claims. It is false if the budget is spent.
func (d *Dispatcher) serveQueue(q *Queue, served *int) bool {
	for ; q.front().Len() > 0; *served++ {
		if !d.rules.HasBudget(*served) {
			return false
		}
		if !q.front().first().Good() {
			q.front().Pop()
			continue
		}
		l, _ := d.next(q, 0)
		if l == nil {
			break
		}
		if t := q.front().Pop(); d.takes(t) {
			d.voidHere(t.claim, q)
			d.give(t.claim, q, l, true)
		} else {
			d.leaveGate(q)
		}
	}
	d.unlist(q)
	return true
}
