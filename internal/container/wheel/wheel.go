package wheel

import "math/bits"

const (
	digitBits = 6              // a digit of a time picks one of the 64 slots of a level
	slots     = 1 << digitBits // one bit each in a level's uint64 of Wheel.occupied
	levels    = 11             // digits in 64 bits: every int64 has a slot, none needs a cap
	lateSlot  = levels * slots // the slot after the last level
)

// MaxMoves bounds the entries that an Advance moves to lower levels.
const MaxMoves = 256

// Entry is an element of a Wheel, to be embedded in the timed object. Its zero value is ready to
// use.
//
// An Entry is in at most one wheel, and is not copied while it is queued.
type Entry[T any] struct {
	// Value is the argument of expire in Advance. The wheel never changes it.
	Value T

	// The list of a slot is a ring. Invariant: next and prev are nil unless queued.
	next, prev *Entry[T]
	deadline   int64
	slot       uint16 // index in Wheel.heads; valid while queued
}

// Deadline returns the deadline given to Add, in milliseconds. It is valid while e is queued.
func (e *Entry[T]) Deadline() int64 { return e.deadline }

// Queued reports whether e is in a wheel.
func (e *Entry[T]) Queued() bool { return e.next != nil }

// Wheel is a set of entries ordered by deadline. Add and Remove take constant time; Advance moves
// an entry at most once a level; none of them allocates. New makes one.
//
// A time is treated as a number of 11 digits in base 64. An entry lies at the level of the highest
// digit in which its deadline differs from tick, in the slot of that digit. Since tick stays before
// the first occupied slot, moving it leaves all other entries where they are: only the slot that
// tick enters is spread over the levels below it, which are then empty. That is done in steps:
// until the slot is empty, new entries that belong below it go to its end.
//
// Equal deadlines are always in the same slot, in the order of Add, because a slot is a function of
// deadline and tick alone.
//
// Invariant: the deadline of an entry at level l has the same digits above l as tick, and digit l
// is greater than that of tick (at level 0, and in the slot that is being spread, greater or
// equal).
//
// Invariant: a bit of occupied is set if and only if the head of its slot is not nil.
//
// Only one goroutine uses a Wheel; it has no lock.
type Wheel[T any] struct {
	now  int64 // the wheel's time: the latest one passed to New or Advance
	tick int64 // tick <= now, and tick < now only if Advance has left work

	spreading int // the slot that is being spread, which begins at tick; 0: none is
	moves     int // MaxMoves, or less in tests
	length    int
	occupied  [levels + 1]uint64
	heads     [lateSlot + 1]*Entry[T] // slot s of level l at l*slots+s, then lateSlot
}

// New returns an empty wheel with the time now, in milliseconds.
func New[T any](now int64) *Wheel[T] {
	return &Wheel[T]{now: now, tick: now, moves: MaxMoves}
}

// Len returns the number of queued entries.
func (w *Wheel[T]) Len() int { return w.length }

// Add queues e until deadline, in milliseconds. An entry with a deadline at or before the wheel's
// time is late: the next Advance reports it, not a current one.
//
// REQUIRES: e is not queued. Add panics if it is.
func (w *Wheel[T]) Add(e *Entry[T], deadline int64) {
	if e.Queued() {
		panic("wheel: Add of a queued entry")
	}
	e.deadline = deadline
	w.length++
	if deadline <= w.now {
		w.link(e, lateSlot)
	} else {
		w.place(e)
	}
}

// Remove removes e from the wheel, if it is queued.
//
// REQUIRES: e is not queued in another wheel.
func (w *Wheel[T]) Remove(e *Entry[T]) {
	if e.Queued() {
		w.unlink(e)
		w.length--
	}
}

// Next returns the time, in milliseconds, at which Advance has work to do: to report entries, or to
// move them to a lower level. ok is false if the wheel is empty.
//
// It is never later than the earliest deadline, where a late entry counts as due at the wheel's
// time. If the last Advance returned false and no late entry is queued, it is after the wheel's
// time, and is the earliest deadline when that lies in the same block of 64 ms.
//
// A caller that calls Advance at each Next wakes up for an entry at most once a level, 11 times.
func (w *Wheel[T]) Next() (at int64, ok bool) {
	if w.heads[lateSlot] != nil || w.heads[w.spreading] != nil && w.spreading != 0 {
		return w.tick, true
	}
	_, at, ok = w.first()
	return at, ok
}

