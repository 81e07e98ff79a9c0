package codeq

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"slices"

	"codeq/internal/chunked"
	"codeq/internal/engine"
)

// queueList is a long list of queues that claims name. It is made by a caller's
// goroutine, once for a Run, and never changes; shards know it by its digest.
type queueList struct {
	names   []string
	weights []int // none: the order of the names is strict
	digest  [sha256.Size]byte
}

// shortList is how many queues a claim may name and be looked at, and wait, in each.
// Those that name more go by a claimSet.
const shortList = 16

// newQueueList returns nil for a list that is short. It keeps names and weights.
func newQueueList(names []string, weights []int) *queueList {
	if len(names) <= shortList {
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
	return &queueList{names, weights, [sha256.Size]byte(h.Sum(nil))}
}

// claimSet is a long list of queues in a shard. The claims that name it wait in it once
// and not in each queue, and are served from those of its queues that may have
// something for a claim, so that neither costs by the length of the list. It is built once,
// and dropped with the Run that made it, or when others need the room.
//
// Invariant: once it is built, a queue that is not open has nothing for a claim until
// feed is called for it. One that lacks a permit is open: nobody gets it one but for a
// claim that has looked there.
type claimSet struct {
	list   *queueList
	queues chunked.List[*engine.Queue] // of list.names; shorter while the set is being built, or dropped
	open   lottery                     // by index
	aside  []int                       // to be opened again, when the claims that are looked at are served or wait
	claimLines
	hungry bool   // on the shard's list of sets whose claims may be served
	group  uint32 // windowMemory.pass of the group that has asked for it last
}

// setEntry is one of the sets that have a queue, and the queue's index there.
type setEntry struct {
	set *claimSet
	at  int
}

const (
	setStep  = 4096    // queues that are added to a set in one step
	setNames = 1 << 17 // queues in the sets of a shard beyond which idle sets go

	// For as many groups it is not known whether a claim waits for a set that is not complete.
	setGroups = 1024
)

// claimSet returns the set of a list; nil while it is not built yet.
func (s *shard) claimSet(list *queueList) *claimSet {
	set := s.sets[list.digest]
	if set == nil {
		if s.droppedNames > setNames {
			return nil // until those are gone
		}
		s.dropIdleSets(setNames - len(list.names))
		set = &claimSet{list: list, open: newLottery(list)}
		if s.sets == nil {
			s.sets = make(map[[sha256.Size]byte]*claimSet)
		}
		s.sets[list.digest] = set
		s.setNames += len(list.names)
	}
	set.group = s.GroupNumber()
	names := list.names[set.queues.Len():]
	for _, name := range names[:min(setStep, len(names))] {
		q := s.QueueNamed(name)
		c := s.claimsOf(q)
		at := set.queues.Len()
		set.queues.Append(q)
		c.sets = append(c.sets, setEntry{set, at})
		if q.Mask != 0 {
			set.open.add(at)
		}
	}
	if set.queues.Len() < len(list.names) {
		return nil
	}
	return set
}

// dropIdleSets drops sets in which no claim waits until the others have no more queues
// than the given number.
func (s *shard) dropIdleSets(names int) {
	for _, set := range s.sets {
		if s.setNames <= names {
			return
		}
		set.waiters.sweep()
		set.remote.sweep()
		mayBeAsked := set.queues.Len() < len(set.list.names) && s.GroupNumber()-set.group < setGroups
		if set.front().len() == 0 && !set.hungry && !mayBeAsked {
			s.dropSet(set)
		}
	}
}

// dropSet drops a set for which nobody waits. Its queues are told by dropSetsOn.
func (s *shard) dropSet(set *claimSet) {
	delete(s.sets, set.list.digest)
	s.setNames -= len(set.list.names)
	s.droppedSets = append(s.droppedSets, set)
	s.droppedNames += set.queues.Len()
}

func (s *shard) dropSetsIsDue() bool { return len(s.droppedSets) > 0 }

// dropSetsOn takes dropped sets out of what their queues know of sets.
func (s *shard) dropSetsOn() {
	for n := len(s.droppedSets); n > 0; n-- {
		set := s.droppedSets[n-1]
		for at := set.queues.Len() - 1; at >= 0; at-- {
			if at%64 == 0 && s.Spent() {
				return
			}
			s.leaveSet(s.claimsOf(set.queues.Pop()), setEntry{set, at})
			s.droppedNames--
		}
		s.droppedSets[n-1], s.droppedSets = nil, s.droppedSets[:n-1]
	}
}

func (s *shard) leaveSet(c *queueClaims, entry setEntry) {
	if i := slices.Index(c.sets, entry); i >= 0 {
		last := len(c.sets) - 1
		c.sets[i], c.sets[last] = c.sets[last], setEntry{}
		c.sets = c.sets[:last]
	}
	if len(c.sets) == 0 {
		c.sets = nil
		s.Rest(c.queue)
	}
}

// dropSetOp drops the set of a Run that has ended, unless other claims wait in it.
type dropSetOp struct{ list *queueList }

func (op *dropSetOp) resolve(s *shard) {
	if set := s.sets[op.list.digest]; set != nil && set.list == op.list {
		set.waiters.sweep()
		set.remote.sweep()
		if set.front().len() == 0 && !set.hungry {
			s.dropSet(set)
		}
	}
}

func (op *dropSetOp) settle(error) {}

// feedSets opens a queue in the sets that have it.
func (s *shard) feedSets(c *queueClaims) {
	for _, e := range c.sets {
		e.set.open.add(e.at)
		s.feedSet(e.set)
	}
}

// feedSet has the claims that wait in a set served when the group's operations are decided.
func (s *shard) feedSet(set *claimSet) {
	if !set.hungry && set.open.len() > 0 && set.front().len() > 0 {
		set.hungry = true
		s.hungrySets = append(s.hungrySets, set)
	}
}

// tryClaimOf is tryClaim for a claim that names a long list.
func (s *shard) tryClaimOf(op *claimOp) claimOutcome {
	s.feedAll() // or its open queues would be those of the group before
	set := s.claimSet(op.list)
	if set == nil {
		return claimPending
	}
	if !op.noWait && set.isAwaited(op.remote) {
		return claimNothing
	}
	defer set.openAside()
	for set.open.len() > 0 {
		at := op.drawn - 1 // it was drawn before, and has been refilled
		if at < 0 || !set.open.has(at) {
			at = set.open.draw()
		}
		op.drawn = 0
		q := set.queues.At(at)
		if s.isElsewhereBefore(op, set, at) || s.isElsewhere(op, q.Name, q) {
			return claimElsewhere
		}
		if !op.noWait && s.isAwaitedAlone(s.claimsOf(q), op.remote) {
			set.open.remove(at)
			set.aside = append(set.aside, at)
			continue
		}
		l, pending := s.next(q)
		switch {
		case pending:
			op.drawn = at + 1
			return claimPending
		case s.isPassedOver(op, q.Name, q, l):
			return claimElsewhere
		case l == nil:
			set.shut(s, at)
			if op.noWait && s.asks(s.claimsOf(q), op) {
				return claimAsks
			}
			continue
		case !s.takes(op.ticket()):
			s.leaveGate(s.claimsOf(q))
			return claimServed
		}
		if op.visited > 0 && !op.noWait {
			s.voidElsewhere(op)
		}
		s.giveOfSet(op, set, q, l)
		return claimServed
	}
	if s.isElsewhereBefore(op, set, set.queues.Len()) {
		return claimElsewhere
	}
	return claimNothing
}

// shut takes a queue out of the draw that has given nothing: until it is fed or, if it is a permit
// that it lacks, for this time.
func (set *claimSet) shut(s *shard, at int) {
	set.open.remove(at)
	if q := set.queues.At(at); q.Gated && q.Counts.Ready > 0 && s.claimsOf(q).permits() != nil {
		set.aside = append(set.aside, at)
	}
}

func (set *claimSet) openAside() {
	for _, at := range set.aside {
		set.open.add(at)
	}
	set.aside = set.aside[:0]
}

// next draws a queue that has a task for a claim, as shard.next; l is nil if none has. A batch
// goes on with it: l is nil, too, if other shards have more urgent tasks of the queue drawn.
func (set *claimSet) next(s *shard, batch bool) (q *engine.Queue, l *engine.Lane) {
	for set.open.len() > 0 && s.Broken == nil {
		at := set.open.draw()
		q, limit := set.queues.At(at), uint64(0)
		if batch {
			limit = s.highestElsewhere(q)
		}
		if l, _ := s.nextOf(q, limit); l != nil {
			return q, l
		}
		if h := s.headOf(q); h != 0 && h.rank() < limit {
			return nil, nil
		}
		set.shut(s, at) // if it waits for a refill, that feeds it
	}
	return nil, nil
}

// giveOfSet serves a claim that has been taken: with tasks of q, l's first to begin with,
// and if there is room, with those of other queues that are drawn, as far as other shards
// have no more urgent ones.
func (s *shard) giveOfSet(op *claimOp, set *claimSet, q *engine.Queue, l *engine.Lane) {
	for l != nil && s.giveOf(op, q, l) {
		q, l = set.next(s, true)
	}
	s.settle(op)
	s.giving = nil
}

func (s *shard) serveSets(served *int) {
	serveInTurn(&s.hungrySets, served, func(set *claimSet) (all bool) {
		all = s.serveSet(set, served)
		set.hungry = !all
		return all
	})
}

// serveSet is serveQueue for a set.
func (s *shard) serveSet(set *claimSet, served *int) bool {
	defer set.openAside()
	for ; set.front().len() > 0; *served++ {
		if !s.mayDecide(*served) {
			return false
		}
		if !set.front().first().good() {
			set.front().pop()
			continue
		}
		q, l := set.next(s, false)
		if l == nil {
			break
		}
		if t := set.front().pop(); s.takes(t) {
			s.voidElsewhere(t.claim)
			s.giveOfSet(t.claim, set, q, l)
		} else {
			s.leaveGate(s.claimsOf(q))
		}
	}
	return true
}

// lottery draws among the members of a subset of 0 to n-1, each in proportion to its
// weight, or the smallest if there are no weights, in time logarithmic in n: a Fenwick
// tree (P. M. Fenwick, A New Data Structure for Cumulative Frequency Tables, 1994) of the
// members' weights.
type lottery struct {
	weights []int
	tree    []uint64
	members []uint64 // bits
	n       int      // members
	total   uint64   // of the members' weights
}

func newLottery(list *queueList) lottery {
	n := len(list.names)
	return lottery{weights: list.weights, tree: make([]uint64, n+1), members: make([]uint64, (n+63)/64)}
}

func (l *lottery) len() int { return l.n }

func (l *lottery) has(at int) bool { return l.members[at/64]>>(at%64)&1 == 1 }

func (l *lottery) weight(at int) uint64 {
	if len(l.weights) == 0 {
		return 1
	}
	return uint64(l.weights[at])
}

func (l *lottery) add(at int) {
	if !l.has(at) {
		l.members[at/64] |= 1 << (at % 64)
		l.n++
		l.change(at, l.weight(at))
	}
}

func (l *lottery) remove(at int) {
	if l.has(at) {
		l.members[at/64] &^= 1 << (at % 64)
		l.n--
		l.change(at, -l.weight(at))
	}
}

// change adds to a member's weight; sums wrap around.
func (l *lottery) change(at int, by uint64) {
	l.total += by
	for i := at + 1; i < len(l.tree); i += i & -i {
		l.tree[i] += by
	}
}

// draw returns a member. REQUIRES: there is one.
func (l *lottery) draw() int {
	if len(l.weights) == 0 {
		return l.find(0)
	}
	return l.find(rand.Uint64N(l.total))
}

// find returns the member before which the weights sum up to lot or less, and with which
// they are more. REQUIRES: lot < total.
func (l *lottery) find(lot uint64) int {
	at := 0
	for step := 1 << (bits.Len(uint(len(l.tree)-1)) - 1); step > 0; step >>= 1 {
		if next := at + step; next < len(l.tree) && l.tree[next] <= lot {
			at = next
			lot -= l.tree[next]
		}
	}
	return at
}
