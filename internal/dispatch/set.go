package dispatch

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"codeq/internal/container/chunked"
	"codeq/internal/container/timeheap"
	"codeq/internal/engine"
)

// List is a long list of queues of claims. A caller's goroutine makes it, once for many claims, and
// it never changes; shards identify it by its digest.
type List struct {
	names   []string
	weights []int // none: the order of the names is strict
	Digest  [sha256.Size]byte
}

// ShortList is how many queues a claim may name and still be tried, and wait, in each of them.
// Claims that name more use a List.
const ShortList = 16

// NewList returns a List, or nil for a short one. It keeps names and weights.
func NewList(names []string, weights []int) *List {
	if len(names) <= ShortList {
		return nil
	}
	h := sha256.New()
	var b []byte
	for i, name := range names {
		b = append(binary.AppendUvarint(b[:0], uint64(len(name))), name...)
		if len(weights) > 0 {
			b = binary.AppendUvarint(b, uint64(weights[i])) // at least 1
		} else {
			b = append(b, 0)
		}
		h.Write(b) // never fails
	}
	return &List{names: names, weights: weights, Digest: [sha256.Size]byte(h.Sum(nil))}
}

// set is a List in a shard. Claims with the List wait in the set once and not in each queue, and
// are served from those of its queues that may have a task, so that the cost of neither depends on
// the length of the list. A set is built once, and dropped with the Run that made the list, when no
// claim has used it for setIdle, or when others need the room.
//
// Invariant: once the set is built, a queue that is not open has no task for a claim until feed is
// called for it. A queue is open if its gateway may be asked: only a claim that tries it gets a
// place.
type set struct {
	list   *List
	queues chunked.List[*engine.Queue] // of list.names; shorter while the set is being built, or dropped
	open   lottery                     // by index
	aside  []int                       // to be opened again, after the present claims are served or wait
	heads  *listHeads                  // nil: no weights, or no other shards; or the set has left it
	last   bool                        // the set was dropped, and takes heads apart
	lines
	servable bool   // its claims may be served
	turn     uint64 // setTable.turns when a claim of the set was served last, or the set was made
	group    uint32 // Dispatcher.groups in the group that has used it last
	used     uint64 // when a claim has used it last, by uptime
	due      uint64 // when to look whether it is used, by uptime
	spot     int    // in setTable.looks
}

// Due and Spot are timeheap.Item's.
func (s *set) Due() uint64 { return s.due }
func (s *set) Spot() *int  { return &s.spot }

// setEntry is one of the sets that contain a queue, and the queue's index there.
type setEntry struct {
	set *set
	at  int
}

// setTable holds the sets of a shard.
type setTable struct {
	byDigest     map[[sha256.Size]byte]*set
	names        int                 // queues in them
	looks        timeheap.Heap[*set] // all sets, by when to look whether they are used
	servable     []*set              // sets that have waiting claims, and may have ready tasks
	turns        uint64              // claims served
	dropped      []*set              // dropped sets that are still in the entries of some queues
	droppedNames int                 // queues in them
}

const (
	setStep  = 4096    // queues that are added to a set in one step
	setNames = 1 << 17 // with more queues than this in the sets of a shard, idle sets are dropped

	// setIdle is for how long no claim has used a set that is dropped; a Run that has only long
	// tasks builds its set again after such a time. The owner looks less often at a set that has
	// waiting claims, since each look wakes it. ms.
	setIdle    = 60_000
	setLookAll = 10 * setIdle

	// For so many groups it is not known whether a claim waits for a set that is not complete.
	setGroups = 1024
)

// Build builds the set of a list, in steps. It returns true if the set is complete.
func (d *Dispatcher) Build(list *List) bool { return d.set(list) != nil }

// set returns the set of a list; nil while it is not built yet.
func (d *Dispatcher) set(list *List) *set {
	if d.sets.byDigest[list.Digest] == nil && d.sets.droppedNames > setNames {
		return nil // until those are gone
	}
	return d.buildSet(list)
}

// buildSet builds the next part of the set of a list. It returns nil while the set is not complete.
func (d *Dispatcher) buildSet(list *List) *set {
	t := &d.sets
	s := t.byDigest[list.Digest]
	if s == nil {
		d.dropIdleSets(setNames - len(list.names))
		s = &set{list: list, open: newLottery(list), turn: t.turns, due: d.rules.Uptime + setIdle, spot: -1}
		if t.byDigest == nil {
			t.byDigest = make(map[[sha256.Size]byte]*set)
		}
		if t.byDigest[list.Digest] = s; d.board != nil && len(list.weights) > 0 {
			s.heads = d.board.holdList(list)
		}
		t.names += len(list.names)
		t.looks.Push(s)
	}
	s.group, s.used = d.groups, d.rules.Uptime
	names := list.names[s.queues.Len():]
	for _, name := range names[:min(setStep, len(names))] {
		q := d.rules.Names.QueueNamed(name)
		c := d.Of(q)
		at := s.queues.Len()
		s.queues.Append(q)
		c.sets = append(c.sets, setEntry{s, at})
		if q.Mask != 0 || c.mayStart() {
			s.open.add(at)
		}
	}
	if s.heads != nil {
		s.heads.join(s.queues.Len(), d.shards)
	}
	if s.queues.Len() < len(list.names) {
		return nil
	}
	return s
}

