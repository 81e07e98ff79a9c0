package guard

import (
	"log/slog"
	"sync"
	"time"
)

// Errand does pieces of work one after the other, on a goroutine that lives while there is work.
// Its owner collects the work, which Mu guards, and calls Wake.
type Errand struct {
	Mu sync.Mutex

	what string
	log  *slog.Logger // of panics
	// next takes out the next piece, or returns how long to wait for it. Without either there is no
	// work. It is called with Mu held, the piece without.
	next func() (piece func(), wait time.Duration)
	// lost is called for a piece that has ended its goroutine by runtime.Goexit; nil: none does.
	// Pieces that may do so do not panic.
	lost   func()
	failed func() // called after a panic, which ends the work; nil: the next piece follows

	living  *sync.WaitGroup // counts the goroutine; nil: it is not waited for so
	alive   bool
	working bool          // next has returned a piece the last time
	ended   chan struct{} // not nil while Await waits; closed at the end of the goroutine
	hurry   chan struct{} // capacity 1: ends a wait
}

// NewErrand returns an Errand without work; what names its goroutine.
func NewErrand(what string, log *slog.Logger, next func() (piece func(), wait time.Duration)) *Errand {
	return &Errand{what: what, log: log, next: next, hurry: make(chan struct{}, 1)}
}

// CountIn makes a WaitGroup count the goroutine. REQUIRES: there was no work yet.
func (e *Errand) CountIn(living *sync.WaitGroup) *Errand {
	e.living = living
	return e
}

// OnPanic sets a callback for the panic of a piece. REQUIRES: there was no work yet.
func (e *Errand) OnPanic(failed func()) *Errand {
	e.failed = failed
	return e
}

// Wake says that there is work. REQUIRES: Mu is held.
func (e *Errand) Wake() {
	if e.alive {
		return
	}
	if e.alive = true; e.living != nil {
		e.living.Add(1)
	}
	e.start()
}

// Hurry ends a wait of the goroutine, so that it calls next at once.
func (e *Errand) Hurry() {
	select {
	case e.hurry <- struct{}{}:
	default: // the goroutine finds the element of another call
	}
}

// Await waits until there is no more work, but not longer than grace: then it returns false, and
// the goroutine is left to the piece that blocks it.
func (e *Errand) Await(grace time.Duration) bool {
	e.Mu.Lock()
	if !e.alive {
		e.Mu.Unlock()
		return true
	}
	ended := make(chan struct{})
	e.ended = ended
	e.Mu.Unlock()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-ended:
		return true
	case <-timer.C:
		return false
	}
}

func (e *Errand) start() {
	go Contain(e.log, e.what, e.run, func(any, []byte) {
		if e.failed != nil { // first: after a wait for the end, the failure is known
			e.failed()
		}
		e.Mu.Lock()
		defer e.Mu.Unlock()
		if e.failed == nil && e.working { // otherwise next has panicked, and would do so again
			e.start()
			return
		}
		e.end()
	})
}

// run does all pieces.
func (e *Errand) run() {
	over := false
	defer func() {
		if !over && e.lost != nil {
			e.lost()
			e.start()
		}
	}()
	for {
		piece, wait := e.take()
		switch {
		case piece != nil:
			piece()
		case wait > 0:
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-e.hurry:
			}
			timer.Stop()
		default:
			over = true
			return
		}
	}
}

func (e *Errand) take() (piece func(), wait time.Duration) {
	e.Mu.Lock()
	defer e.Mu.Unlock()
	e.working = false
	piece, wait = e.next()
	e.working = piece != nil
	if piece == nil && wait <= 0 {
		e.end()
	}
	return piece, wait
}

// end notes the end of the goroutine. REQUIRES: Mu is held.
func (e *Errand) end() {
	if e.alive = false; e.living != nil {
		e.living.Done()
	}
	if e.ended != nil {
		close(e.ended)
		e.ended = nil
	}
}
