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

func (m *model) insert(t *rapid.T) {
	it := Item{Record: make([]byte, rapid.IntRange(0, 5).Draw(t, "length"), 8)}
	it.Since = rapid.Uint64Range(0, 20).Draw(t, "since")
	it.ID[0] = byte(rapid.IntRange(0, 5).Draw(t, "ID, first byte"))
	it.ID[15] = byte(rapid.IntRange(0, 5).Draw(t, "ID, last byte"))
	m.put(it)
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
