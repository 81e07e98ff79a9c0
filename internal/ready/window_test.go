package ready

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// check verifies the invariants of window by a walk over its runs.
func check(t require.TestingT, w *window) {
	n, bytes, slots := 0, 0, 0
	var last *Item
	for i, r := range w.runs[:cap(w.runs)] {
		if i < int(w.first) || i >= len(w.runs) {
			require.Zero(t, r, "run %d holds on to memory", i)
			continue
		}
		if len(w.runs)-int(w.first) > 1 {
			require.Positive(t, r.len(), "length of run %d", i)
			require.Equal(t, runCap, cap(r.items), "room of run %d", i)
		}
		n += r.len()
		slots += cap(r.items)
		for k, it := range r.items[:cap(r.items)] {
			if k < r.head || k >= len(r.items) {
				require.Zero(t, it, "slot %d of run %d holds on to what was removed", k, i)
				continue
			}
			bytes += cap(it.Record)
			if last != nil {
				require.Negative(t, last.compare(it.Pos), "order at %d of run %d", k, i)
			}
			last = &it
		}
	}
	if w.pool != nil {
		require.LessOrEqual(t, len(w.pool.runs), poolCap)
		for _, items := range w.pool.runs {
			require.Empty(t, items)
			require.Equal(t, runCap, cap(items))
			for _, it := range items[:runCap] {
				require.Zero(t, it, "the pool holds on to what was removed")
			}
		}
	}
	require.Equal(t, n, w.Len())
	require.Equal(t, bytes+slots*itemBytes+cap(w.runs)*runBytes, w.Footprint())
}

// contents returns the items of a window.
func contents(w *window) []Item {
	all := []Item{}
	for _, r := range w.runs[w.first:] {
		all = append(all, r.items[r.head:]...)
	}
	return all
}

// model does the same as a window, with a sorted slice.
type model struct {
	t     *rapid.T
	w     window
	items []Item
}

// drawPos draws one of few positions.
func drawPos(t *rapid.T) (p Pos) {
	p.Since = rapid.Uint64Range(0, 20).Draw(t, "since")
	p.ID[0] = byte(rapid.IntRange(0, 5).Draw(t, "ID, first byte"))
	p.ID[15] = byte(rapid.IntRange(0, 5).Draw(t, "ID, last byte"))
	return p
}

func (m *model) insert(t *rapid.T) {
	m.put(Item{Record: make([]byte, rapid.IntRange(0, 5).Draw(t, "length"), 8), Pos: drawPos(t)})
}

func (m *model) insertFirst(*rapid.T) {
	if len(m.items) > 0 && m.items[0].Since > 0 {
		m.put(Item{Pos: Pos{Since: m.items[0].Since - 1}})
	}
}

func (m *model) insertLast(*rapid.T) {
	if len(m.items) > 0 {
		m.put(Item{Pos: Pos{Since: m.items[len(m.items)-1].Since + 1}, Record: []byte("last")})
	}
}

// put inserts an item and checks the number of other items that move for it.
func (m *model) put(it Item) {
	i, found := slices.BinarySearchFunc(m.items, it, func(a, b Item) int { return a.compare(b.Pos) })
	if found {
		return // a task is in a window once
	}
	m.items = slices.Insert(m.items, i, it)
	before := m.w.moved
	m.w.Insert(it)
	require.Less(m.t, int(m.w.moved-before), runCap)
	if i == len(m.items)-1 {
		require.Equal(m.t, before, m.w.moved, "items moved for the last one")
	}
}

func (m *model) popFirst(*rapid.T) {
	if len(m.items) > 0 {
		require.Equal(m.t, m.items[0], m.w.PopFirst())
		m.items = slices.Delete(m.items, 0, 1)
	}
}

func (m *model) popLast(*rapid.T) {
	if n := len(m.items); n > 0 {
		require.Equal(m.t, m.items[n-1], m.w.PopLast())
		m.items = m.items[:n-1]
	}
}

// remove removes an item, or tries to remove a missing one.
func (m *model) remove(t *rapid.T) {
	p := drawPos(t)
	if n := len(m.items); n > 0 && rapid.Bool().Draw(t, "one that is there") {
		p = m.items[rapid.IntRange(0, n-1).Draw(t, "which")].Pos
	}
	i, found := slices.BinarySearchFunc(m.items, p, func(it Item, p Pos) int { return it.compare(p) })
	before := m.w.moved
	require.Equal(m.t, found, m.w.Remove(p))
	require.Less(m.t, int(m.w.moved-before), runCap)
	if found {
		m.items = slices.Delete(m.items, i, i+1)
	}
}

