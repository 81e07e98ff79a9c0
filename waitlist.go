package codeq

import (
	"codeq/internal/engine"
	"slices"
)

// ticket is the place of a claim in a wait list. It is no reference to the claim: once
// somebody has taken the claim, the ticket is void, and the operation may be another
// claim's.
type ticket struct {
	claim *claimOp
	state uint64 // of the claim, as long as the ticket is good
	tasks int    // that the claim wants
}

// ticket returns one that is good while nobody has taken the claim. REQUIRES: a reference.
func (op *claimOp) ticket() ticket { return ticket{op, op.state.Load() &^ 1, op.max} }

func (t ticket) good() bool { return t.claim.state.Load() == t.state }

// take makes the caller of take the one who decides the claim.
func (t ticket) take() bool { return t.claim.state.CompareAndSwap(t.state, t.state|1) }

// refuse settles a claim that nobody is going to serve.
func (t ticket) refuse(reason error) {
	if t.take() {
		t.claim.settle(reason)
	}
}

// waitList is the tickets of the claims that wait for a queue, first come, first
// served. Some of them may be void.
//
// Void tickets go when they are found at the head; when the list would grow, so that it
// is never more than twice as long as the claims that wait, plus a constant; when they
// are half of it, as far as the shard is told of them (void, leaveOp); and when there
// are many that it was only told to count (voidElsewhere).
type waitList struct {
	tickets []ticket
	head    int
	limit   int
	void    int // tickets that are known to be void; some of them may be gone
}

const waitListMin = 64

func (w *waitList) len() int { return len(w.tickets) - w.head }

// all are the tickets in order.
func (w *waitList) all() []ticket { return w.tickets[w.head:] }

func (w *waitList) push(t ticket) {
	if len(w.tickets) >= max(w.limit, waitListMin) {
		w.sweep()
	}
	w.tickets = append(w.tickets, t)
}

// first returns the first ticket. REQUIRES: len() > 0.
func (w *waitList) first() ticket { return w.tickets[w.head] }

// pop removes the first ticket. REQUIRES: len() > 0.
func (w *waitList) pop() ticket {
	t := w.tickets[w.head]
	w.tickets[w.head] = ticket{}
	w.head++
	if w.head == len(w.tickets) {
		w.empty()
	}
	return t
}

// empty forgets all tickets, and the memory for many.
func (w *waitList) empty() {
	if w.tickets = w.tickets[:0]; cap(w.tickets) > waitListMin {
		w.tickets = nil
	}
	w.head, w.limit, w.void = 0, 0, 0
}

// sweep drops the void tickets.
func (w *waitList) sweep() {
	good := w.tickets[:0]
	for _, t := range w.all() {
		if t.good() {
			good = append(good, t)
		}
	}
	clear(w.tickets[len(good):])
	w.tickets, w.head, w.void = good, 0, 0
	w.limit = 2 * len(good)
	if len(good) == 0 {
		w.empty()
	}
}

// voided is told that a ticket of the list is void.
func (w *waitList) voided() {
	if w.void++; 2*w.void > w.len() {
		w.sweep()
	}
}

// anyGood reports whether a claim waits. It drops the void tickets at the head.
func (w *waitList) anyGood() bool {
	for w.len() > 0 && !w.first().good() {
		w.pop()
	}
	return w.len() > 0
}

func (w *waitList) drain(f func(ticket)) {
	for w.len() > 0 {
		f(w.pop())
	}
}

// claimLines is the claims that wait for a queue, or for a list of queues.
type claimLines struct {
	waiters waitList
	remote  waitList // claims of other nodes: served when no other waits
}

// line is the list in which a claim waits; away, if another node made it.
func (c *claimLines) line(away bool) *waitList {
	if away {
		return &c.remote
	}
	return &c.waiters
}

func (c *claimLines) isAwaited(away bool) bool {
	return c.waiters.anyGood() || away && c.remote.anyGood()
}

// front is the list of those who are served next.
func (c *claimLines) front() *waitList {
	if c.waiters.len() > 0 {
		return &c.waiters
	}
	return &c.remote
}

