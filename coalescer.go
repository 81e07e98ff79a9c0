package codeq

import (
	lists "container/list"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
)

// The commit pipeline of a shard:
//
//	sequence   callers append operations to the inbox
//	resolve    the owner decides them one by one, and gathers their keys in a group
//	persist    the group is committed once
//	release    the callers of the group are woken
//
// Persist is one call and not a stage of its own goroutine: while a group
// persists the next one gathers in the inbox, and whatever resolve reads from
// disk is the whole history, with nothing of it still under way. A second
// group in flight would need resolve to know which of its reads are behind.

// operation is one unit of work of a shard.
type operation interface {
	// resolve decides the operation against the shard's memory and adds its
	// keys to the group. It calls shard.settle once it is decided, now or,
	// for a claim that waits, in a later group.
	resolve(s *shard)
	// verb is what else there is to know of the operation.
	verb() *verb
	// settle wakes the caller. A nil err means that the group persisted, and
	// the caller gets what resolve decided.
	settle(err error)
}

// completion is the part of an operation that its caller waits on.
type completion struct {
	done chan error // capacity 1: a caller that has gone does not block the owner
	err  error      // decided by resolve
	// reply is called in place of sending to done, if the caller is elsewhere.
	// It must not block.
	reply func(error)
}

func newCompletion() completion { return completion{done: make(chan error, 1)} }

func (c *completion) base() *completion { return c }

func (c *completion) settle(err error) {
	if err == nil {
		err = c.err
	}
	if c.reply != nil {
		c.reply(err)
		return
	}
	c.done <- err
}

// wait returns the outcome. When ctx ends first, settled is false: the
// operation is under way and its memory still belongs to the shard.
func (c *completion) wait(ctx context.Context) (settled bool, err error) {
	cancel := ctx.Done()
	if cancel == nil {
		return true, <-c.done
	}
	select {
	case err := <-c.done:
		return true, err
	case <-cancel:
		return false, fmt.Errorf("%w: %w", ErrUncertain, base.EndOf(ctx))
	}
}

// inbox is the bounded queue of operations before a shard.
type inbox struct {
	depth int
	wake  chan struct{} // capacity 1; sent by whoever ends the owner's sleep
	woken uint64        // when that was, ms since origin; the owner reads it when it was woken

	origin   time.Time
	mu       sync.Mutex // guards what follows
	ops      []operation
	late     lists.List    // of uint64: when operations on leases came that wait for room, ms since origin
	let      uint64        // when the first of those of ops came that have waited; never: none has
	refuse   error         // non-nil: nothing is accepted any more
	sleeping bool          // the owner waits on wake
	room     chan struct{} // non-nil while callers wait for room; closed by take
}

func newInbox(depth int, origin time.Time) *inbox {
	return &inbox{depth: depth, wake: make(chan struct{}, 1), origin: origin, let: engine.Never}
}

// push appends an operation, waiting for room until ctx ends. An error means
// that the operation was not applied.
func (in *inbox) push(ctx context.Context, op operation) error {
	var late *lists.Element
	for {
		over := ctx.Err() // may be the caller's own code: nothing is locked
		if over != nil {
			over = base.EndOf(ctx)
		}
		in.mu.Lock()
		err := in.refuse
		if over != nil {
			err = over
		}
		if late != nil && (err != nil || len(in.ops) < in.depth) {
			in.let = min(in.let, in.late.Remove(late).(uint64))
		}
		if err != nil {
			in.mu.Unlock()
			return err
		}
		if len(in.ops) < in.depth {
			in.append(op)
			return nil
		}
		if late == nil && op.verb().is(onLease) {
			late = in.late.PushBack(millisSince(in.origin))
		}
		if in.room == nil {
			in.room = make(chan struct{})
		}
		room := in.room
		in.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
		}
	}
}

