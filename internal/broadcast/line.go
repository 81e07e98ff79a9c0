package broadcast

import "slices"

// Line holds the calls of a shard that wait until another shard has taken its messages, in the
// order of the messages. Only the owner uses it.
type Line[C interface{ IsGone() bool }] struct {
	calls []inLine[C]
	sweep int // the number of calls at which those that have given up are removed
}

type inLine[C any] struct {
	last uint64 // number of the last message for which the call waits
	call C
}

// Add lets a call wait for messages up to one. REQUIRES: no call waits for a later one.
func (l *Line[C]) Add(last uint64, c C) {
	if len(l.calls) >= l.sweep {
		l.calls = slices.DeleteFunc(l.calls, func(w inLine[C]) bool { return w.call.IsGone() })
		l.sweep = 2*len(l.calls) + SweepMin
	}
	l.calls = append(l.calls, inLine[C]{last, c})
}

// Take removes and yields the calls that wait for messages up to one, also those that have given
// up.
func (l *Line[C]) Take(taken uint64, yield func(C)) {
	n := 0
	for n < len(l.calls) && l.calls[n].last <= taken {
		yield(l.calls[n].call)
		n++
	}
	l.calls = slices.Delete(l.calls, 0, n)
}

// All yields the calls.
func (l *Line[C]) All(yield func(C) bool) {
	for i := range l.calls {
		if !yield(l.calls[i].call) {
			return
		}
	}
}