// Advance sets the wheel's time to now, in milliseconds, then removes entries with a deadline at or
// before it and passes their values to expire, at most limit of them. It returns true if it has
// left due entries because of limit, or moves to lower levels: it makes at most MaxMoves of them. A
// now before the wheel's time counts as the wheel's time.
//
// Entries that were not late are reported by deadline, and in the order of Add where deadlines are
// equal, also over several calls. The position of late entries among them is undefined.
//
// An entry is out of the wheel when expire is called for it. expire may Add and Remove any entry;
// an entry that it removes is not reported, and one that it adds is not reported by this call.
// REQUIRES: expire does not call Advance.
func (w *Wheel[T]) Advance(now int64, limit int, expire func(T)) (more bool) {
	w.now = max(w.now, now)
	moves := w.moves
	if !w.spread(lateSlot, &moves) {
		return true
	}
	for n := 0; ; {
		if w.spreading != 0 {
			if !w.spread(w.spreading, &moves) {
				return true
			}
			w.spreading = 0
		}
		slot, at, ok := w.first()
		if !ok || at > w.now {
			w.tick = w.now
			return false
		}
		w.tick = at
		if slot >= slots {
			w.spreading = slot
			continue
		}
		if n >= limit {
			return true
		}
		n++
		e := w.heads[slot]
		w.Remove(e)
		expire(e.Value)
	}
}

// first returns the first occupied slot, except that of late entries, and the time at which it
// begins. By the invariant of digits, the entries of a level are before all those of the levels
// above.
func (w *Wheel[T]) first() (slot int, at int64, ok bool) {
	for level, occupied := range w.occupied[:levels] {
		if occupied != 0 {
			digit := bits.TrailingZeros64(occupied)
			shift := level * digitBits
			above := key(w.tick) >> (shift + digitBits) << (shift + digitBits)
			return level*slots + digit, unkey(above | uint64(digit)<<shift), true
		}
	}
	return 0, 0, false
}

// spread moves the entries of a slot to the slots for the current tick, in their order. It returns
// false if that takes more than moves.
//
// REQUIRES: the slot is lateSlot, or is above level 0 and begins at tick; slotOf then never returns
// it.
func (w *Wheel[T]) spread(slot int, moves *int) bool {
	for ; w.heads[slot] != nil; *moves-- {
		if *moves == 0 {
			return false
		}
		e := w.heads[slot]
		w.unlink(e)
		w.link(e, w.slotOf(e))
	}
	return true
}

// place links e into its slot, or behind the entries that are still to be spread over that slot and
// others.
func (w *Wheel[T]) place(e *Entry[T]) {
	slot := w.slotOf(e)
	if slot/slots < w.spreading/slots {
		slot = w.spreading
	}
	w.link(e, slot)
}

// slotOf returns the slot of e's deadline, or of tick if the deadline is before tick.
func (w *Wheel[T]) slotOf(e *Entry[T]) int {
	k := key(max(e.deadline, w.tick))
	level := (bits.Len64((k^key(w.tick))|1) - 1) / digitBits
	return level*slots + int(k>>(level*digitBits)%slots)
}

// link appends e to the list of a slot.
func (w *Wheel[T]) link(e *Entry[T], slot int) {
	e.slot = uint16(slot)
	head := w.heads[slot]
	if head == nil {
		e.next, e.prev = e, e
		w.heads[slot] = e
		w.occupied[slot/slots] |= 1 << (slot % slots)
		return
	}
	e.next, e.prev = head, head.prev
	e.prev.next, head.prev = e, e
}

// unlink removes e from the list of its slot.
func (w *Wheel[T]) unlink(e *Entry[T]) {
	slot := e.slot
	if e.next == e {
		w.heads[slot] = nil
		w.occupied[slot/slots] &^= 1 << (slot % slots)
	} else {
		e.prev.next, e.next.prev = e.next, e.prev
		if w.heads[slot] == e {
			w.heads[slot] = e.next
		}
	}
	e.next, e.prev = nil, nil
}

// key maps times to unsigned numbers of the same order, so that the digits of negative times sort
// before those of the others; unkey is its inverse.
func key(t int64) uint64   { return uint64(t) ^ 1<<63 }
func unkey(k uint64) int64 { return int64(k ^ 1<<63) }
