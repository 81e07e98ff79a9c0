package recent

import (
	"container/list"
	"iter"
)

// Numbers holds the numbers of the names that were added last. The zero Numbers is empty. It is not
// safe for concurrent use.
type Numbers[K comparable] struct {
	names   map[K]*list.Element
	numbers map[uint32]*list.Element
	order   list.List // of named[K]: the first one was added first
}

// named is a name with its number.
type named[K comparable] struct {
	name   K
	number uint32
}

// Add adds a name, and removes the oldest one if there are more than most.
func (s *Numbers[K]) Add(name K, number uint32, most int) {
	if s.names == nil {
		s.names, s.numbers = make(map[K]*list.Element), make(map[uint32]*list.Element)
	}
	s.drop(s.names[name])
	e := s.order.PushBack(named[K]{name, number})
	s.names[name], s.numbers[number] = e, e
	if s.order.Len() > most {
		s.drop(s.order.Front())
	}
}

// Take removes a name, and returns its number.
func (s *Numbers[K]) Take(name K) (number uint32, ok bool) {
	e := s.names[name]
	if e == nil {
		return 0, false
	}
	s.drop(e)
	return e.Value.(named[K]).number, true
}

// Remove removes the name with a number, if there is one.
func (s *Numbers[K]) Remove(number uint32) { s.drop(s.numbers[number]) }

func (s *Numbers[K]) drop(e *list.Element) {
	if e == nil {
		return
	}
	v := e.Value.(named[K])
	delete(s.names, v.name)
	delete(s.numbers, v.number)
	s.order.Remove(e)
}

// All visits the names with their numbers, the oldest first.
func (s *Numbers[K]) All() iter.Seq2[K, uint32] {
	return func(yield func(K, uint32) bool) {
		for e := s.order.Front(); e != nil; e = e.Next() {
			if v := e.Value.(named[K]); !yield(v.name, v.number) {
				return
			}
		}
	}
}
