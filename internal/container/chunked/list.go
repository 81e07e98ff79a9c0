// Package chunked keeps lists in chunks, so that a long one is never copied to grow.
package chunked

import "iter"

const (
	chunkBits = 10
	chunkLen  = 1 << chunkBits // elements
)

// List is a list that grows at its end. A growing slice is sometimes copied as a whole; a List
// allocates and copies at most one chunk, or the list of its chunks. Its zero value is empty and
// ready to use.
//
// A List has no lock.
type List[T any] struct {
	// Invariant: all chunks but the last are full, and the last is not empty, unless there is none.
	first []T // the first chunk; it grows like a slice
	rest  [][]T
}

// Len returns the number of elements.
func (l *List[T]) Len() int {
	if n := len(l.rest); n > 0 {
		return n<<chunkBits + len(l.rest[n-1])
	}
	return len(l.first)
}

// At returns the i-th element, or the zero value of T if i is Len or more. It panics if i is
// negative.
func (l *List[T]) At(i int) (v T) {
	if i < len(l.first) {
		return l.first[i]
	}
	if i < l.Len() {
		return *l.place(i)
	}
	return v
}

// Set replaces the i-th element. It panics if there is none.
func (l *List[T]) Set(i int, v T) { *l.place(i) = v }

func (l *List[T]) place(i int) *T {
	if i < chunkLen {
		return &l.first[i]
	}
	return &l.rest[i>>chunkBits-1][i&(chunkLen-1)]
}

// Append adds an element at the end.
func (l *List[T]) Append(v T) {
	if len(l.first) < chunkLen {
		l.first = append(l.first, v)
		return
	}
	n := len(l.rest)
	if n == 0 || len(l.rest[n-1]) == chunkLen {
		if n < cap(l.rest) && l.rest[:n+1][n] != nil { // left by Pop
			l.rest = l.rest[:n+1]
		} else {
			l.rest = append(l.rest, make([]T, 0, chunkLen))
		}
		n++
	}
	l.rest[n-1] = append(l.rest[n-1], v)
}

// Pop removes the last element. It panics if there is none.
func (l *List[T]) Pop() T {
	last := &l.first
	n := len(l.rest)
	if n > 0 {
		last = &l.rest[n-1]
	}
	end := len(*last) - 1
	var zero T
	v := (*last)[end]
	(*last)[end] = zero
	// the chunk stays for the next Append, the unused one after it is released
	if *last = (*last)[:end]; n > 0 && end == 0 {
		if n < cap(l.rest) {
			l.rest[:n+1][n] = nil
		}
		l.rest = l.rest[:n-1]
	}
	return v
}

// Remove removes the i-th element. The last element takes its place, and is returned, unless it is
// the removed one itself. It panics if there is no i-th element.
func (l *List[T]) Remove(i int) (moved T, ok bool) {
	last := l.Pop()
	if i == l.Len() {
		return moved, false
	}
	l.Set(i, last)
	return last, true
}

// All yields the elements and their indexes, in order. The list must not shrink meanwhile.
func (l *List[T]) All() iter.Seq2[int, T] {
	return func(yield func(int, T) bool) {
		for i := range l.Len() {
			if !yield(i, *l.place(i)) {
				return
			}
		}
	}
}