// pass appends an operation of another shard's owner, which must not wait: the
// operation's caller waits for it, so that there are no more of them than
// callers.
func (in *inbox) pass(op operation) error {
	in.mu.Lock()
	if in.refuse != nil {
		defer in.mu.Unlock()
		return in.refuse
	}
	in.append(op)
	return nil
}

// append adds op and unlocks. REQUIRES: mu is held.
func (in *inbox) append(op operation) {
	in.ops = append(in.ops, op)
	in.unlock()
}

// unlock ends the owner's sleep. REQUIRES: mu is held.
func (in *inbox) unlock() {
	wake := in.sleeping
	in.sleeping = false
	if wake {
		in.woken = millisSince(in.origin)
	}
	in.mu.Unlock()
	if wake {
		in.wake <- struct{}{}
	}
}

// take swaps the waiting operations for the empty slice into. When there are
// none and sleep is set, the owner is taken to wait on wake from now on.
// refused is why nothing will follow.
func (in *inbox) take(into []operation, sleep bool) (ops []operation, late lateness, refused error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	late = lateness{in.let, engine.Never}
	in.let = engine.Never
	if first := in.late.Front(); first != nil {
		late.left = first.Value.(uint64)
	}
	if len(in.ops) == 0 {
		in.sleeping = sleep && in.refuse == nil
		return into, late, in.refuse
	}
	ops, in.ops = in.ops, into
	if in.room != nil {
		close(in.room)
		in.room = nil
	}
	return ops, late, in.refuse
}

// lateness is when the first operations on leases came that have had to wait for room,
// of those taken and of those that still wait: ms since origin; never: none has.
type lateness struct{ taken, left uint64 }

// pick takes out an operation that matches; the first of the given number of
// operations are known not to. When there is none, the owner is taken to wait on wake
// from now on, and known is how many do not match. refused is why no other will follow.
func (in *inbox) pick(known int, match func(operation) bool) (op operation, _ int, refused error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for i, op := range in.ops[known:] {
		if match(op) {
			in.ops = slices.Delete(in.ops, known+i, known+i+1)
			return op, 0, nil
		}
	}
	in.sleeping = in.refuse == nil
	return nil, len(in.ops), in.refuse
}

func (in *inbox) len() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.ops)
}

// awake undoes the sleep of take after a timer has ended it. It returns when somebody, or
// else the timer, ended the sleep, ms since origin.
func (in *inbox) awake() uint64 {
	in.mu.Lock()
	asleep := in.sleeping
	in.sleeping = false
	if asleep {
		in.woken = millisSince(in.origin)
	}
	in.mu.Unlock()
	if !asleep {
		<-in.wake // whoever saw the sleep has sent, or is about to
	}
	return in.woken
}

// stop refuses further operations with reason, the first one given or
// ErrClosed; those accepted before stay.
func (in *inbox) stop(reason error) {
	in.mu.Lock()
	if in.refuse == nil || reason == ErrClosed {
		in.refuse = reason
	}
	if in.room != nil {
		close(in.room)
		in.room = nil
	}
	in.unlock()
}

// committer makes a batch durable. After an error it is unknown whether the
// batch was applied.
type committer interface {
	Commit(*pebble.Batch) error
	// Confirm makes sure that what a group without a key has read is still so.
	// After an error, nothing was applied.
	Confirm() error
}

// callers is whose operations a group has decided.
type callers struct {
	served   int         // how many operations the last group has decided
	settled  []operation // to be woken when the group has persisted
	answered []operation // likewise, of other nodes
	waking   operation   // whose caller is being woken; nil: none
}

func (c *callers) count() int { return len(c.settled) + len(c.answered) }

// wake wakes a caller, unless that was done before the owner panicked.
func (c *callers) wake(op operation, err error) {
	if op != nil {
		c.waking = op
		op.settle(err)
	}
}

