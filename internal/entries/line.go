package entries

import (
	"math"
	"slices"
)

// Lines holds the calls of a shard that wait until other shards have taken its messages. Only the
// owner uses it.
type Lines[C interface{ IsGone() bool }] struct {
	lines   []line[C] // by the other shard
	ended   []error   // likewise: why it takes no messages any more; nil: it does
	waiting int       // calls in all lines
}

// NewLines returns the Lines of one of so many shards.
func NewLines[C interface{ IsGone() bool }](shards int) Lines[C] {
	return Lines[C]{lines: make([]line[C], shards), ended: make([]error, shards)}
}

// Add makes a call wait for messages to a shard up to one. REQUIRES: no call waits for a later one.
func (l *Lines[C]) Add(shard int, last uint64, c C) {
	l.waiting -= len(l.lines[shard].calls)
	l.lines[shard].add(last, c)
	l.waiting += len(l.lines[shard].calls)
}

// Take removes and yields the calls that wait for messages to a shard up to one, also those that
// have given up.
func (l *Lines[C]) Take(shard int, taken uint64, yield func(C)) {
	l.waiting -= len(l.lines[shard].calls)
	l.lines[shard].take(taken, yield)
	l.waiting += len(l.lines[shard].calls)
}

// End notes why a shard takes no messages any more. It removes and yields the calls that wait for
// it.
func (l *Lines[C]) End(shard int, reason error, yield func(C)) {
	l.ended[shard] = reason
	l.Take(shard, math.MaxUint64, yield)
}

// Ended is why a shard takes no messages any more; nil: it does.
func (l *Lines[C]) Ended(shard int) error { return l.ended[shard] }

// Dismiss removes and yields all calls.
func (l *Lines[C]) Dismiss(yield func(C)) {
	for i := range l.lines {
		l.Take(i, math.MaxUint64, yield)
	}
}

// Wait reports whether calls wait, also if all of them have given up.
func (l *Lines[C]) Wait() bool { return l.waiting > 0 }

// All yields the calls.
func (l *Lines[C]) All(yield func(C) bool) {
	for i := range l.lines {
		for _, w := range l.lines[i].calls {
			if !yield(w.call) {
				return
			}
		}
	}
}

// line holds the calls that wait for one shard, in the order of the messages.
type line[C interface{ IsGone() bool }] struct {
	calls []inLine[C]
	sweep int // the number of calls at which those that have given up are removed
}

type inLine[C any] struct {
	last uint64 // the call waits for the messages up to this number
	call C
}

func (l *line[C]) add(last uint64, c C) {
	if len(l.calls) >= l.sweep {
		l.calls = slices.DeleteFunc(l.calls, func(w inLine[C]) bool { return w.call.IsGone() })
		l.sweep = 2*len(l.calls) + SweepMin
	}
	l.calls = append(l.calls, inLine[C]{last, c})
}

func (l *line[C]) take(taken uint64, yield func(C)) {
	n := 0
	for n < len(l.calls) && l.calls[n].last <= taken {
		yield(l.calls[n].call)
		n++
	}
	l.calls = slices.Delete(l.calls, 0, n)
}
