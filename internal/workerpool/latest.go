package workerpool

import (
	"log/slog"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Latest reports the latest value by an Errand: the first change at once, then at most one report
// in each interval, until it is closed. Values between may be left out. It is safe for concurrent
// use.
type Latest[T any] struct {
	every time.Duration
	tell  func(*T)

	reports *guard.Errand // its Mu guards the fields below
	now     *T
	told    *T
	at      time.Time // of the last report
	closed  bool
}

// NewLatest returns a Latest that reports to tell. telling counts reports under way and planned:
// close the Latest before waiting for it.
func NewLatest[T any](
	first T, every time.Duration, log *slog.Logger, telling *sync.WaitGroup, tell func(*T),
) *Latest[T] {
	v := &Latest[T]{every: every, tell: tell, now: &first}
	v.told = v.now
	v.reports = guard.NewErrand("report of a handler", log, v.next).CountIn(telling)
	return v
}

// Change replaces the value by another one, unless change returns an error.
func (v *Latest[T]) Change(change func(now T) (T, error)) error {
	v.reports.Mu.Lock()
	defer v.reports.Mu.Unlock()
	next, err := change(*v.now)
	if err == nil {
		if v.now = &next; !v.closed {
			v.reports.Wake()
		}
	}
	return err
}

// next takes the value, when it is time.
func (v *Latest[T]) next() (piece func(), wait time.Duration) {
	if v.closed || v.now == v.told {
		return nil, 0
	}
	if wait = v.every - time.Since(v.at); wait > 0 {
		return nil, wait
	}
	now := v.now
	v.told, v.at = now, time.Now()
	return func() { v.tell(now) }, 0
}

// Close ends the reports, except one that is under way. The value may still be changed.
func (v *Latest[T]) Close() {
	v.reports.Mu.Lock()
	v.closed = true
	v.reports.Mu.Unlock()
	v.reports.Hurry()
}

// Get returns the value, which must not be changed.
func (v *Latest[T]) Get() *T {
	v.reports.Mu.Lock()
	defer v.reports.Mu.Unlock()
	return v.now
}

// Stored is a Latest whose reports store the value. What fails is stored with the next values, or
// by Store.
type Stored[T any] struct {
	*Latest[T]
	put func(*T) error

	mu     sync.Mutex // orders the stores, and guards stored
	stored *T
}

// NewStored returns a Stored with a first value, which is stored.
func NewStored[T any](
	first T, every time.Duration, log *slog.Logger, telling *sync.WaitGroup, put func(*T) error,
) *Stored[T] {
	s := &Stored[T]{put: put}
	s.Latest = NewLatest(first, every, log, telling, func(*T) { s.Store() })
	s.stored = s.Get()
	return s
}

// Store stores the last value, unless it is stored.
func (s *Stored[T]) Store() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.Get(); now != s.stored && s.put(now) == nil {
		s.stored = now
	}
}
