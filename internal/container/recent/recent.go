// Package recent remembers the last added elements.
package recent

// Set holds the last added elements, at most Capacity. The zero Set is empty. It is not safe for
// concurrent use.
type Set[T comparable] struct {
	members map[T]struct{}
	ring    []T
	next    int
}

// Capacity is the maximum number of elements of a Set.
const Capacity = 1024

// Add adds an element, and removes the oldest one if the set is full.
func (s *Set[T]) Add(v T) {
	if s.members == nil {
		s.members = make(map[T]struct{})
	}
	if len(s.ring) < Capacity {
		s.ring = append(s.ring, v)
	} else {
		delete(s.members, s.ring[s.next])
		s.ring[s.next] = v
		s.next = (s.next + 1) % Capacity
	}
	s.members[v] = struct{}{}
}

// Has reports whether an element is remembered.
func (s *Set[T]) Has(v T) bool {
	_, ok := s.members[v]
	return ok
}
