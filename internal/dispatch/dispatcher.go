package dispatch

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/container/chunked"
	"codeq/internal/container/timeheap"
	"codeq/internal/engine"
	"codeq/internal/record"
)

// Dispatcher gives the ready tasks of a shard to claims.
type Dispatcher struct {
	// Served holds the claims that have been served since the owner emptied it. Those that waited
	// have stale tickets in the other shards: CountStale.
	Served []Served

	rules  *engine.State
	index  int
	shards int
	bytes  int // Config.BatchBytes
	port   Port
	gates  *Gates // nil: gateways are given by SetGateway
	now    func() time.Time
	board  *Board     // nil: no other shard of the process has tasks
	slow   *SlowStart // of the process
	groups uint32     // that have been published; it wraps around

	queues    chunked.List[*Queue] // by handle; nil: not used yet
	recent    *Queue               // the last one that known has found; nil: it has left memory
	throttled timeheap.Heap[*Queue]
	servable  []*Queue             // queues with waiters, and perhaps ready tasks
	listed    chunked.List[*Queue] // queues for which claims wait
	sets      setTable
	setsFirst bool         // the last Serve began with sets
	isServing bool         // Serve is under way
	turns     []*Queue     // endTurns looks at them
	serving   *Claim       // taken by this shard, and not served yet; nil: none
	stale     atomic.Int64 // tickets that others have made stale since the last sweep, minus the good ones after it
	sweep     sweep

	lots  []int    // memory for order
	names []string // likewise
}

// Config is the configuration of a Dispatcher.
type Config struct {
	Index, Shards int
	BatchBytes    int // of the tasks of a claim, if they are several; 0: any number
	Port          Port
	Gates         *Gates           // of the process; nil: the owner sets gateways
	Now           func() time.Time // for rates; nil: time.Now
}

// Port sends messages to the owner of a shard. Its methods are safe for concurrent use and do not
// wait.
type Port interface {
	// Open makes the owner call Open for a queue.
	Open(queue string)
	// Sweep makes the owner call Sweep.
	Sweep()
}

// Served is a claim that got tasks.
type Served struct {
	Claim  *Claim
	Waited bool // it has tickets in other shards, which are stale
}

// New returns a Dispatcher for the rules of a shard.
func New(rules *engine.State, c Config) *Dispatcher {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Dispatcher{
		rules: rules, index: c.Index, shards: c.Shards, bytes: cmp.Or(c.BatchBytes, math.MaxInt), port: c.Port, gates: c.Gates, now: c.Now, slow: new(SlowStart),
	}
}

// Join makes the shard one of those of a process: it publishes its heads on a board, and uses those
// of the others, they start suspects together, which pass after suspectFor, and the tenants of a
// queue share its claims over all of them.
func (d *Dispatcher) Join(b *Board, slow *SlowStart, suspectFor time.Duration) {
	d.board, d.slow = b, slow
	slow.join(d, suspectFor)
	if b == nil {
		d.rules.Share(nil, (*shardSuspects)(d))
		return
	}
	d.rules.Share((*shardTenants)(d), (*shardSuspects)(d))
}

// Queue is the state of a queue in a Dispatcher: the claims that wait for its tasks, and the limits
// that these have to pass.
type Queue struct {
	*engine.Queue
	lines
	sets     []setEntry // the sets that contain the queue
	servable bool       // its waiters may be served
	listedAt int        // 1 + its index in Dispatcher.listed; 0: it has no tickets

	heads *queueHeads // nil: the shard has published none
	gate  Gateway     // nil: neither a rate nor a limit of concurrency
	shut  bool        // a gateway of this shard has refused a claim, and has not been opened since

	hasTurn bool // it is in Dispatcher.turns
	isRead  bool // claims wait until tasks are read

	offered bool // suspects wait for places of the slow start

	refusals refusals

	allocator *PermitAllocator // nil: another shard has it, or none does
	isDirty   bool             // Permits.Flush will look at it

	opensAt     uint64 // until when it is throttled; monotonic clock of the shard, ms
	throttledAt int    // its index in the heap of throttled queues; negative: it is not in it
}

