// Package owner holds the tools of a shard's owner beside the rules: a bounded queue of operations
// ([Inbox]), those taken from it ([Undecided]), the line of large ones ([Line]), the time for the
// expiry of leases ([Clock]), the free space of the disk ([DiskWatch]), and the times of its upkeep
// ([UpkeepTable]).
package owner

import (
	lists "container/list"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
)

// Inbox is a bounded queue of operations. Callers push them, and one goroutine, the owner, takes
// them and sleeps while there are none. All times are in ms since the origin.
type Inbox[Op any] struct {
	depth  int
	isLate func(Op) bool
	clock  func() time.Time
	origin time.Time

	// wake has capacity 1. Ending the owner's sleep sends to it.
	wake  chan struct{}
	woken uint64 // time of the last wake-up; the owner reads it when it was woken

	mu       sync.Mutex // guards the fields below
	ops      []Op
	late     lists.List    // of uint64: when late operations came that wait for room
	let      uint64        // when the first of those of ops came that have waited; never: none has
	refuse   error         // non-nil: nothing is accepted any more
	sleeping bool          // the owner waits on wake
	room     chan struct{} // non-nil while callers wait for room; closed by Take
}

// never is the time of an operation that has not come.
const never uint64 = math.MaxUint64

// NewInbox returns an Inbox for depth operations. isLate reports whether the time at which an
// operation came matters; it is called only for those that wait for room. The origin is now, by a
// monotonic clock.
func NewInbox[Op any](depth int, clock func() time.Time, isLate func(Op) bool) *Inbox[Op] {
	return &Inbox[Op]{
		depth: depth, isLate: isLate, clock: clock, origin: clock(), wake: make(chan struct{}, 1), let: never,
	}
}

// Now is the time.
func (in *Inbox[Op]) Now() uint64 { return uint64(in.clock().Sub(in.origin) / time.Millisecond) }

// yields is how often the owner gives way to other goroutines before it takes the operations.
const yields = 4

// Yield gives way to the callers that the owner has just woken, as long as they push further
// operations: their next operations share a commit.
func (in *Inbox[Op]) Yield() {
	for i, last := 0, -1; i < yields; i++ {
		runtime.Gosched()
		n := in.Len()
		if n == last {
			return
		}
		last = n
	}
}

// lingers is how often the owner of a replicated shard gives way until its callers come back.
const lingers = 256

// Linger is Yield until there are so many operations, for a shard that commits in the time of
// several messages: callers on other nodes get their answers, and send their next operations, by
// messages. They would miss the next group, and wait for another one.
func (in *Inbox[Op]) Linger(want int) {
	for i := 0; i < lingers && in.Len() < want; i++ {
		runtime.Gosched()
	}
}

// Push appends an operation, waiting for room until ctx ends, or limit is over. An error means that
// the operation was not applied.
func (in *Inbox[Op]) Push(ctx context.Context, op Op, limit *base.Limit) error {
	var late *lists.Element
	var stalled error
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
		if err == nil {
			err = stalled
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
		if late == nil && in.isLate(op) {
			late = in.late.PushBack(in.Now())
		}
		if in.room == nil {
			in.room = make(chan struct{})
		}
		room := in.room
		in.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
		case <-limit.C():
			if limit.IsOver(false) {
				stalled = fmt.Errorf("%w: %w: its inbox is full", base.ErrNotLeader, base.ErrLate)
			}
		}
	}
}

// Withdraw takes an operation out that the owner has not taken yet, and reports whether it has.
func (in *Inbox[Op]) Withdraw(is func(Op) bool) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	at := slices.IndexFunc(in.ops, is)
	if at < 0 {
		return false
	}
	in.ops = slices.Delete(in.ops, at, at+1)
	in.openRoom()
	return true
}

// openRoom wakes those that wait for room. REQUIRES: mu is held.
func (in *Inbox[Op]) openRoom() {
	if base.Invariants {
		base.AssertHeld(&in.mu, "the lock of the inbox")
	}
	if in.room != nil {
		close(in.room)
		in.room = nil
	}
}

