package owner

import "slices"

// Undecided is the operations that an owner has taken and not decided yet. An operation is in one
// of its lists, or in the owner's hands: decided next, or decided right now. The zero Undecided is
// empty.
type Undecided[Op comparable] struct {
	taken    []Op // swapped with the inbox
	cursor   int  // in taken: operations before it are decided, or in another list
	deferred []Op // decided again once disk, or memory, has the data that they need
	again    []Op // memory for the next deferred
	retrying []Op // those of deferred that are about to be decided; nil: none
	deciding Op   // the zero Op: none
	parked   []Op // wait for room on the disk
}

// Spare returns the memory for the next operations, which Take gets. REQUIRES: none is left of the
// last ones.
func (u *Undecided[Op]) Spare() []Op { return u.taken[:0] }

// Take takes operations from the inbox.
func (u *Undecided[Op]) Take(ops []Op) { u.taken, u.cursor = ops, 0 }

// HasTaken reports whether operations of the inbox are left.
func (u *Undecided[Op]) HasTaken() bool { return u.cursor < len(u.taken) }

// Next returns the next of them, which is in the owner's hands from now on.
func (u *Undecided[Op]) Next() Op {
	op := u.taken[u.cursor]
	var none Op
	u.taken[u.cursor] = none
	u.cursor++
	return op
}

// Decide notes the operation that is decided right now.
func (u *Undecided[Op]) Decide(op Op) { u.deciding = op }

// Defer makes an operation wait until the next group.
func (u *Undecided[Op]) Defer(op Op) { u.deferred = append(u.deferred, op) }

// HasDeferred reports whether operations wait for the next group.
func (u *Undecided[Op]) HasDeferred() bool { return len(u.deferred) > 0 }

// BeginRetry begins to decide the operations that were deferred, and returns how many there are.
// Those that are deferred meanwhile wait for the next group.
func (u *Undecided[Op]) BeginRetry() int {
	u.retrying, u.deferred = u.deferred, u.again[:0]
	return len(u.retrying)
}

// Retry returns the i-th of them, in order, which is in the owner's hands from now on.
func (u *Undecided[Op]) Retry(i int) Op {
	op := u.retrying[i]
	var none Op
	u.retrying[i] = none
	return op
}

// EndRetry ends BeginRetry after n calls of Retry, and reports whether any are left: they are ahead
// of those deferred meanwhile.
func (u *Undecided[Op]) EndRetry(n int) (left bool) {
	retry := u.retrying
	u.retrying = nil
	if left = n < len(retry); left {
		u.deferred = slices.Insert(u.deferred, 0, retry[n:]...)
	}
	clear(retry)
	u.again = retry[:0]
	return left
}

// Park makes an operation wait for room.
func (u *Undecided[Op]) Park(op Op) { u.parked = append(u.parked, op) }

// Unpark makes the operations that wait for room wait for the next group.
func (u *Undecided[Op]) Unpark() {
	u.deferred = append(u.deferred, u.parked...)
	clear(u.parked)
	u.parked = u.parked[:0]
}

// DropParked removes those that wait for room, and for which drop returns true.
func (u *Undecided[Op]) DropParked(drop func(Op) bool) { u.parked = slices.DeleteFunc(u.parked, drop) }

// Taken returns the operations of the inbox that are left.
func (u *Undecided[Op]) Taken() []Op { return u.taken[u.cursor:] }

// Waiting returns those that wait for the next group, or for room.
func (u *Undecided[Op]) Waiting() []Op { return slices.Concat(u.deferred, u.parked) }

// InHand returns those that are in the owner's hands, and zero ones.
func (u *Undecided[Op]) InHand() []Op { return append(slices.Clone(u.retrying), u.deciding) }