// Due is for the heap of throttled queues.
func (q *Queue) Due() uint64 { return q.opensAt }

// Spot is for the heap of throttled queues.
func (q *Queue) Spot() *int { return &q.throttledAt }

// Of returns the Queue of a queue of the rules. REQUIRES: the rules have not forgotten it, since
// another queue may have its handle then.
func (d *Dispatcher) Of(q *engine.Queue) *Queue {
	if c := d.queues.At(q.Handle); c != nil {
		if base.Invariants && c.Queue != q {
			base.Violated("handle %d of queue %q is that of queue %q", q.Handle, q.Name, c.Name)
		}
		return c
	}
	for d.queues.Len() <= q.Handle {
		d.queues.Append(nil)
	}
	c := &Queue{Queue: q, throttledAt: -1}
	d.queues.Set(q.Handle, c)
	return c
}

// known is Of for a queue by name; nil if the rules do not know the queue. Claims often follow each
// other in the same queue, so that most look-ups are one comparison.
func (d *Dispatcher) known(queue string) *Queue {
	if q := d.recent; q != nil && q.Name == queue {
		return q
	}
	q := d.rules.Names.Queues[queue]
	if q == nil {
		return nil
	}
	d.recent = d.Of(q)
	return d.recent
}

// isNeeded reports whether the Dispatcher still needs a queue.
func (q *Queue) isNeeded() bool {
	return q.gate != nil || q.offered || q.throttledAt >= 0 || q.listedAt != 0 || len(q.sets) > 0 || q.servable ||
		q.allocator != nil || q.isDirty
}

// Forget drops a queue that the rules do not need any more, unless the Dispatcher needs it: when
// that ends, the rules ask again.
func (d *Dispatcher) Forget(q *engine.Queue) (forgotten bool) {
	if c := d.queues.At(q.Handle); c != nil {
		if d.offer(c); c.isNeeded() {
			return false
		}
		d.unpublish(c)
		d.queues.Set(q.Handle, nil)
		if d.recent == c {
			d.recent = nil
		}
	}
	return true
}

// Close settles the waiting claims: those of this process with local, or not at all if it is nil,
// and those of other nodes with remote.
func (d *Dispatcher) Close(local, remote error) {
	if d.board != nil {
		d.rules.Share(nil, nil) // while it has the heads
	}
	never := func() bool { return false }
	for _, q := range d.queues.All() {
		if q != nil {
			if g := q.sharedGate(); g != nil {
				d.wake(q, g.quit(d, 0))
			}
			d.unpublish(q)
			q.refuse(local, remote)
		}
	}
	for _, set := range d.sets.byDigest {
		set.refuse(local, remote)
		set.leaveHeads(never)
	}
	for _, set := range d.sets.dropped {
		set.leaveHeads(never)
	}
}

// Serving returns the claim that the Dispatcher was serving when it panicked; nil: none.
func (d *Dispatcher) Serving() *Claim { return d.serving }

// Outcome is the result of Try.
type Outcome int

const (
	Nothing   Outcome = iota // no task is ready for the claim
	Done                     // the claim is in Served, or was taken elsewhere
	Pending                  // the answer depends on a refill of windows, or on a set that is being built
	Asks                     // a gateway will send the claim to be tried again
	Elsewhere                // another shard has a more urgent task: Claim.To
)

