package owner

// Line is the line of a shard's large operations, in the order of their arrival. A produce of
// megabytes takes as long to commit as hundreds of small operations, and a few of them fill
// memtables faster than those are flushed. So that a small operation waits for one large one at the
// most, a group takes one of them if it has nothing else to do, or if the group before had no large
// one. They also wait for flushes and compactions, long before other operations have to
// (failstop.Latch.Takes). All times are in ms. The zero Line is empty.
type Line[Op any] struct {
	ops     []Op
	passed  bool   // the last group went before them
	recheck uint64 // when to see whether memtables have been flushed
	// until is when the first one waits no longer, even for full memtables; 0: it has not waited
	// yet.
	until uint64
}

// How long large operations wait between two looks at the memtables, and each of them for flushes
// and compactions at the most.
const (
	recheckAfter = 2
	patience     = 1000
)

// Add adds an operation.
func (l *Line[Op]) Add(op Op) { l.ops = append(l.ops, op) }

// All returns the operations that wait.
func (l *Line[Op]) All() []Op { return l.ops }

// Recheck returns when IsDue may be true. REQUIRES: an operation waits.
func (l *Line[Op]) Recheck() uint64 { return l.recheck }

// IsDue reports whether an operation may be decided, or it is time to look at the memtables.
func (l *Line[Op]) IsDue(now uint64) bool { return len(l.ops) > 0 && l.recheck <= now }

// Rush ends all waits for memtables.
func (l *Line[Op]) Rush() { l.recheck, l.until = 0, 1 }

// First returns the operation that is next in a group, unless other operations of the group go
// before it. patient: it may wait for memtables.
func (l *Line[Op]) First(now uint64, others bool) (op Op, patient, ok bool) {
	if !l.IsDue(now) {
		return op, false, false
	}
	if others && !l.passed {
		l.passed = true
		return op, false, false
	}
	return l.ops[0], l.until == 0 || now < l.until, true
}

// Wait makes the first operation wait for memtables.
func (l *Line[Op]) Wait(now uint64) {
	if l.recheck = now + recheckAfter; l.until == 0 {
		l.until = now + patience
	}
}

// Remove removes the first operation.
func (l *Line[Op]) Remove() {
	var none Op
	l.ops[0], l.until = none, 0
	if l.ops, l.passed = l.ops[1:], false; len(l.ops) == 0 {
		l.ops = nil
	}
}
