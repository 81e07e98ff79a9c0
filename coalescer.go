package codeq

import (
	"context"
	"runtime"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/owner"
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
	// keys to the group. It calls shard.settleAfterCommit once it is decided, now or,
	// for a claim that waits, in a later group.
	resolve(s *shard)
	// verb is what else there is to know of the operation.
	verb() *verb
	// settle wakes the caller. A nil err means that the group persisted, and
	// the caller gets what resolve decided.
	settle(err error)
}

// sharedOp is an operation that may wait in several shards, one of which answers it: a claim.
type sharedOp interface {
	operation
	// noRoom lets it go on in another shard, as this one has no room for what it writes.
	noRoom(s *shard)
	// refuse is called in place of settle if this shard will not resolve it. It gives up the
	// shard's reference.
	refuse(reason error)
	// Take makes the caller's answer that of this shard; false: the answer is another one's.
	Take() bool
}

// refuse settles an operation that will not be resolved.
func refuse(op operation, reason error) {
	if shared, ok := op.(sharedOp); ok {
		shared.refuse(reason)
		return
	}
	op.settle(reason)
}

// completion is the part of an operation that its caller waits on.
type completion struct {
	done chan error // capacity 1: a caller that has gone does not block the owner
	err  error      // decided by resolve
	kind callKind   // which of verbs it is
	// format is one that all nodes of the shard know: encode writes nothing that is newer.
	format int
	// reply is called in place of sending to done, if the caller is elsewhere. It must not block.
	reply func(error)
}

func newCompletion(kind callKind) completion {
	return completion{done: make(chan error, 1), kind: kind}
}

func (c *completion) base() *completion { return c }
func (c *completion) verb() *verb       { return &verbs[c.kind] }

func (c *completion) settle(err error) {
	if err == nil {
		err = c.err
	}
	if c.reply != nil {
		c.reply(err)
		return
	}
	select {
	case c.done <- err:
	default: // it has an answer: its owner has panicked meanwhile
	}
}

// wait returns the outcome. If it is not settled, the operation is under way, and the shard's.
func (c *completion) wait(ctx context.Context, limit *base.Limit) (settled bool, err error) {
	return base.Await(ctx, limit, c.done)
}

// comesOnLease reports whether the time at which an operation came decides whether its lease is in
// force.
func comesOnLease(op operation) bool { return op.verb().is(onLease) }

// committer makes a batch durable. After an error it is unknown whether the batch was applied.
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
		if s.opts.teller != nil && !s.Group.Batch.Empty() {
			s.observe()
		}
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
	large    owner.Line[operation]
	barrier  *barrierOp // nothing else is decided before the owner has stood still for it; nil: none
}

// largePart is the part of groupBytes from which a produce is large, by the size of its records:
// 256 KiB.
const largePart = 4

// recordBytes is the size of the records of the tasks that an operation produces.
func recordBytes(op operation) (n int) {
	tasks := op.verb().tasks(op)
	for i := range tasks {
		n += len(tasks[i].Rec)
	}
	return n
}

// putInLine puts an operation in the line if it is large.
func (s *shard) putInLine(op operation) bool {
	if !op.verb().is(mayBeLarge) || recordBytes(op) < s.opts.private.GroupBytes/largePart {
		return false
	}
	s.undecided.large.Add(op)
	return true
}

// decideLarge decides the first operation of the line, if it is its turn: others is whether the
// group has others.
func (s *shard) decideLarge(others bool) {
	l := &s.undecided.large
	if s.Broken != nil {
		return
	}
	op, patient, ok := l.First(s.Now, others)
	if !ok {
		return
	}
	if patient && s.HasRoom(op.verb().room(op)) && !s.Store.Takes(recordBytes(op)) {
		l.Wait(s.Now)
		return
	}
	l.Remove()
	s.BeginBudget(engine.CallerBudget, s.upkeep.At)
	s.Judged = s.clock.Taken()
	s.decide(op)
}

// waiters is the calls that wait for something to happen in a shard.
type waiters struct {
	awaits entries.Waiting[*awaitOp] // for the end of a task
	idlers []*idleOp                 // for queues to become idle
	takers entries.Lines[*takenOp]   // until another shard has taken messages
}

// waiting yields the calls.
func (w *waiters) waiting(yield func(operation) bool) {
	for _, op := range w.idlers {
		if !yield(op) {
			return
		}
	}
	for op := range w.awaits.All {
		if !yield(op) {
			return
		}
	}
	for op := range w.takers.All {
		if !yield(op) {
			return
		}
	}
}
