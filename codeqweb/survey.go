package codeqweb

import (
	"context"
	"sync"
	"time"
)

// survey keeps the result of a slow reading of tasks. All viewers share it, one reading runs at a
// time, and the next one begins surveyPause times its duration later, so that readings take a
// twentieth of the time at most. Meanwhile viewers get the last result.
type survey[T any] struct {
	read    func(context.Context) (T, error)
	reading chan struct{} // capacity 1: held during a reading

	mu    sync.Mutex // guards the rest
	last  T
	known bool
	until time.Time
}

const (
	surveyPause = 20              // times the duration of a reading
	surveyKept  = 2 * time.Second // at least
)

func newSurvey[T any](read func(context.Context) (T, error)) *survey[T] {
	return &survey[T]{read: read, reading: make(chan struct{}, 1)}
}

// get returns the result of a reading: a kept one, or a new one.
func (s *survey[T]) get(ctx context.Context) (T, error) {
	last, known, fresh := s.kept()
	if fresh {
		return last, nil
	}
	if known {
		select {
		case s.reading <- struct{}{}:
		default:
			return last, nil
		}
	} else if err := enter(ctx, s.reading); err != nil {
		return last, err
	}
	defer func() { <-s.reading }()
	if last, _, fresh = s.kept(); fresh { // by the previous reading
		return last, nil
	}
	begin := time.Now()
	next, err := s.read(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = time.Now().Add(max(surveyKept, surveyPause*time.Since(begin)))
	if s.known = err == nil; !s.known {
		var none T
		s.last, s.until = none, time.Time{}
		return none, err
	}
	s.last = next
	return next, nil
}

func (s *survey[T]) kept() (last T, known, fresh bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last, s.known, s.known && time.Now().Before(s.until)
}