// Pass appends an operation of another shard's owner, which must not wait: the operation's caller
// waits for it, so that there are no more of them than callers.
func (in *Inbox[Op]) Pass(op Op) error {
	in.mu.Lock()
	if in.refuse != nil {
		defer in.mu.Unlock()
		return in.refuse
	}
	in.append(op)
	return nil
}

// append adds op and unlocks. REQUIRES: mu is held.
func (in *Inbox[Op]) append(op Op) {
	in.ops = append(in.ops, op)
	in.unlock()
}

// unlock ends the owner's sleep. REQUIRES: mu is held.
func (in *Inbox[Op]) unlock() {
	wake := in.sleeping
	in.sleeping = false
	if wake {
		in.woken = in.Now()
	}
	in.mu.Unlock()
	if wake {
		in.wake <- struct{}{}
	}
}

// Lateness is when the first late operations came that have had to wait for room, of those taken
// and of those that still wait; math.MaxUint64: none has.
type Lateness struct{ Taken, Left uint64 }

// Take swaps the waiting operations for the empty slice into. When there are none and sleep is set,
// the owner is taken to wait on Wake from now on. refused is why nothing will follow.
func (in *Inbox[Op]) Take(into []Op, sleep bool) (ops []Op, late Lateness, refused error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	late = Lateness{in.let, never}
	in.let = never
	if first := in.late.Front(); first != nil {
		late.Left = first.Value.(uint64)
	}
	if len(in.ops) == 0 {
		in.sleeping = sleep && in.refuse == nil
		return into, late, in.refuse
	}
	ops, in.ops = in.ops, into
	in.openRoom()
	return ops, late, in.refuse
}

// Await sleeps until an operation that matches has come, and takes it out. It returns none when no
// other will follow, gone is closed or limit receives.
func (in *Inbox[Op]) Await(match func(Op) bool, gone <-chan struct{}, limit <-chan time.Time) (op Op, found bool) {
	for known := 0; ; {
		var ended bool
		if op, found, ended = in.pick(&known, match); found || ended {
			return op, found
		}
		select {
		case <-in.wake:
			continue
		case <-gone:
		case <-limit:
		}
		in.Awake()
		return op, false
	}
}

// pick takes out an operation that matches; the first of the known ones do not. If there is none,
// the owner waits on wake from now on, unless no other will follow.
func (in *Inbox[Op]) pick(known *int, match func(Op) bool) (op Op, found, ended bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if i := slices.IndexFunc(in.ops[*known:], match); i >= 0 {
		op = in.ops[*known+i]
		in.ops = slices.Delete(in.ops, *known+i, *known+i+1)
		return op, true, false
	}
	*known, in.sleeping = len(in.ops), in.refuse == nil
	return op, false, in.refuse != nil
}

// Len returns how many operations wait.
func (in *Inbox[Op]) Len() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.ops)
}

// Wake returns the channel that receives when an operation, or Stop, has ended the owner's sleep.
func (in *Inbox[Op]) Wake() <-chan struct{} { return in.wake }

// Woken returns the time of the last wake-up. REQUIRES: the owner has received from Wake.
func (in *Inbox[Op]) Woken() uint64 { return in.woken }

// Awake undoes the sleep of Take after a timer has ended it. It returns when an operation, or else
// the timer, ended the sleep.
func (in *Inbox[Op]) Awake() uint64 {
	in.mu.Lock()
	asleep := in.sleeping
	in.sleeping = false
	if asleep {
		in.woken = in.Now()
	}
	in.mu.Unlock()
	if !asleep {
		<-in.wake // the goroutine that ended the sleep has sent, or is about to
	}
	return in.woken
}

// Stop refuses further operations with reason, the first one given or base.ErrClosed; those
// accepted before stay.
func (in *Inbox[Op]) Stop(reason error) {
	in.mu.Lock()
	if in.refuse == nil || errors.Is(reason, base.ErrClosed) {
		in.refuse = reason
	}
	in.openRoom()
	in.unlock()
}
