package codeq

import "codeq/internal/engine"

// A produce of megabytes takes as long to commit as hundreds of small operations, and a few of them fill
// memtables faster than those are flushed. So that a small operation waits for one large one at the
// most, those wait in a line of their own: a group takes one of them if it has nothing else to do, or if the group before had no
// large one. They also wait for flushes and compactions, long before everybody has to (failstop.Latch.Takes).

// largePart is the part of groupBytes from which a produce is large, by the size of its records: 256 KiB.
const largePart = 4

// largeLine is the large operations of a shard that wait, in the order in which they came.
type largeLine struct {
	ops     []*produceOp
	passed  bool   // the last group went before them
	recheck uint64 // when to see whether memtables have been flushed: the shard's ms
	until   uint64 // when the first one waits no longer, whatever the memtables are: likewise; 0: it has not waited yet
}

// How long large operations wait between two looks at the memtables, and each of them for flushes and compactions
// at the most: ms.
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
	s.large.ops = append(s.large.ops, p)
	return true
}

// largeIsDue reports whether a large operation may be decided, or memtables are to be looked at.
func (s *shard) largeIsDue() bool { return len(s.large.ops) > 0 && s.large.recheck <= s.Now }

// decideLarge decides the first operation of the line, unless the group has others for the first time.
func (s *shard) decideLarge(others bool) {
	l := &s.large
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
	s.Budget, s.Judged = s.NewBudget(engine.CallerBudget, s.steps.at), s.clock.taken
	s.decide(op)
}
