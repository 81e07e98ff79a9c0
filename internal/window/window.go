// Package window holds the head of a lane in memory: a bounded run of ready
// tasks, ordered by the time since which they are ready.
package window

import (
	"bytes"
	"sort"
)

// Pos is a place in a lane. Positions are ordered by Since, then by ID, which
// is the byte order of the stored task keys.
type Pos struct {
	Since uint64
	ID    [16]byte
}

// Compare orders positions: negative when p comes before o.
func (p Pos) Compare(o Pos) int {
	if p.Since != o.Since {
		if p.Since < o.Since {
			return -1
		}
		return 1
	}
	return bytes.Compare(p.ID[:], o.ID[:])
}

// Next is the smallest position after p. The last eight bytes of an ID begin
// with the variant bits of a UUID, so that adding one never carries over.
func (p Pos) Next() Pos {
	for i := len(p.ID) - 1; i >= 0; i-- {
		p.ID[i]++
		if p.ID[i] != 0 {
			break
		}
	}
	return p
}

// Item is a ready task: its position and its stored record.
type Item struct {
	Pos
	Record []byte
}

const itemBytes = 8 + 16 + 24

// Window is an ordered deque of items in a ring. The zero Window is empty.
// One goroutine owns it.
type Window struct {
	ring  []Item // length zero or a power of two
	head  int    // of the first item
	n     int
	bytes int // of the records held
}

// Len is the number of items.
func (w *Window) Len() int { return w.n }

// Footprint is the memory held, in bytes.
func (w *Window) Footprint() int { return w.bytes + len(w.ring)*itemBytes }

func (w *Window) at(i int) *Item { return &w.ring[(w.head+i)&(len(w.ring)-1)] }

// First returns the position of the first item. REQUIRES: Len() > 0.
func (w *Window) First() Pos { return w.at(0).Pos }

// FirstRecord returns the record of the first item. REQUIRES: Len() > 0.
func (w *Window) FirstRecord() []byte { return w.at(0).Record }

// Last returns the position of the last item. REQUIRES: Len() > 0.
func (w *Window) Last() Pos { return w.at(w.n - 1).Pos }

// Insert puts an item at its place. Its cost is that of the items between its
// place and the nearer end: constant for one that comes first or last.
func (w *Window) Insert(it Item) {
	if w.n == len(w.ring) {
		w.grow()
	}
	i := w.n
	if w.n > 0 && it.Compare(w.Last()) < 0 {
		i = sort.Search(w.n, func(i int) bool { return it.Compare(w.at(i).Pos) < 0 })
	}
	w.n++
	if i >= w.n/2 {
		for j := w.n - 1; j > i; j-- {
			*w.at(j) = *w.at(j - 1)
		}
	} else {
		w.head = (w.head - 1) & (len(w.ring) - 1)
		for j := range i {
			*w.at(j) = *w.at(j + 1)
		}
	}
	*w.at(i) = it
	w.bytes += cap(it.Record)
}

// PopFirst removes the first item. REQUIRES: Len() > 0.
func (w *Window) PopFirst() Item {
	it := w.take(0)
	w.head = (w.head + 1) & (len(w.ring) - 1)
	return it
}

// PopLast removes the last item. REQUIRES: Len() > 0.
func (w *Window) PopLast() Item { return w.take(w.n - 1) }

// Remove removes the item at a position, and reports whether there was one.
func (w *Window) Remove(p Pos) bool {
	i := w.find(p)
	if i < 0 {
		return false
	}
	if i < w.n/2 {
		for ; i > 0; i-- {
			*w.at(i), *w.at(i - 1) = *w.at(i - 1), *w.at(i)
		}
		w.PopFirst()
		return true
	}
	for ; i+1 < w.n; i++ {
		*w.at(i), *w.at(i + 1) = *w.at(i + 1), *w.at(i)
	}
	w.PopLast()
	return true
}

// Replace replaces the record of the item at a position, if there is one.
func (w *Window) Replace(it Item) {
	if i := w.find(it.Pos); i >= 0 {
		w.bytes += cap(it.Record) - cap(w.at(i).Record)
		*w.at(i) = it
	}
}

// find returns the index of the item at a position, or -1.
func (w *Window) find(p Pos) int {
	i := sort.Search(w.n, func(i int) bool { return p.Compare(w.at(i).Pos) <= 0 })
	if i == w.n || w.at(i).Pos != p {
		return -1
	}
	return i
}

func (w *Window) take(i int) Item {
	p := w.at(i)
	it := *p
	*p = Item{}
	w.n--
	w.bytes -= cap(it.Record)
	return it
}

// Clear drops the items and the memory that held them.
func (w *Window) Clear() { *w = Window{} }

func (w *Window) grow() {
	ring := make([]Item, max(8, 2*len(w.ring)))
	for i := range w.n {
		ring[i] = *w.at(i)
	}
	w.ring, w.head = ring, 0
}
