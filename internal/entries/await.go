package entries

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Patience is that of a call which waits in a shard until its caller gives up.
type Patience struct{ gone atomic.Bool }

// GiveUp is called by the caller.
func (p *Patience) GiveUp() { p.gone.Store(true) }

// IsGone reports whether the caller has given up.
func (p *Patience) IsGone() bool { return p.gone.Load() }

// Waiting holds the calls that wait in a shard for the ends of tasks. Only the owner uses it.
type Waiting[C interface{ IsGone() bool }] struct {
	calls map[keys.ID][]C
	added int // calls since the last sweep, plus those that waited after it
	sweep int // the value of added at which the next sweep is due
}

// SweepMin is the least number of calls between two sweeps.
const SweepMin = 64

// IsEmpty reports whether no call waits.
func (w *Waiting[C]) IsEmpty() bool { return len(w.calls) == 0 }

// Of returns the calls that wait for a task, with those that have given up.
func (w *Waiting[C]) Of(id keys.ID) []C { return w.calls[id] }

// Drop removes the calls that wait for a task.
func (w *Waiting[C]) Drop(id keys.ID) { delete(w.calls, id) }

// Add makes a call wait for the end of a task.
func (w *Waiting[C]) Add(id keys.ID, c C) {
	if w.calls == nil {
		w.calls = make(map[keys.ID][]C)
	}
	w.calls[id] = append(w.calls[id], c)
	if w.added++; w.added >= w.sweep {
		w.dropGone()
	}
}

// dropGone removes calls that have given up. It is called often enough that there are never more
// entries than twice the waiting calls plus SweepMin.
func (w *Waiting[C]) dropGone() {
	w.added = 0
	for id, calls := range w.calls {
		calls = slices.DeleteFunc(calls, C.IsGone)
		if len(calls) == 0 {
			delete(w.calls, id)
			continue
		}
		w.calls[id] = calls
		w.added += len(calls)
	}
	w.sweep = 2*w.added + SweepMin
}

// All yields the calls.
func (w *Waiting[C]) All(yield func(C) bool) {
	for _, calls := range w.calls {
		for _, c := range calls {
			if !yield(c) {
				return
			}
		}
	}
}

// Awaiting is the callers of a node that listen for the ends of tasks, which the log tells.
type Awaiting struct {
	mu     sync.Mutex // guards the fields below, and those of the listeners
	byTask map[keys.ID][]*Listener
	byCall map[callID]*Listener // of tasks that are being produced
}

// callID is the number of a produce of this node.
type callID struct{ incarnation, seq uint64 }

// Listener is a caller that listens for the end of one task.
type Listener struct {
	id      keys.ID // zero: not known yet
	call    callID
	heard   func() // nil: it does not wait yet
	outcome *engine.Outcome
}

// Listen makes a caller wait for the end of a task, for which it listens already if it has expected
// it. heard is called when the task has ended, and must not block.
func (a *Awaiting) Listen(id keys.ID, l *Listener, heard func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listen(id, l)
	if l.heard = heard; l.outcome != nil {
		heard()
	}
}

func (a *Awaiting) listen(id keys.ID, l *Listener) {
	if l.id != (keys.ID{}) {
		return
	}
	if a.byTask == nil {
		a.byTask = make(map[keys.ID][]*Listener)
	}
	l.id = id
	a.byTask[id] = append(a.byTask[id], l)
}

// Expect makes a caller listen for the end of the task that a call is about to produce.
func (a *Awaiting) Expect(incarnation, seq uint64, l *Listener) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.byCall == nil {
		a.byCall = make(map[callID]*Listener)
	}
	delete(a.byCall, l.call)
	l.call = callID{incarnation, seq}
	a.byCall[l.call] = l
}

// Answered takes the answers of calls that are expected from the stored session of this node.
func (a *Awaiting) Answered(session []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.byCall) == 0 {
		return nil
	}
	v, err := keys.ParseSession(session)
	if err != nil {
		return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	for i := range v.Calls {
		c := &v.Calls[i]
		if l := a.byCall[callID{v.Incarnation, c.Seq}]; l != nil && len(c.IDs) == 1 && len(c.Duplicates) == 0 {
			a.listen(c.IDs[0], l)
		}
	}
	return nil
}

// Leave removes a caller, and returns the outcome that it has heard; nil: none.
func (a *Awaiting) Leave(l *Listener) *engine.Outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.byCall, l.call)
	rest := slices.DeleteFunc(a.byTask[l.id], func(other *Listener) bool { return other == l })
	if len(rest) == 0 {
		delete(a.byTask, l.id)
	} else {
		a.byTask[l.id] = rest
	}
	return l.outcome
}

// Tell passes the outcomes of tasks to their listeners.
func (a *Awaiting) Tell(endings []engine.Ending) {
	if len(endings) == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range endings {
		for _, l := range a.byTask[endings[i].ID] {
			if l.outcome == nil {
				o := CloneOutcome(&endings[i].Outcome)
				if l.outcome = &o; l.heard != nil {
					l.heard()
				}
			}
		}
	}
}