// wants is how many tasks the claims want that wait, as far as it is less than most.
func (c *claimLines) wants(most int) (tasks int) {
	for _, list := range [...]*waitList{&c.waiters, &c.remote} {
		for _, t := range list.all() {
			if tasks >= most {
				return tasks
			}
			if t.good() {
				tasks += t.tasks
			}
		}
	}
	return tasks
}

// isAwaited reports whether claims wait for a queue that are served before one that
// comes now; away, if another node made that.
func (s *shard) isAwaited(c *queueClaims, away bool) bool {
	for _, e := range c.sets {
		if e.set.isAwaited(away) {
			return true
		}
	}
	return s.isAwaitedAlone(c, away)
}

// isAwaitedAlone is isAwaited for claims that name few queues.
func (s *shard) isAwaitedAlone(c *queueClaims, away bool) bool {
	if c.listedAt == 0 {
		return false
	}
	if c.claimLines.isAwaited(away) {
		return true
	}
	s.unlist(c)
	return false
}

// enlist has a claim wait for queues, or for a list of them.
func (s *shard) enlist(t ticket, queues []string, list *queueList, away bool) {
	if list != nil {
		set := s.claimSet(list)
		for set == nil { // without room on the disk, nobody has looked for tasks
			set = s.claimSet(list)
		}
		set.line(away).push(t)
		s.feedSet(set)
		return
	}
	for _, name := range queues {
		c := s.claimsOf(s.QueueNamed(name))
		c.line(away).push(t)
		if c.listedAt == 0 {
			s.listed.Append(c)
			c.listedAt = s.listed.Len()
		}
		s.feedClaims(c)
	}
}

// unlist is for a queue for which, perhaps, nobody waits any more.
func (s *shard) unlist(c *queueClaims) {
	if c.front().len() > 0 {
		return
	}
	defer s.Rest(c.queue)
	if c.listedAt == 0 {
		return
	}
	if moved, ok := s.listed.Remove(c.listedAt - 1); ok {
		moved.listedAt = c.listedAt
	}
	c.listedAt = 0
}

// leave drops the tickets of a claim that its caller gives up. REQUIRES: it has taken it.
func (op *claimOp) leave() {
	names := slices.Clone(op.queues)
	for _, s := range op.shards {
		_ = s.inbox.pass(&leaveOp{names, op.list, false}) // one that is closing has no tickets
	}
}

// leaveOp tells a shard that a ticket for each of some queues is void.
type leaveOp struct {
	queues []string
	list   *queueList
	away   bool
}

func (op *leaveOp) resolve(s *shard) {
	if op.list != nil {
		if set := s.sets[op.list.digest]; set != nil {
			set.line(op.away).voided()
		}
		return
	}
	for _, name := range op.queues {
		if c := s.knownClaims(name); c != nil {
			c.line(op.away).voided()
			s.unlist(c)
		}
	}
}

func (op *leaveOp) settle(error) {}

// void drops the tickets of a claim that has been taken for a queue of this shard, but
// for the one by which it was.
func (s *shard) void(op *claimOp, by *queueClaims) {
	spent := false
	for _, name := range op.queues {
		c := s.knownClaims(name)
		if c == by && !spent {
			spent = true
			continue
		}
		if c != nil {
			c.line(op.remote).voided()
			if c != by { // serve is at it
				s.unlist(c)
			}
		}
	}
	s.voidElsewhere(op)
}

// voidElsewhere has the other shards in which a claim may wait count its tickets: they
// are busy with other things, or asleep, and look when there are many.
// REQUIRES: the claim has been taken.
func (s *shard) voidElsewhere(op *claimOp) {
	for _, other := range op.shards {
		if other != s {
			other.countVoid(op.tickets())
		}
	}
}

// tickets is how many a claim has in a shard in which it waits.
func (op *claimOp) tickets() int {
	if op.list != nil {
		return 1
	}
	return len(op.queues)
}

// staleCap is how many void tickets a shard may have beyond the number of good ones,
// before it looks for them.
const staleCap = 1 << 10

// countVoid may be called by anybody.
func (s *shard) countVoid(tickets int) {
	after := s.stale.Add(int64(tickets))
	if after > staleCap && after-int64(tickets) <= staleCap {
		_ = s.inbox.pass(&sweepOp{})
	}
}

// sweepOp has a shard drop the void tickets of all its lists.
type sweepOp struct{}

