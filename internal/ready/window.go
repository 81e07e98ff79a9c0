package ready

import (
	"bytes"
	"math/bits"
	"slices"
	"sort"

	"codeq/internal/base"
)

// Pos is a place in a lane. Positions are ordered by Since, then by ID, which is the byte order of
// the stored task keys.
type Pos struct {
	Since uint64
	ID    [16]byte
}

// compare orders positions: negative when p comes before o.
func (p Pos) compare(o Pos) int {
	if p.Since != o.Since {
		if p.Since < o.Since {
			return -1
		}
		return 1
	}
	return bytes.Compare(p.ID[:], o.ID[:])
}

// next returns the smallest position after p. The last eight bytes of an ID begin with the variant
// bits of a UUID, so that adding one never carries beyond them.
func (p Pos) next() Pos {
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

// itemBytes and runBytes are the sizes of an Item and of a run.
const (
	itemBytes = 8 + 16 + 24
	runBytes  = 24 + 8
)

// A run has room for runCap items; the first one of a window begins with runMin, since most windows
// are of lanes with few tasks.
const (
	runCap = 64
	runMin = 1
)

// window is an ordered deque of items, in runs of limited length. Insertion and removal at the ends
// move nothing; in between they move at most the items of one run, however long the window is:
// tasks that return, or become due late, belong before many others. The zero window is empty. Only
// one goroutine uses it.
//
// Invariant: runs are in order, and none is empty unless it is the only one.
type window struct {
	runs  []run // those before first were removed
	pool  *pool // nil: none
	bytes int   // of the records held
	first int32
	n     int32
	slots int32 // items that fit in the held memory
	moved int32 // how many items were moved to insert or remove others
}

// pool keeps the memory of emptied runs for later ones, so that windows which are filled and
// emptied all the time rarely allocate. Its memory is limited, and not part of any Footprint. One
// goroutine uses it and all its windows.
type pool struct{ runs [][]Item }

const poolCap = 64

// put keeps the memory of a run without items.
func (p *pool) put(items []Item) {
	if p != nil && cap(items) == runCap && len(p.runs) < poolCap {
		p.runs = append(p.runs, items[:0])
	}
}

// get returns memory for a run.
func (p *pool) get() []Item {
	if p == nil || len(p.runs) == 0 {
		return make([]Item, 0, runCap)
	}
	n := len(p.runs) - 1
	items := p.runs[n]
	p.runs[n], p.runs = nil, p.runs[:n]
	return items
}

// run holds items in order, beginning at head.
type run struct {
	items []Item
	head  int
}

func (r *run) len() int     { return len(r.items) - r.head }
func (r *run) front() *Item { return &r.items[r.head] }
func (r *run) back() *Item  { return &r.items[len(r.items)-1] }

// Len returns the number of items.
func (w *window) Len() int { return int(w.n) }

// Size returns the memory of the items, in bytes.
func (w *window) Size() int { return w.bytes + int(w.n)*itemBytes }

// sizeOf returns how much an item with a record of so many bytes adds to Size.
func sizeOf(record int) int { return record + itemBytes }

// Footprint returns all memory held, in bytes: that of the items, and the room for others.
func (w *window) Footprint() int { return w.bytes + int(w.slots)*itemBytes + cap(w.runs)*runBytes }

// Growth returns how much an item after all others, with a record of so many bytes, adds to
// Footprint at most.
func (w *window) Growth(record int) int {
	if len(w.runs) == 0 {
		return record + runBytes + runMin*itemBytes
	}
	switch r := w.lastRun(); {
	case len(r.items) < cap(r.items) || r.head > cap(r.items)/2:
		return record
	case cap(r.items) < runCap:
		return record + cap(r.items)*itemBytes
	case len(w.runs) == cap(w.runs):
		record += cap(w.runs) * runBytes
	}
	return record + runCap*itemBytes
}

func (w *window) lastRun() *run { return &w.runs[len(w.runs)-1] }

// First returns the position of the first item. REQUIRES: Len() > 0.
func (w *window) First() Pos { return w.runs[w.first].front().Pos }

// FirstRecord returns the record of the first item. REQUIRES: Len() > 0.
func (w *window) FirstRecord() []byte { return w.runs[w.first].front().Record }

// Last returns the position of the last item. REQUIRES: Len() > 0.
func (w *window) Last() Pos { return w.lastRun().back().Pos }

// IsLast reports whether a position is after all items.
func (w *window) IsLast(p Pos) bool { return w.n == 0 || p.compare(w.Last()) > 0 }

// Insert adds an item at its position.
func (w *window) Insert(it Item) {
	if w.IsLast(it.Pos) {
		w.Append(it)
	} else {
		w.insert(it)
	}
}

// Append is Insert for an item after all others. REQUIRES: IsLast(it.Pos).
func (w *window) Append(it Item) {
	if base.Invariants && !w.IsLast(it.Pos) {
		base.Violated("task %x is added behind a later one", it.ID)
	}
	w.n++
	w.bytes += cap(it.Record)
	if len(w.runs) == 0 {
		w.addRun(0)
	}
	r := w.lastRun()
	if len(r.items) == cap(r.items) {
		switch {
		case r.head > cap(r.items)/2:
			n := copy(r.items, r.items[r.head:])
			clear(r.items[n:])
			r.items, r.head = r.items[:n], 0
		case cap(r.items) < runCap:
			w.grow(r)
		default:
			r = &w.runs[w.addRun(len(w.runs))]
		}
	}
	r.items = append(r.items, it)
}

// insert puts an item before the last one.
func (w *window) insert(it Item) {
	w.n++
	w.bytes += cap(it.Record)
	i := w.runOf(it.Pos)
	k := w.runs[i].find(it.Pos)
	if k == len(w.runs[i].items) && w.runs[i].len() == runCap && w.runs[i+1].len() < runCap {
		i++ // between two runs, and the second one has room
		k = w.runs[i].head
	}
	r := &w.runs[i]
	if r.len() == cap(r.items) {
		if r.len() < runCap {
			w.grow(r)
		} else {
			r, k = w.split(i, k)
		}
	}
	switch {
	case k == r.head && r.head > 0:
		r.head--
		r.items[r.head] = it
	case len(r.items) < cap(r.items):
		r.items = append(r.items, Item{})
		w.moved += int32(copy(r.items[k+1:], r.items[k:]))
		r.items[k] = it
	default:
		w.moved += int32(copy(r.items[r.head-1:], r.items[r.head:k]))
		r.head--
		r.items[k-1] = it
	}
}

// split makes room in a full run for an item at its index k: the items from k on become a separate
// run. It returns the item's new run and index.
func (w *window) split(i, k int) (*run, int) {
	if k == 0 {
		return &w.runs[w.addRun(i)], 0
	}
	i = w.addRun(i + 1)
	lower, upper := &w.runs[i-1], &w.runs[i]
	if k == runCap {
		return upper, 0
	}
	upper.items = append(upper.items, lower.items[k:]...)
	w.moved += int32(len(upper.items))
	clear(lower.items[k:])
	lower.items = lower.items[:k]
	return lower, k
}

// addRun inserts an empty run at index i, and returns its index, which may have changed.
func (w *window) addRun(i int) int {
	if n := len(w.runs); n == cap(w.runs) && int(w.first) > n/2 {
		first := int(w.first)
		clear(w.runs[copy(w.runs, w.runs[first:]):])
		w.runs, w.first, i = w.runs[:n-first], 0, i-first
	}
	var r run
	if len(w.runs) == 0 {
		r.items = make([]Item, 0, runMin)
	} else {
		r.items = w.pool.get()
	}
	w.slots += int32(cap(r.items))
	if i == int(w.first) && i > 0 {
		w.first--
		w.runs[w.first] = r
		return int(w.first)
	}
	w.runs = slices.Insert(w.runs, i, r)
	return i
}

// dropRun removes a run that has become empty, unless it is the only one.
func (w *window) dropRun(i int) {
	if w.n == 0 {
		w.runs[i].items, w.runs[i].head = w.runs[i].items[:0], 0
		return
	}
	w.slots -= int32(cap(w.runs[i].items))
	w.pool.put(w.runs[i].items)
	if i > int(w.first) {
		w.runs = slices.Delete(w.runs, i, i+1)
		return
	}
	w.runs[i] = run{}
	w.first++
}

// grow doubles the room of the only run.
func (w *window) grow(r *run) {
	items := make([]Item, r.len(), 2*cap(r.items))
	copy(items, r.items[r.head:])
	w.slots += int32(cap(items) - cap(r.items))
	r.items, r.head = items, 0
}

// PopFirst removes the first item. REQUIRES: Len() > 0.
func (w *window) PopFirst() Item {
	r := &w.runs[w.first]
	it := w.take(r.front())
	if r.head++; r.len() == 0 {
		w.dropRun(int(w.first))
	}
	return it
}

// PopLast removes the last item. REQUIRES: Len() > 0.
func (w *window) PopLast() Item {
	r := w.lastRun()
	it := w.take(r.back())
	if r.items = r.items[:len(r.items)-1]; r.len() == 0 {
		w.dropRun(len(w.runs) - 1)
	}
	return it
}

// Remove removes the item at a position, and reports whether there was one.
func (w *window) Remove(p Pos) bool {
	i, k := w.find(p)
	if k < 0 {
		return false
	}
	r := &w.runs[i]
	w.take(&r.items[k])
	if k == r.head {
		r.head++
	} else {
		w.moved += int32(copy(r.items[k:], r.items[k+1:]))
		*r.back() = Item{}
		r.items = r.items[:len(r.items)-1]
	}
	if r.len() == 0 {
		w.dropRun(i)
	}
	return true
}

// Replace replaces the record of the item at a position, if there is one.
func (w *window) Replace(it Item) {
	if i, k := w.find(it.Pos); k >= 0 {
		old := &w.runs[i].items[k]
		w.bytes += cap(it.Record) - cap(old.Record)
		*old = it
	}
}

// find returns the run and the index in it of the item at a position; k is negative if there is
// none.
func (w *window) find(p Pos) (i, k int) {
	if w.n == 0 {
		return 0, -1
	}
	i = w.runOf(p)
	r := &w.runs[i]
	if k = r.find(p); k == len(r.items) || r.items[k].Pos != p {
		return 0, -1
	}
	return i, k
}

// runOf returns the run of a position: the last one that begins at it or before, or the first.
// REQUIRES: Len() > 0.
func (w *window) runOf(p Pos) int {
	runs := w.runs[w.first:]
	after := sort.Search(len(runs), func(i int) bool { return p.compare(runs[i].front().Pos) < 0 })
	return int(w.first) + max(after-1, 0)
}

// find returns the index of the first item at or after a position.
func (r *run) find(p Pos) int {
	return r.head + sort.Search(r.len(), func(i int) bool { return p.compare(r.items[r.head+i].Pos) <= 0 })
}

func (w *window) take(p *Item) Item {
	it := *p
	*p = Item{}
	w.n--
	w.bytes -= cap(it.Record)
	return it
}

// Trim drops the last items until Size is at most size, and memory that the others do not need. It
// returns the position of the first dropped item.
func (w *window) Trim(size int) (first Pos, dropped bool) {
	for w.n > 0 && w.Size() > size {
		first, dropped = w.PopLast().Pos, true
	}
	if w.n == 0 {
		w.Clear()
		return first, dropped
	}
	if r := w.lastRun(); int(w.first) == len(w.runs)-1 && cap(r.items) >= 2*r.len() {
		items := append(make([]Item, 0, 1<<bits.Len(uint(r.len()-1))), r.items[r.head:]...)
		w.slots = int32(cap(items))
		w.runs, w.first = []run{{items: items}}, 0
	}
	return first, dropped
}

// Clear drops the items and the memory that held them.
func (w *window) Clear() { *w = window{pool: w.pool} }

// Use makes a window take the memory of its runs from a pool, and return it when they are empty.
func (w *window) Use(p *pool) { w.pool = p }