// isIdle reports whether no claim waits in the set. It drops the stale tickets.
func (s *set) isIdle() bool {
	s.sweep()
	return s.front().Len() == 0 && !s.servable
}

// dropIdleSets drops sets without waiting claims until the others have no more queues than the
// given number.
func (d *Dispatcher) dropIdleSets(names int) {
	for _, s := range d.sets.byDigest {
		if d.sets.names <= names {
			return
		}
		mayBeAsked := s.queues.Len() < len(s.list.names) && d.groups-s.group < setGroups
		if !mayBeAsked && s.isIdle() {
			d.sets.drop(s)
		}
	}
}

// DropSet drops the set of a list that is not used any more, unless other claims wait in it.
func (d *Dispatcher) DropSet(list *List) {
	if s := d.sets.byDigest[list.Digest]; s != nil && s.list == list && s.isIdle() {
		d.sets.drop(s)
	}
}

// drop drops a set without waiting claims. dropSetsOn removes it from its queues.
func (t *setTable) drop(s *set) {
	delete(t.byDigest, s.list.Digest)
	t.looks.Remove(s)
	t.names -= len(s.list.names)
	t.dropped = append(t.dropped, s)
	t.droppedNames += s.queues.Len()
}

// NextDrop returns when dropSetsOn has something to do, by uptime; engine.Never: never.
func (d *Dispatcher) NextDrop() uint64 {
	if len(d.sets.dropped) > 0 {
		return 0
	}
	return d.sets.looks.Next()
}

// dropSetsOn drops sets that no claim has used for long, and removes dropped sets from the entries
// of their queues, until the budget of the rules is spent.
func (d *Dispatcher) dropSetsOn() {
	t := &d.sets
	for now := d.rules.Uptime; t.looks.Next() <= now && !d.rules.Spent(); {
		switch s := t.looks.Pop(); {
		case s.used+setIdle > now:
			s.due = s.used + setIdle
			t.looks.Push(s)
		case !s.isIdle():
			s.due = now + setLookAll
			t.looks.Push(s)
		default:
			t.drop(s)
		}
	}
	for n := len(t.dropped); n > 0; n-- {
		s := t.dropped[n-1]
		if !s.leaveHeads(d.rules.Spent) {
			return
		}
		for at := s.queues.Len() - 1; at >= 0; at-- {
			if at%64 == 0 && d.rules.Spent() {
				return
			}
			d.leaveSet(d.Of(s.queues.Pop()), setEntry{s, at})
			t.droppedNames--
		}
		t.dropped[n-1], t.dropped = nil, t.dropped[:n-1]
	}
}

// leaveHeads ends the set's use of the heads of its list, unless spent returns true before.
func (s *set) leaveHeads(spent func() bool) (done bool) {
	if s.heads == nil {
		return true
	}
	if !s.last {
		s.last = s.heads.quit()
	}
	for n := 1; s.last && s.heads.leaveOne(); n++ {
		if n%64 == 0 && spent() {
			return false
		}
	}
	s.heads = nil
	return true
}

func (d *Dispatcher) leaveSet(q *Queue, entry setEntry) {
	if i := slices.Index(q.sets, entry); i >= 0 {
		last := len(q.sets) - 1
		q.sets[i], q.sets[last] = q.sets[last], setEntry{}
		q.sets = q.sets[:last]
	}
	if len(q.sets) == 0 {
		q.sets = nil
		d.rules.Names.Rest(q.Queue)
	}
}

// feedSets opens a queue in the sets that contain it.
func (d *Dispatcher) feedSets(q *Queue) {
	for _, e := range q.sets {
		e.set.open.add(e.at)
		d.feedSet(e.set)
	}
}

// feedSet makes the next Serve serve the claims that wait in a set.
func (d *Dispatcher) feedSet(s *set) {
	if !s.servable && s.open.len() > 0 && s.front().Len() > 0 {
		s.servable = true
		d.sets.servable = append(d.sets.servable, s)
	}
}

// FeedAll feeds the queues that may have got claimable tasks since its last call.
func (d *Dispatcher) FeedAll() {
	fed := d.rules.TakeFed()
	for i, q := range fed {
		fed[i] = nil
		d.feed(d.Of(q))
	}
}