func (op *sweepOp) resolve(s *shard) {
	s.sweeping, s.sweepLeft, s.sweepKept = true, s.listed.Len(), 0
}

func (op *sweepOp) settle(error) {}

func (s *shard) sweepIsDue() bool { return s.sweeping }

// sweepTickets does what a sweepOp asks for.
func (s *shard) sweepTickets() {
	s.sweepLeft = min(s.sweepLeft, s.listed.Len())
	for s.sweepLeft > 0 && !s.Spent() {
		s.sweepLeft-- // from the end: unlist moves the last one, which has been looked at
		c := s.listed.At(s.sweepLeft)
		c.waiters.sweep()
		c.remote.sweep()
		s.sweepKept += c.waiters.len() + c.remote.len()
		s.unlist(c)
	}
	if s.sweepLeft == 0 {
		for _, set := range s.sets {
			set.waiters.sweep()
			set.remote.sweep()
			s.sweepKept += set.waiters.len() + set.remote.len()
		}
		s.stale.Store(-int64(s.sweepKept)) // or countVoid would ask for no other sweep
		s.sweeping = false
	}
}

// areHungry reports whether claims wait for what may be ready.
func (s *shard) areHungry() bool { return len(s.Effects.Fed)+len(s.hungry)+len(s.hungrySets) > 0 }

// feedClaims has the waiters of a queue served when the group's operations are decided.
func (s *shard) feedClaims(c *queueClaims) {
	if c.queue.Mask == 0 {
		return
	}
	if len(c.sets) > 0 {
		s.feedSets(c)
	}
	if !c.hungry && c.front().len() > 0 {
		c.hungry = true
		s.hungry = append(s.hungry, c)
	}
}

// queueClaims is what the owner of a shard knows of a queue beside its tasks: the claims that wait
// for them, and what claims have to pass.
type queueClaims struct {
	queue *engine.Queue
	claimLines
	sets     []setEntry // that have the queue
	hungry   bool       // on the list of those whose waiters may be served
	listedAt int        // 1 + the place in the list of those with tickets; 0: it has none

	heads *queueHeads // nil: the shard has published none
	gate  gateway     // nil: neither a rate nor a limit of concurrency
	shut  bool        // the gate has turned a claim away, and has not been opened since

	opensAt     uint64           // when it is no longer held back; monotonic clock of the shard, ms
	throttledAt int              // the place among those that are held back; negative: it is none
	dirty       bool             // on the list of those that speak looks after
	allocator   *permitAllocator // nil: another shard has it, or none does
}

func (c *queueClaims) Due() uint64 { return c.opensAt }
func (c *queueClaims) Spot() *int  { return &c.throttledAt }

// claimsOf returns what the owner knows of a queue.
// REQUIRES: the rules have not forgotten it, since another queue may have its handle then.
func (s *shard) claimsOf(q *engine.Queue) *queueClaims {
	if c := s.claims.At(q.Handle); c != nil {
		return c
	}
	for s.claims.Len() <= q.Handle {
		s.claims.Append(nil)
	}
	c := &queueClaims{queue: q, throttledAt: -1}
	s.claims.Set(q.Handle, c)
	return c
}

// knownClaims is claimsOf for a queue by name; nil if the shard does not know the queue.
func (s *shard) knownClaims(queue string) *queueClaims {
	if q := s.Queues[queue]; q != nil {
		return s.claimsOf(q)
	}
	return nil
}

// isNeeded reports whether the owner could not do without a queue.
func (c *queueClaims) isNeeded() bool {
	return c.gate != nil || c.allocator != nil || c.throttledAt >= 0 || c.dirty || c.listedAt != 0 || len(c.sets) > 0 || c.hungry
}

// forget drops the queues that neither the rules nor the owner need.
func (s *shard) forget() {
	for _, q := range s.Effects.Forgotten {
		if c := s.claims.At(q.Handle); c != nil {
			if c.isNeeded() {
				continue // whoever ends that lets the queue rest again
			}
			s.unpublish(c)
			s.claims.Set(q.Handle, nil)
		}
		s.Forget(q)
	}
	clear(s.Effects.Forgotten)
	s.Effects.Forgotten = s.Effects.Forgotten[:0]
}
