package recent

import (
	"sync"
	"sync/atomic"
)

// Shared is a Set that is safe for concurrent use. While it is empty, Has takes no lock.
type Shared[T comparable] struct {
	some atomic.Bool
	mu   sync.Mutex // guards set
	set  Set[T]
}

// Add adds an element, and removes the oldest one if the set is full.
func (s *Shared[T]) Add(v T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set.Add(v)
	s.some.Store(true)
}

// Has reports whether an element is remembered.
func (s *Shared[T]) Has(v T) bool {
	if s.IsEmpty() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.set.Has(v)
}

// IsEmpty reports whether nothing has been added.
func (s *Shared[T]) IsEmpty() bool { return !s.some.Load() }
