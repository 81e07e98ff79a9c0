package guard

import (
	"fmt"
	"log/slog"
	"time"
)

// Batch is the content of one notification. The Teller makes its calls one after the other.
type Batch[B any] interface {
	// Reset empties the batch, and keeps its memory as far as that is small.
	Reset()
	// Lose records that the call for a batch has panicked, or ended its goroutine. Of that batch it
	// takes over only the number of calls that had been lost before.
	Lose(batch B)
}

// Teller is between the goroutines that add events and the function of the user that gets them,
// which may be slow, block, or panic. Events during a call are collected in a batch for the next
// call. An Errand makes the calls: at once after a quiet time, and then after a pause, or when a
// batch is full, since a call costs more than its content. Goroutines that add events wait only for
// each other.
type Teller[B Batch[B]] struct {
	name string // of the function, in messages
	tell func(B)
	log  *slog.Logger

	calls *Errand // its Mu guards the fields below

	waiting B         // for the next call
	spare   B         // of the last call, or the present one
	due     bool      // waiting has something
	full    bool      // it is not to wait
	called  time.Time // the end of the last call
	failed  bool      // the last call has panicked
	closed  bool      // no more events are added
}

// TellPause is the shortest time between two calls, unless a batch is full.
const TellPause = 10 * time.Millisecond

// tellGrace is how long Close waits for the function.
const tellGrace = time.Second

// NewTeller returns a Teller with two empty batches, which it uses in turn. name is that of the
// function in messages.
func NewTeller[B Batch[B]](name string, tell func(B), log *slog.Logger, one, other B) *Teller[B] {
	t := &Teller[B]{name: name, tell: tell, log: log, waiting: one, spare: other}
	t.calls = NewErrand("observer", log, t.next)
	t.calls.lost = func() { t.lose("runtime.Goexit", nil) }
	return t
}

// Begin returns the batch for the caller's events, until End. The caller does nothing else
// meanwhile.
func (t *Teller[B]) Begin() B {
	t.calls.Mu.Lock()
	return t.waiting
}

// End ends the adding of events, which will be told; soon, if the batch is full. REQUIRES: Begin.
func (t *Teller[B]) End(full bool) {
	defer t.calls.Mu.Unlock()
	if t.closed {
		t.waiting.Reset()
		return
	}
	t.due = true
	if full && !t.full {
		t.full = true
		t.calls.Hurry()
	}
	t.calls.Wake()
}

// next takes the next batch.
func (t *Teller[B]) next() (piece func(), wait time.Duration) {
	if !t.due {
		return nil, 0
	}
	if wait = TellPause - time.Since(t.called); wait > 0 && !t.full && !t.closed {
		return nil, wait
	}
	t.spare.Reset()
	t.waiting, t.spare, t.due, t.full = t.spare, t.waiting, false, false
	return t.call, 0
}

func (t *Teller[B]) call() {
	returned := false
	RunUser("Observer", func() { t.tell(t.spare); returned = true }, t.lose)
	t.calls.Mu.Lock()
	defer t.calls.Mu.Unlock()
	if t.called = time.Now(); returned {
		t.failed = false
	}
}

// lose records that a call has not returned. The first such call of a row is logged.
func (t *Teller[B]) lose(value any, stack []byte) {
	t.calls.Mu.Lock()
	logs := !t.failed
	t.failed = true
	t.waiting.Lose(t.spare)
	t.calls.Mu.Unlock()
	if logs {
		t.log.Error(t.name+" has panicked", "value", fmt.Sprint(value), "stack", string(stack))
	}
}

// Close returns when all events have been told, or after tellGrace. The function is not called any
// more. A nil Teller does nothing.
func (t *Teller[B]) Close() {
	if t == nil {
		return
	}
	t.calls.Mu.Lock()
	if t.closed = true; t.due {
		t.calls.Wake() // after a panic nothing does it
	}
	t.calls.Mu.Unlock()
	t.calls.Hurry()
	if !t.calls.Await(tellGrace) {
		t.calls.Mu.Lock()
		defer t.calls.Mu.Unlock()
		t.due = false
	}
}

// KeepSamples appends a sample unless there are most already; then it counts it as missed.
func KeepSamples[S any](samples []S, sample S, most int, missed *uint64) []S {
	if len(samples) >= most {
		*missed++
		return samples
	}
	return append(samples, sample)
}
