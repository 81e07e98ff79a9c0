package guard

import (
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Batch is what is told at once. The Teller makes its calls one after the other.
type Batch[B any] interface {
	// Reset empties the batch, and keeps its memory as far as that is small.
	Reset()
	// Lose notes that the call for a batch has panicked, or ended its goroutine. It takes over
	// nothing of it but how many calls had been lost before.
	Lose(batch B)
}

// Teller is between the goroutines to which something happens and the function of the user that is
// told of it, which may be slow, block, or panic. What happens while the function runs is added up
// in a batch, and told by its next call. A goroutine that lives while there is something to tell
// calls it: at once after a quiet time, and then after a pause, or when a batch is full, since a
// call costs more than what it tells. Those who add wait for no more than each other.
type Teller[B Batch[B]] struct {
	name string // of the function, in messages
	tell func(B)
	log  *slog.Logger

	mu      sync.Mutex    // guards what follows
	waiting B             // what is to be told next
	spare   B             // what was told last, or is being told
	due     bool          // waiting has something
	telling bool          // the goroutine lives
	failed  bool          // the last call has panicked
	closed  bool          // nothing is added any more
	ended   chan struct{} // non-nil while Close waits; closed at the end of the goroutine

	full    chan struct{} // capacity 1: the pause is to end
	closing chan struct{} // closed by Close: there are no pauses any more
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

// Begin returns the batch to which the caller adds, until End. The caller does nothing else
// meanwhile.
func (t *Teller[B]) Begin() B {
	t.mu.Lock()
	return t.waiting
}

// End lets the batch be told; soon, if it is full. REQUIRES: Begin.
func (t *Teller[B]) End(full bool) {
	defer t.mu.Unlock()
	if full {
		select {
		case t.full <- struct{}{}:
		default: // the goroutine will see that another one was full
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

// stop notes that the goroutine has ended, though there may be something to tell.
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

// run tells what waits, until there is nothing.
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

// take returns what is to be told; false: there is nothing, and the goroutine ends.
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

// succeed notes that a call has returned.
func (t *Teller[B]) succeed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = false
}

// lose notes that a call has not returned. The first such call of a row is logged.
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

// Close returns when all has been told, or has not within a second: then the goroutine is left to
// the function that blocks it, and ends with it. The function is not called any more. A nil Teller
// tells nothing.
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