func (m *model) clear(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "chance") == 0 {
		m.w.Clear()
		m.items = nil
		require.Zero(m.t, m.w.Footprint())
	}
}

// trim trims the window to a size that may be smaller or larger than the window.
func (m *model) trim(t *rapid.T) {
	size := rapid.IntRange(0, m.w.Size()+8).Draw(t, "size")
	var want Pos
	before, left := len(m.items), m.w.Size()
	for n := before; n > 0 && left > size; n = len(m.items) {
		left -= sizeOf(cap(m.items[n-1].Record))
		want, m.items = m.items[n-1].Pos, m.items[:n-1]
	}
	first, dropped := m.w.Trim(size)
	require.Equal(m.t, len(m.items) < before, dropped)
	require.Equal(m.t, want, first)
	require.Equal(m.t, left, m.w.Size())
	if n := len(m.items); n <= runMin {
		require.LessOrEqual(m.t, m.w.Footprint(), left+n*runBytes, "memory that is not needed")
	}
}

// grow checks that Growth predicts Footprint.
func (m *model) grow(t *rapid.T) {
	record := make([]byte, rapid.IntRange(0, 5).Draw(t, "length"))
	p := Pos{Since: 21}
	if n := len(m.items); n > 0 && m.items[n-1].Since >= p.Since {
		p.Since = m.items[n-1].Since + 1
	}
	most := m.w.Footprint() + m.w.Growth(len(record))
	m.put(Item{Pos: p, Record: record})
	require.LessOrEqual(m.t, m.w.Footprint(), most)
}

func (m *model) compare(*rapid.T) {
	check(m.t, &m.w)
	require.ElementsMatch(m.t, m.items, contents(&m.w))
	if n := len(m.items); n > 0 {
		require.Equal(m.t, m.items[0].Pos, m.w.First())
		require.Equal(m.t, m.items[0].Record, m.w.FirstRecord())
		require.Equal(m.t, m.items[n-1].Pos, m.w.Last())
	}
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{t: t}
		if rapid.Bool().Draw(t, "pool") {
			m.w.Use(new(pool))
		}
		t.Repeat(map[string]func(*rapid.T){
			"insert":       m.insert,
			"insert again": m.insert,
			"insert first": m.insertFirst,
			"insert last":  m.insertLast,
			"pop first":    m.popFirst,
			"pop last":     m.popLast,
			"remove":       m.remove,
			"clear":        m.clear,
			"trim":         m.trim,
			"grow":         m.grow,
			"":             m.compare,
		})
	})
}

// TestLarge inserts at random into a window that grows many times, and removes everything again.
func TestLarge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sinces := rapid.SliceOfNDistinct(rapid.Uint64(), 0, 300, rapid.ID).Draw(t, "sinces")
		var w window
		for _, since := range sinces {
			w.Insert(Item{Pos: Pos{Since: since}})
		}
		check(t, &w)
		slices.Sort(sinces)
		for i, j := 0, len(sinces); i < j; {
			require.Equal(t, sinces[i], w.PopFirst().Since)
			if i++; i < j {
				j--
				require.Equal(t, sinces[j], w.PopLast().Since)
			}
		}
		require.Zero(t, w.Len())
		check(t, &w)
	})
}

// TestRemove removes the items of a window in any order, and tries to remove missing ones.
func TestRemove(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w window
		require.False(t, w.Remove(Pos{}), "of an empty window")
		n := rapid.IntRange(1, 3*runCap).Draw(t, "items")
		item := func(i int) Item {
			// Three share a since; between two of them there is room for another.
			return Item{Pos: Pos{Since: uint64(i / 3), ID: [16]byte{15: byte(1 + i%3*2)}}, Record: make([]byte, 0, i%7)}
		}
		var held []Item
		for i := range n {
			w.Insert(item(i))
			held = append(held, item(i))
		}
		for i := range rapid.IntRange(0, 2*n).Draw(t, "slide by") {
			w.PopFirst()
			w.Insert(item(n + i))
			held = append(held[1:], item(n+i))
		}
		missing := func(p Pos) {
			n := w.Len()
			require.False(t, w.Remove(p), "%v", p)
			require.Equal(t, n, w.Len())
		}
		missing(Pos{})
		missing(Pos{Since: math.MaxUint64})
		for _, it := range rapid.Permutation(held).Draw(t, "in this order") {
			between := it.Pos
			between.ID[15]--
			missing(between)
			i := slices.IndexFunc(held, func(o Item) bool { return o.Pos == it.Pos })
			held = slices.Delete(slices.Clone(held), i, i+1)
			require.True(t, w.Remove(it.Pos), "%v", it.Pos)
			missing(it.Pos)
			if len(held)%8 == 0 {
				check(t, &w)
				require.Equal(t, held, contents(&w))
			}
		}
		require.LessOrEqual(t, int(w.slots), 2*runCap, "memory that stays")
	})
}

