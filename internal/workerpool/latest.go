package workerpool

import (
	"log/slog"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Latest reports the latest value: the first change at once, then at most one report in each
// interval, on goroutines of its own, until it is closed. Values between may be left out. It is
// safe for concurrent use.
type Latest[T any] struct {
	every   time.Duration
	tell    func(*T)
	telling *sync.WaitGroup // counts the reports under way and planned
	log     *slog.Logger    // of panics

	mu     sync.Mutex // guards the fields below
	now    *T
	told   *T
	at     time.Time   // of the last report
	timer  *time.Timer // for the next report; nil: none is planned
	closed bool
}

// NewLatest returns a Latest that reports to tell. Close the Latest before waiting for telling.
func NewLatest[T any](
	first T, every time.Duration, log *slog.Logger, telling *sync.WaitGroup, tell func(*T),
) *Latest[T] {
	v := &Latest[T]{every: every, tell: tell, telling: telling, log: log, now: &first}
	v.told = v.now
	return v
}

// Change replaces the value by another one, unless change returns an error.
func (v *Latest[T]) Change(change func(now T) (T, error)) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	next, err := change(*v.now)
	if err == nil {
		v.now = &next
		v.plan()
	}
	return err
}

// plan plans the next report, if the value has changed. REQUIRES: mu is held.
func (v *Latest[T]) plan() {
	if v.timer == nil && !v.closed && v.now != v.told {
		v.telling.Add(1)
		v.timer = time.AfterFunc(max(0, v.every-time.Since(v.at)), func() {
			defer v.settle()
			guard.Contain(v.log, "report of a handler", v.tellNow, nil)
		})
	}
}

func (v *Latest[T]) tellNow() {
	v.mu.Lock()
	now := v.now
	v.told, v.at = now, time.Now()
	v.mu.Unlock()
	v.tell(now)
}

// settle ends a report, which may have panicked.
func (v *Latest[T]) settle() {
	defer v.telling.Done()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timer = nil
	v.plan()
}

// Close ends the reports; one under way goes on. The value may still be changed.
func (v *Latest[T]) Close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	if v.timer != nil && v.timer.Stop() {
		v.timer = nil
		v.telling.Done()
	}
}

// Get returns the value, which must not be changed.
func (v *Latest[T]) Get() *T {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.now
}
