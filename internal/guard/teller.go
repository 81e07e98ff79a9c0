package guard

import (
	"fmt"
	"log/slog"
	"sync"
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
// call. A goroutine that lives while there are events makes the calls: at once after a quiet time,
// and then after a pause, or when a batch is full, since a call costs more than its content.
// Goroutines that add events wait only for each other.
type Teller[B Batch[B]] struct {
	name string // of the function, in messages
	tell func(B)
	log  *slog.Logger

	mu      sync.Mutex    // guards the fields below
	waiting B             // for the next call
	spare   B             // of the last call, or the present one
	due     bool          // waiting has something
	telling bool          // the goroutine lives
	failed  bool          // the last call has panicked
	closed  bool          // no more events are added
	ended   chan struct{} // non-nil while Close waits; closed at the end of the goroutine

	full    chan struct{} // capacity 1: ends the pause
	closing chan struct{} // closed by Close: no more pauses
}

// TellPause is the shortest time between two calls, unless a batch is full.
const TellPause = 10 * time.Millisecond

// tellGrace is how long Close waits for the function.
const tellGrace = time.Second

// NewTeller returns a Teller with two empty batches, which it uses in turn. name is that of the
// function in messages.
func NewTeller[B Batch[B]](name string, tell func(B), log *slog.Logger, one, other B) *Teller[B] {
	return &Teller[B]{name: name, tell: tell, log: log, waiting: one, spare: other, full: make(chan struct{}, 1), closing: make(chan struct{})}
}

// Begin returns the batch for the caller's events, until End. The caller does nothing else
// meanwhile.
func (t *Teller[B]) Begin() B {
	t.mu.Lock()
	return t.waiting
}

// End ends the adding of events, which will be told; soon, if the batch is full. REQUIRES: Begin.
func (t *Teller[B]) End(full bool) {
	defer t.mu.Unlock()
	if full {
		select {
		case t.full <- struct{}{}:
		default: // the goroutine finds the element of another full batch
		}
	}
	if t.closed {
		t.waiting.Reset()
		return
	}
	t.due = true
	if !t.telling {
		t.telling = true
		t.start()
	}
}

// start starts the goroutine.
func (t *Teller[B]) start() {
	go Contain(t.log, "observer", t.run, func(any, []byte) { t.stop() })
}

// stop records that the goroutine has ended, though there may be events to tell.
func (t *Teller[B]) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stopLocked()
}

func (t *Teller[B]) stopLocked() {
	t.telling = false
	if t.ended != nil {
		close(t.ended)
		t.ended = nil
	}
}

// run makes calls until there are no more events.
func (t *Teller[B]) run() {
	over := false
	defer func() {
		if !over { // runtime.Goexit in the function
			t.lose("runtime.Goexit", nil)
			t.start()
		}
	}()
	pause := time.NewTimer(0)
	defer pause.Stop()
	for b, ok := t.take(); ok; b, ok = t.take() {
		returned := false
		RunUser("Observer", func() { t.tell(b); returned = true }, t.lose)
		if returned {
			t.succeed()
		}
		pause.Reset(TellPause)
		select {
		case <-pause.C:
		case <-t.full:
		case <-t.closing:
		}
	}
	over = true
}

// take returns the next batch; false: there is none, and the goroutine ends.
func (t *Teller[B]) take() (b B, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.due {
		t.stopLocked()
		return b, false
	}
	t.spare.Reset()
	t.waiting, t.spare, t.due = t.spare, t.waiting, false
	return t.spare, true
}

// succeed records that a call has returned.
func (t *Teller[B]) succeed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = false
}

// lose records that a call has not returned. The first such call of a row is logged.
func (t *Teller[B]) lose(value any, stack []byte) {
	t.mu.Lock()
	logs := !t.failed
	t.failed = true
	t.waiting.Lose(t.spare)
	t.mu.Unlock()
	if logs {
		t.log.Error(t.name+" has panicked", "value", fmt.Sprint(value), "stack", string(stack))
	}
}

// Close returns when all events have been told, or after tellGrace: then the goroutine is left to
// the function that blocks it, and ends with it. The function is not called any more. A nil Teller
// does nothing.
func (t *Teller[B]) Close() {
	if t == nil {
		return
	}
	close(t.closing)
	t.mu.Lock()
	t.closed = true
	if !t.due && !t.telling {
		t.mu.Unlock()
		return
	}
	if !t.telling {
		t.telling = true
		t.start()
	}
	ended := make(chan struct{})
	t.ended = ended
	t.mu.Unlock()
	timer := time.NewTimer(tellGrace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		t.mu.Lock()
		defer t.mu.Unlock()
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
