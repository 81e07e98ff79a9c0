package workerpool

import (
	"log/slog"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Latest is changed at any time and told at once, and then once in an interval at most, one time
// after the other, on goroutines of its own, until it is closed. What is told is the latest value:
// values between may be left out. It is safe for concurrent use.
type Latest[T any] struct {
	every   time.Duration
	tell    func(*T)
	telling *sync.WaitGroup // counts those that are being told, or are about to be
	log     *slog.Logger    // of panics

	mu     sync.Mutex // guards what follows
	now    *T
	told   *T
	at     time.Time   // when it was told last
	timer  *time.Timer // after which it is told again; nil: it is up to date
	closed bool
}

// NewLatest returns a Latest that is told by tell. Whoever waits for telling has to close the
// Latest before.
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

// plan lets the value be told when it is time. REQUIRES: mu is held.
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

// settle notes that the value was told, or that this has panicked.
func (v *Latest[T]) settle() {
	defer v.telling.Done()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timer = nil
	v.plan()
}

// Close lets the value be told no more; what is being told goes on. It may still be changed.
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