// Try takes tasks for a claim, in the order of its queues. It skips queues that have waiting claims
// already.
func (d *Dispatcher) Try(c *Claim) Outcome {
	if c.List != nil {
		return d.trySet(c)
	}
	if len(c.Weights) > 0 {
		for _, name := range c.Queues {
			d.wantSuspect(name)
		}
	}
	for _, name := range d.order(c) {
		q := d.known(name)
		if d.wantSuspect(name); d.isElsewhere(c, name, q) {
			return Elsewhere
		}
		if q == nil || !c.NoWait && d.isAwaited(q, c.Remote) {
			continue
		}
		l, pending := d.next(q, 0, nil)
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

// order returns the queues of a claim in their order: as given, or drawn in proportion to the
// weights, after the one that was drawn over all shards. The result is valid until the next call:
// it is not in memory of the claim, since several shards may process a waiting claim at once.
func (d *Dispatcher) order(c *Claim) []string {
	if len(c.Weights) == 0 {
		return c.Queues
	}
	names, lots := append(d.names[:0], c.Queues...), append(d.lots[:0], c.Weights...)
	d.names, d.lots = names, lots
	if at := c.drawn - 1; at >= 0 {
		names[0], names[at] = names[at], names[0]
		lots[0], lots[at] = lots[at], lots[0]
		names, lots = names[1:], lots[1:]
	}
	drawOrder(names, lots)
	return d.names
}

// takes takes the claim of a ticket, to serve it next.
func (d *Dispatcher) takes(t Ticket) bool {
	if !t.Take() {
		return false
	}
	d.serving = t.claim
	return true
}

// markServed ends the service of a claim that this shard took.
func (d *Dispatcher) markServed(c *Claim, waited bool) {
	if base.Invariants {
		if d.serving != c || !c.IsTaken() {
			base.Violated("a claim is served that this shard has not taken")
		}
		if len(c.Grants) > c.Max {
			base.Violated("a claim for %d tasks gets %d", c.Max, len(c.Grants))
		}
	}
	d.Served = append(d.Served, Served{c, waited})
	d.serving = nil
}

// give serves a claim that has been taken: with tasks of q, the first of l to begin with, and if
// there is room, with those of its other queues.
func (d *Dispatcher) give(c *Claim, q *Queue, l *engine.Lane, waited bool) {
	if d.giveOf(c, q, l) && len(c.Queues) > 1 {
		d.fillUp(c, q)
	}
	d.markServed(c, waited)
}

// giveOf leases tasks of a queue to a claim, as long as they are ready and other shards have no
// more urgent ones. It returns true if the queue has no more, and the claim has room.
func (d *Dispatcher) giveOf(c *Claim, q *Queue, l *engine.Lane) bool {
	limit := uint64(0)
	if c.Max > 1 {
		limit = d.highestElsewhere(q)
	}
	pending := false
	for l != nil {
		var err error
		if c.Grants, err = d.rules.Grant(l, c.Duration, c.Holder, c.Grants); err != nil {
			d.rules.Break(err)
			return false
		}
		if len(c.Grants) == c.Max {
			return false
		}
		c.bytes += bytesOf(c.Grants[len(c.Grants)-1].Rec)
		l, pending = d.next(q, limit, c)
	}
	return !pending && !c.full && d.rules.Broken == nil && d.rankOf(q) >= limit
}

// fits reports whether a claim has room for the bytes of the next task of a lane, and fills it if
// not.
func (d *Dispatcher) fits(c *Claim, l *engine.Lane) bool {
	c.full = c.bytes+bytesOf(l.NextRecord()) > d.bytes
	return !c.full
}

// bytesOf returns the bytes of a record that Config.BatchBytes limits: those of its payload, if it
// has nothing else.
func bytesOf(rec []byte) int {
	payload, ok := record.Plain(rec)
	if !ok {
		return len(rec)
	}
	return len(payload)
}

// fillLooks is how many queues a batch tries at the most to be filled.
const fillLooks = 64

// fillUp fills a batch that has all available tasks of q. In strict order, it uses the queues after
// q, until one has tasks that this shard cannot give; otherwise all in a random order.
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
			if rank := d.rankOf(q); rank > 0 && rank >= limit {
				if l, _ := d.next(q, limit, c); c.full || l != nil && !d.giveOf(c, q, l) {
					return
				}
			}
		}
		if strict && (q != nil && d.rankOf(q) > 0 || d.board.of(name).best(d.index) >= 0) {
			return
		}
	}
}

// EndVisit ends the visit of a claim that has got nothing: it may visit another shard next. Unless
// NoWait, it waits here.
func (d *Dispatcher) EndVisit(c *Claim) {
	if c.drawn != 0 { // or else the shards that it waits in may read it
		c.drawn = 0
	}
	if !c.NoWait {
		d.WaitBy(c.Ticket(), c.Queues, c.List, c.Remote)
	}
}

