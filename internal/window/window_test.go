package window

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// check verifies the invariants of Window by a walk over its ring.
func check(t require.TestingT, w *Window) {
	size := len(w.ring)
	require.Zero(t, size&(size-1), "a ring of %d", size)
	require.LessOrEqual(t, w.n, size)
	held := make(map[int]bool)
	bytes := 0
	for i := range w.n {
		held[(w.head+i)%size] = true
		bytes += cap(w.at(i).Record)
		if i > 0 {
			require.Negative(t, w.at(i-1).Compare(w.at(i).Pos), "order at %d", i)
		}
	}
	for i, it := range w.ring {
		require.True(t, held[i] || it.Pos == Pos{} && it.Record == nil, "slot %d holds on to what was removed", i)
	}
	require.Equal(t, bytes+size*itemBytes, w.Footprint())
}

// model is what a Window promises, with a sorted slice in its place.
type model struct {
	t     *rapid.T
	w     Window
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

// put inserts an item and looks how many others were moved for it.
func (m *model) put(it Item) {
	i, found := slices.BinarySearchFunc(m.items, it, func(a, b Item) int { return a.Compare(b.Pos) })
	if found {
		return // a task is in a window once
	}
	nearerEnd := min(i, len(m.items)-i)
	m.items = slices.Insert(m.items, i, it)
	before := slices.Clone(m.w.ring)
	m.w.Insert(it)
	if len(before) != len(m.w.ring) {
		require.Equal(m.t, max(8, 2*len(before)), len(m.w.ring))
		require.Equal(m.t, len(before)+1, m.w.Len(), "it grows when it is full")
		return
	}
	moved := 0
	for j := range before {
		if before[j].Pos != m.w.ring[j].Pos {
			moved++
		}
	}
	require.LessOrEqual(m.t, moved, nearerEnd+1)
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

// remove removes an item, or looks for one that is not there.
func (m *model) remove(t *rapid.T) {
	p := drawPos(t)
	if n := len(m.items); n > 0 && rapid.Bool().Draw(t, "one that is there") {
		p = m.items[rapid.IntRange(0, n-1).Draw(t, "which")].Pos
	}
	i, found := slices.BinarySearchFunc(m.items, p, func(it Item, p Pos) int { return it.Compare(p) })
	footprint := m.w.Footprint()
	require.Equal(m.t, found, m.w.Remove(p))
	if found {
		footprint -= cap(m.items[i].Record)
		m.items = slices.Delete(m.items, i, i+1)
	}
	require.Equal(m.t, footprint, m.w.Footprint())
}

func (m *model) clear(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "chance") == 0 {
		m.w.Clear()
		m.items = nil
		require.Zero(m.t, m.w.Footprint())
	}
}

func (m *model) compare(*rapid.T) {
	check(m.t, &m.w)
	require.Equal(m.t, len(m.items), m.w.Len())
	for i, it := range m.items {
		require.Equal(m.t, it, *m.w.at(i), "item %d", i)
	}
	if n := len(m.items); n > 0 {
		require.Equal(m.t, m.items[0].Pos, m.w.First())
		require.Equal(m.t, m.items[0].Record, m.w.FirstRecord())
		require.Equal(m.t, m.items[n-1].Pos, m.w.Last())
	}
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{t: t}
		t.Repeat(map[string]func(*rapid.T){
			"insert":       m.insert,
			"insert again": m.insert,
			"insert first": m.insertFirst,
			"insert last":  m.insertLast,
			"pop first":    m.popFirst,
			"pop last":     m.popLast,
			"remove":       m.remove,
			"clear":        m.clear,
			"":             m.compare,
		})
	})
}

// TestLarge inserts at random into a window that grows many times, and takes
// everything out again.
func TestLarge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sinces := rapid.SliceOfNDistinct(rapid.Uint64(), 0, 300, rapid.ID).Draw(t, "sinces")
		var w Window
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

// TestRemove takes the items of a window out in any order, from a ring that
// begins anywhere, and looks for ones that are not there.
func TestRemove(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w Window
		require.False(t, w.Remove(Pos{}), "of an empty window")
		n := rapid.IntRange(1, 40).Draw(t, "items")
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
		empty := len(w.ring) * itemBytes
		missing := func(p Pos) {
			footprint := w.Footprint()
			require.False(t, w.Remove(p), "%v", p)
			require.Equal(t, footprint, w.Footprint())
		}
		missing(Pos{})
		missing(Pos{Since: math.MaxUint64})
		for _, it := range rapid.Permutation(held).Draw(t, "in this order") {
			between := it.Pos
			between.ID[15]--
			missing(between)
			i := slices.IndexFunc(held, func(o Item) bool { return o.Pos == it.Pos })
			held = slices.Delete(slices.Clone(held), i, i+1)
			footprint := w.Footprint()
			require.True(t, w.Remove(it.Pos), "%v", it.Pos)
			require.Equal(t, footprint-cap(it.Record), w.Footprint())
			missing(it.Pos)
			check(t, &w)
			require.Equal(t, len(held), w.Len())
			for j, o := range held {
				require.Equal(t, o, *w.at(j), "item %d", j)
			}
		}
		require.Equal(t, empty, w.Footprint(), "the ring stays")
	})
}

func TestCompare(t *testing.T) {
	ascending := []Pos{
		{},
		{ID: [16]byte{15: 1}},
		{ID: [16]byte{15: 0xff}},
		{ID: [16]byte{0: 1}},
		{ID: [16]byte{0: 0xff}},
		{Since: 1},
		{Since: 1, ID: [16]byte{0: 1}},
		{Since: math.MaxInt64 + 1},
		{Since: math.MaxUint64, ID: [16]byte{0: 0xff}},
	}
	for i, a := range ascending {
		for j, b := range ascending {
			switch got := a.Compare(b); {
			case i < j:
				require.Negative(t, got)
			case i > j:
				require.Positive(t, got)
			default:
				require.Zero(t, got)
			}
		}
	}
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
		next := p.Next()
		require.Negative(t, p.Compare(next))
		require.Equal(t, p.Since, next.Since)
		require.Equal(t, p.ID[:8], next.ID[:8], "which are the since of a task in its first place")
		require.Equal(t, low+1, binary.BigEndian.Uint64(next.ID[8:]))
	})
}

// TestEndsAllocateNothing: once the ring is large enough, whatever is put in or
// taken out at its ends costs no allocation.
func TestEndsAllocateNothing(t *testing.T) {
	const n = 1000
	var w Window
	for i := range uint64(n) {
		w.Insert(Item{Pos: Pos{Since: n + i}})
	}
	footprint := w.Footprint()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		last := w.Last()
		last.Since++
		w.Insert(Item{Pos: last})
		first := w.PopFirst()
		w.Insert(first)
		w.PopLast()
		first.Since--
		w.Insert(Item{Pos: first.Pos})
		w.PopFirst()
	}))
	require.Equal(t, footprint, w.Footprint())
}
