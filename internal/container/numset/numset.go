// Package numset is a set of small numbers: a bit for each number up to the largest.
package numset

import "math/bits"

// Set is a set of numbers. The zero Set is empty. Only one goroutine uses it.
type Set struct {
	words []uint64
	n     int
	full  int // all words before this index have all numbers
}

// Len returns the number of elements.
func (s *Set) Len() int { return s.n }

// Has reports whether the set has n.
func (s *Set) Has(n uint32) bool {
	i := int(n / 64)
	return i < len(s.words) && s.words[i]&(1<<(n%64)) != 0
}

// Add adds n to the set.
func (s *Set) Add(n uint32) {
	i := int(n / 64)
	if i >= len(s.words) {
		s.words = append(s.words, make([]uint64, i+1-len(s.words))...)
	}
	if bit := uint64(1) << (n % 64); s.words[i]&bit == 0 {
		s.words[i] |= bit
		s.n++
	}
}

// Remove removes n from the set.
func (s *Set) Remove(n uint32) {
	i := int(n / 64)
	if i >= len(s.words) {
		return
	}
	if bit := uint64(1) << (n % 64); s.words[i]&bit != 0 {
		s.words[i] &^= bit
		s.n--
		s.full = min(s.full, i)
	}
}

// Take adds the smallest missing number, and returns it.
func (s *Set) Take() uint32 {
	for s.full < len(s.words) && s.words[s.full] == ^uint64(0) {
		s.full++
	}
	n := uint32(s.full) * 64
	if s.full < len(s.words) {
		n += uint32(bits.TrailingZeros64(^s.words[s.full]))
	}
	s.Add(n)
	return n
}

// Next returns the smallest number of the set at or after n; ok is false if there is none.
func (s *Set) Next(n uint32) (next uint32, ok bool) {
	i := int(n / 64)
	if i >= len(s.words) {
		return 0, false
	}
	for word := s.words[i] &^ (1<<(n%64) - 1); ; word = s.words[i] {
		if word != 0 {
			return uint32(i)*64 + uint32(bits.TrailingZeros64(word)), true
		}
		if i++; i == len(s.words) {
			return 0, false
		}
	}
}

// Without returns the numbers of the set that are not in others.
func (s *Set) Without(others *Set) Set {
	d := Set{words: make([]uint64, len(s.words))}
	for i, w := range s.words {
		if i < len(others.words) {
			w &^= others.words[i]
		}
		d.words[i] = w
		d.n += bits.OnesCount64(w)
	}
	return d
}