// trySet is Try for a claim with a List.
func (d *Dispatcher) trySet(c *Claim) Outcome {
	d.FeedAll() // otherwise the open queues would be those of the group before
	s := d.set(c.List)
	if s == nil {
		return Pending
	}
	drawn := c.drawn
	c.drawn = 0
	if !c.NoWait && s.isAwaited(c.Remote) {
		return Nothing
	}
	defer s.openAside()
	d.wantOfSet(s)
	for s.open.len() > 0 {
		at := drawn - 1 // it was drawn before, and has been refilled
		drawn = 0
		if at < 0 || !s.open.has(at) {
			at = s.open.draw()
		}
		q := d.Of(s.queues.At(at))
		if d.isElsewhereBefore(c, s, at) || d.isElsewhere(c, q.Name, q) {
			return Elsewhere
		}
		if !c.NoWait && d.isAwaited(q, c.Remote) {
			s.open.remove(at)
			s.aside = append(s.aside, at)
			continue
		}
		l, pending := d.next(q, 0, nil)
		switch {
		case pending:
			c.drawn = at + 1
			return Pending
		case d.isPassedOver(c, q.Name, q, l):
			return Elsewhere
		case l == nil:
			d.shut(s, q, at)
			if c.NoWait && d.asks(q, c) {
				return Asks
			}
			continue
		case !d.takes(c.Ticket()):
			d.leaveGate(q)
			return Done
		}
		d.giveOfSet(c, s, q, l, c.Visited && !c.NoWait)
		return Done
	}
	if d.isElsewhereBefore(c, s, s.queues.Len()) {
		return Elsewhere
	}
	return Nothing
}

// wantOfSet asks other shards to start suspects of the queues of a set.
func (d *Dispatcher) wantOfSet(s *set) {
	if d.slow.offered.Load() == 0 {
		return
	}
	for _, name := range d.slow.offeredQueues() {
		if q := d.known(name); q != nil && slices.ContainsFunc(q.sets, func(e setEntry) bool { return e.set == s }) {
			d.wantSuspect(name)
		}
	}
}

// shut excludes a queue that had no task from the draw: until it is fed or, if its gateway may be
// asked, only for this time.
func (d *Dispatcher) shut(s *set, q *Queue, at int) {
	s.open.remove(at)
	if !q.Gated || q.Counts.Ready == 0 {
		return
	}
	if g := q.sharedGate(); q.gate.MayAsk() || g != nil && !g.waitShut(d) {
		s.aside = append(s.aside, at)
	}
}

// isServableInSet reports whether a set that contains the queue has claims that may be served.
func (q *Queue) isServableInSet() bool {
	return slices.ContainsFunc(q.sets, func(e setEntry) bool { return e.set.servable })
}

func (s *set) openAside() {
	for _, at := range s.aside {
		s.open.add(at)
	}
	s.aside = s.aside[:0]
}

// draw draws a queue that has a task for a claim; l is nil if none has. c is the claim if it has
// tasks already, or nil; then l is also nil if other shards have more urgent tasks of the queue
// drawn, or if the claim is full.
func (d *Dispatcher) draw(s *set, c *Claim) (q *Queue, l *engine.Lane) {
	for s.open.len() > 0 && d.rules.Broken == nil {
		at := s.open.draw()
		q, limit := d.Of(s.queues.At(at)), uint64(0)
		if c != nil {
			limit = d.highestElsewhere(q)
		}
		if l, _ := d.next(q, limit, c); l != nil || c != nil && c.full {
			return q, l
		}
		if rank := d.rankOf(q); rank > 0 && rank < limit {
			return nil, nil
		}
		d.shut(s, q, at) // if it waits for a refill, that feeds it
	}
	return nil, nil
}

// giveOfSet serves a claim that has been taken: with tasks of q, the first of l to begin with, and
// if there is room, with those of other queues that it draws, as long as other shards have no more
// urgent ones.
func (d *Dispatcher) giveOfSet(c *Claim, s *set, q *Queue, l *engine.Lane, waited bool) {
	for l != nil && d.giveOf(c, q, l) {
		q, l = d.draw(s, c)
	}
	d.sets.turns++
	s.turn, s.used = d.sets.turns, d.rules.Uptime
	d.markServed(c, waited)
}

// serveSets serves the claims that wait in sets. The set that was served last comes last, so that
// claims that wait in different sets for the same queue get its tasks in turn.
func (d *Dispatcher) serveSets(served *int) {
	if len(d.sets.servable) > 1 {
		slices.SortStableFunc(d.sets.servable, func(a, b *set) int { return cmp.Compare(a.turn, b.turn) })
	}
	serveInTurn(&d.sets.servable, served, func(s *set) (all bool) {
		all = d.serveSet(s, served)
		s.servable = !all
		return all
	})
}

// serveSet is serveQueue for a set.
func (d *Dispatcher) serveSet(s *set, served *int) bool {
	defer s.openAside()
	for ; s.front().Len() > 0; *served++ {
		if !d.rules.HasBudget(*served) {
			return false
		}
		if !s.front().first().Good() {
			s.front().Pop()
			continue
		}
		q, l := d.draw(s, nil)
		if l == nil {
			break
		}
		if t := q.pick(&s.lines, l); d.takes(t) {
			d.giveOfSet(t.claim, s, q, l, true)
		} else {
			d.leaveGate(q)
		}
	}
	return true
}