// TestNext: nothing lies between a position and the next one.
func TestNext(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		low := rapid.OneOf(
			rapid.Uint64(),
			rapid.SampledFrom([]uint64{0, 0xfe, 0xff, 0xffff, 1<<56 - 1, 1<<62 - 1}),
		).Draw(t, "last eight bytes")&(1<<62-1) | 1<<63 // with the variant bits of a UUID
		p := Pos{Since: rapid.Uint64().Draw(t, "since")}
		binary.BigEndian.PutUint64(p.ID[:], rapid.Uint64().Draw(t, "first eight bytes"))
		binary.BigEndian.PutUint64(p.ID[8:], low)
		next := p.next()
		require.Negative(t, p.compare(next))
		require.Equal(t, p.Since, next.Since)
		require.Equal(t, p.ID[:8], next.ID[:8], "which are the since of a task in its first place")
		require.Equal(t, low+1, binary.BigEndian.Uint64(next.ID[8:]))
	})
}

// TestInsertRuns: runs of items that belong between those of a long window, in either direction or
// at random, move few others each, and waste little memory.
func TestInsertRuns(t *testing.T) {
	const around, n = 4096, 4096
	for name, since := range map[string]func(i int) uint64{
		"ascending":  func(i int) uint64 { return uint64(i) },
		"descending": func(i int) uint64 { return uint64(n - i) },
		"in turn":    func(i int) uint64 { return uint64(i%2*2*n + i) },
		"scattered":  func(i int) uint64 { return uint64(i) * 2_654_435_761 % (1 << 20) },
	} {
		t.Run(name, func(t *testing.T) {
			var w window
			for i := range uint64(around) {
				w.Insert(Item{Pos: Pos{Since: i}})
				w.Insert(Item{Pos: Pos{Since: math.MaxUint64 - around + i}})
			}
			w.moved = 0
			for i := range n {
				w.Insert(Item{Pos: Pos{Since: around + since(i)}})
			}
			check(t, &w)
			require.Less(t, int(w.moved), n*runCap)
			require.Less(t, int(w.slots), 3*w.Len())
		})
	}
}

// TestEndsAllocateNothing: once there is enough memory, insertion and removal at the ends cost no
// allocation.
func TestEndsAllocateNothing(t *testing.T) {
	const n = 1000
	var w window
	w.Use(new(pool))
	for i := range uint64(n) {
		w.Insert(Item{Pos: Pos{Since: n + i}})
	}
	footprint := w.Footprint()
	work := func() {
		last := w.Last()
		last.Since++
		w.Insert(Item{Pos: last})
		first := w.PopFirst()
		w.Insert(first)
		w.PopLast()
		first.Since--
		w.Insert(Item{Pos: first.Pos})
		w.PopFirst()
	}
	require.Zero(t, testing.AllocsPerRun(10*runCap, work))
	require.LessOrEqual(t, w.Footprint(), footprint+2*runCap*itemBytes)
}

// TestPoolServesWaves: windows that share a pool, filled and emptied in turn, take the memory of
// their runs from it, and return all of it.
func TestPoolServesWaves(t *testing.T) {
	const items = 30 * runCap
	var shared pool
	windows := make([]window, 3)
	for i := range windows {
		windows[i].Use(&shared)
	}
	wave := func() {
		for i := range windows {
			w := &windows[i]
			for since := range uint64(items) {
				w.Insert(Item{Pos: Pos{Since: since}})
			}
			for w.Len() > 0 {
				w.PopFirst()
			}
			check(t, w)
		}
	}
	wave()
	before := len(shared.runs)
	require.Positive(t, before)
	wave()
	require.Equal(t, before, len(shared.runs), "memory of runs")
	for i := range windows {
		windows[i].Clear()
	}
	wave()
	require.LessOrEqual(t, len(shared.runs), poolCap)
}