// WaitBy makes a claim wait. The caller has only its ticket and its queues.
func (d *Dispatcher) WaitBy(t Ticket, queues []string, list *List, remote bool) {
	if list != nil {
		set := d.buildSet(list)
		for set == nil { // without room on the disk, Try was not called, which builds it
			set = d.buildSet(list)
		}
		set.line(remote).Push(t)
		d.feedSet(set)
		return
	}
	for _, name := range queues {
		q := d.known(name)
		if q == nil {
			q = d.Of(d.rules.Names.QueueNamed(name))
		}
		q.line(remote).Push(t)
		if q.listedAt == 0 {
			d.listed.Append(q)
			q.listedAt = d.listed.Len()
		}
		d.feed(q)
	}
}

// unlist removes a queue from listed if no claim waits for it any more.
func (d *Dispatcher) unlist(q *Queue) {
	if q.front().Len() > 0 {
		return
	}
	defer d.rules.Names.Rest(q.Queue)
	if q.listedAt == 0 {
		return
	}
	if moved, ok := d.listed.Remove(q.listedAt - 1); ok {
		moved.listedAt = q.listedAt
	}
	q.listedAt = 0
}

// isAwaited reports whether claims wait for a queue that are served before one that comes now;
// remote: the latter is of another node.
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

// Waiting returns how many claims wait for tasks of a queue.
func (d *Dispatcher) Waiting(queue string) (n int) {
	q := d.known(queue)
	if q == nil {
		return 0
	}
	n = q.claims()
	for _, e := range q.sets {
		n += e.set.claims()
	}
	return n
}

// wants returns how many tasks the claims want that wait for a queue, at most most.
func (d *Dispatcher) wants(q *Queue, most int) int {
	n := q.wants(most)
	for _, e := range q.sets {
		n += e.set.wants(most - n)
	}
	return n
}

// feed makes the next Serve serve the waiters of a queue that may have ready tasks.
func (d *Dispatcher) feed(q *Queue) {
	if d.offer(q); q.Mask == 0 && !q.offered {
		return
	}
	if len(q.sets) > 0 {
		d.feedSets(q)
	}
	if !q.servable && q.front().Len() > 0 {
		q.servable = true
		d.servable = append(d.servable, q)
	}
}

// MayServe reports whether claims wait for queues that may have ready tasks.
func (d *Dispatcher) MayServe() bool {
	return len(d.rules.Effects.Fed)+len(d.servable)+len(d.sets.servable) > 0
}

// Serve gives ready tasks to the waiting claims, first come, first served. When the budget of the
// rules is spent, the rest is served next time. Claims with few queues and those with a List come
// first in turn.
func (d *Dispatcher) Serve() {
	served := 0
	d.isServing = true
	defer func() { d.isServing = false }()
	if d.setsFirst = !d.setsFirst; d.setsFirst {
		d.serveSets(&served)
	}
	serveInTurn(&d.servable, &served, func(q *Queue) (all bool) {
		all = d.serveQueue(q, &served)
		q.servable = !all
		return all
	})
	d.serveSets(&served)
}

// serveInTurn serves all servable queues or sets, until the budget is spent: then serve returns
// false, and the one that it was serving comes last. served counts claims.
func serveInTurn[T any](servable *[]T, served *int, serve func(T) (all bool)) {
	n := 0
	for ; n < len(*servable); n++ {
		before := *served
		if serve((*servable)[n]) {
			continue
		}
		if *served > before {
			*servable = append(*servable, (*servable)[n])
			n++
		}
		break
	}
	*servable = slices.Delete(*servable, 0, n)
}

// serveQueue is Serve for one queue; served counts claims. It returns false if the budget is spent.
func (d *Dispatcher) serveQueue(q *Queue, served *int) bool {
	for ; q.front().Len() > 0; *served++ {
		if !d.rules.HasBudget(*served) {
			return false
		}
		if !q.front().first().Good() {
			q.front().Pop()
			continue
		}
		l, _ := d.next(q, 0, nil)
		if l == nil {
			break
		}
		if t := q.pick(&q.lines, l); d.takes(t) {
			d.dropStale(t.claim, q)
			d.give(t.claim, q, l, true)
		} else {
			d.leaveGate(q)
		}
	}
	d.unlist(q)
	return true
}