// wakeAll wakes all of them.
func (c *callers) wakeAll(err error) {
	if len(c.answered) > 0 {
		for i, op := range c.answered {
			c.answered[i] = nil
			c.wake(op, err)
		}
		c.answered = c.answered[:0]
		runtime.Gosched() // so that the answers are written before the callers here take the processor
	}
	for i, op := range c.settled {
		c.settled[i] = nil
		c.wake(op, err)
	}
	c.settled, c.waking = c.settled[:0], nil
}

// release wakes the callers and empties the group.
func (s *shard) release(err error) {
	if err == nil {
		s.tellAll() // first: who is woken finds the event of what it did
	}
	s.Effects.Clear()
	s.callers.wakeAll(err)
	s.Group.Clear()
}

// undecided is the operations that a shard's owner has taken and not decided yet.
type undecided struct {
	taken    []operation // swapped with the inbox
	cursor   int         // of taken: what is before has been resolved
	deferred []operation // to be resolved again once disk, or memory, has what they ask for
	again    []operation // memory for the next deferred
	retrying []operation // those of deferred that are about to be decided; nil: none
	deciding operation   // nil: none
	large    largeLine
	barrier  *barrierOp // nothing else is decided before the owner has stood still for it; nil: none
}

// A produce of megabytes takes as long to commit as hundreds of small operations, and a few of them
// fill memtables faster than those are flushed. So that a small operation waits for one large one
// at the most, those wait in a line of their own: a group takes one of them if it has nothing else
// to do, or if the group before had no large one. They also wait for flushes and compactions, long
// before everybody has to (failstop.Latch.Takes).

// largePart is the part of groupBytes from which a produce is large, by the size of its records:
// 256 KiB.
const largePart = 4

// largeLine is the large operations of a shard that wait, in the order in which they came.
type largeLine struct {
	ops     []*produceOp
	passed  bool   // the last group went before them
	recheck uint64 // when to see whether memtables have been flushed: the shard's ms
	until   uint64 // when the first one waits no longer, whatever the memtables are: likewise; 0: it has not waited yet
}

// How long large operations wait between two looks at the memtables, and each of them for flushes
// and compactions at the most: ms.
const (
	largeRecheck  = 2
	largePatience = 1000
)

// rush has none of them wait for memtables any more.
func (l *largeLine) rush() { l.recheck, l.until = 0, 1 }

// recordBytes is the size of the records of an operation's tasks.
func (op *produceOp) recordBytes() (n int) {
	for i := range op.tasks {
		n += len(op.tasks[i].Rec)
	}
	return n
}

// putInLine puts an operation in the line if it is large.
func (s *shard) putInLine(op operation) bool {
	p, ok := op.(*produceOp)
	if !ok || p.recordBytes() < s.opts.groupBytes/largePart {
		return false
	}
	s.undecided.large.ops = append(s.undecided.large.ops, p)
	return true
}

// largeIsDue reports whether a large operation may be decided, or memtables are to be looked at.
func (s *shard) largeIsDue() bool {
	return len(s.undecided.large.ops) > 0 && s.undecided.large.recheck <= s.Now
}

// decideLarge decides the first operation of the line, unless the group has others for the first
// time.
func (s *shard) decideLarge(others bool) {
	l := &s.undecided.large
	if !s.largeIsDue() || s.Broken != nil {
		return
	}
	if others && !l.passed {
		l.passed = true
		return
	}
	op := l.ops[0]
	if (l.until == 0 || s.Now < l.until) && s.HasRoom(op.verb().room(op)) && !s.Store.Takes(op.recordBytes()) {
		if l.recheck = s.Now + largeRecheck; l.until == 0 {
			l.until = s.Now + largePatience
		}
		return
	}
	l.ops[0], l.until = nil, 0
	if l.ops, l.passed = l.ops[1:], false; len(l.ops) == 0 {
		l.ops = nil
	}
	s.Budget, s.Judged = s.NewBudget(engine.CallerBudget, s.steps.At), s.clock.Taken()
	s.decide(op)
}
