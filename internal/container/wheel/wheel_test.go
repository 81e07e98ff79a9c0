package wheel

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	hour = int64(60 * 60 * 1000)
	year = 365 * 24 * hour
)

// check verifies the invariants of Wheel by a walk over every slot.
func check[T any](t require.TestingT, w *Wheel[T]) {
	require.LessOrEqual(t, w.tick, w.now)
	n := 0
	for slot, head := range w.heads {
		level, digit := slot/slots, slot%slots
		if (head != nil) != (w.occupied[level]>>digit&1 == 1) {
			require.Fail(t, "wrong bit of occupied", "slot %d", slot)
		}
		if head == nil {
			continue
		}
		for e := head; ; e = e.next {
			n++
			require.EqualValues(t, slot, e.slot)
			require.Same(t, e, e.next.prev)
			if slot == lateSlot {
				require.LessOrEqual(t, e.deadline, w.now)
			} else {
				shift := level * digitBits
				at, tick := key(max(e.deadline, w.tick)), key(w.tick)
				require.Equal(t, tick>>(shift+digitBits), at>>(shift+digitBits), "digits above level %d", level)
				require.EqualValues(t, digit, at>>shift%slots)
				spread := level == 0 || slot == w.spreading
				require.True(t, uint64(digit) > tick>>shift%slots || spread && at >= tick, "digit of level %d", level)
			}
			if e.next == head {
				break
			}
		}
	}
	require.Equal(t, n, w.Len())
}

type item struct {
	Entry[*item]
	seq  int  // orders the calls of Add
	late bool // at the last Add
}

func byDeadline(a, b *item) int {
	return cmp.Or(cmp.Compare(a.Deadline(), b.Deadline()), cmp.Compare(a.seq, b.seq))
}

// model behaves as a Wheel promises, with a sorted slice.
type model struct {
	t      *rapid.T
	w      *Wheel[*item]
	now    int64
	seq    int
	left   bool // the result of the last Advance
	idle   []*item
	queued []*item // sorted by byDeadline
}

func (m *model) add(it *item, deadline int64) {
	m.seq++
	it.seq, it.late = m.seq, deadline <= m.now
	m.w.Add(&it.Entry, deadline)
	require.True(m.t, it.Queued())
	require.Equal(m.t, deadline, it.Deadline())
	i, found := slices.BinarySearchFunc(m.queued, it, byDeadline)
	require.False(m.t, found)
	m.queued = slices.Insert(m.queued, i, it)
}

// drop removes it only from the model.
func (m *model) drop(it *item) {
	i, found := slices.BinarySearchFunc(m.queued, it, byDeadline)
	require.True(m.t, found, "reported but not queued")
	m.queued = slices.Delete(m.queued, i, i+1)
}

func (m *model) addIdle() {
	if n := len(m.idle); n > 0 {
		it := m.idle[n-1]
		m.idle = m.idle[:n-1]
		m.add(it, m.drawTime("deadline"))
	}
}

func (m *model) removeQueued() {
	if len(m.queued) == 0 {
		return
	}
	it := rapid.SampledFrom(m.queued).Draw(m.t, "queued")
	m.w.Remove(&it.Entry)
	m.drop(it)
	m.idle = append(m.idle, it)
	require.False(m.t, it.Queued())
}

// drawTime returns a time around the model's, more often near than far, and never overflows.
func (m *model) drawTime(label string) int64 {
	return m.now + rapid.OneOf(
		rapid.SampledFrom([]int64{0, 1, 63, 64, 4095, 4096, hour, year, 1000 * year}),
		rapid.Int64Range(-3, 3),
		rapid.Int64Range(-200, 500),
		rapid.Int64Range(0, hour),
		rapid.Int64Range(-year, 3*year),
		rapid.Int64Range(0, 1<<50),
	).Draw(m.t, label)
}

// due counts the entries with a deadline at or before the model's time and a seq of at most seq.
func (m *model) due(seq int) (n int) {
	for _, it := range m.queued {
		if it.Deadline() <= m.now && it.seq <= seq {
			n++
		}
	}
	return n
}

func (m *model) advance(now int64, limit int) {
	m.now = max(m.now, now)
	began, reported := m.seq, 0
	more := m.w.Advance(now, limit, func(it *item) {
		reported++
		require.LessOrEqual(m.t, reported, limit)
		require.False(m.t, it.Queued(), "linked in its callback")
		require.LessOrEqual(m.t, it.Deadline(), m.now, "early")
		require.LessOrEqual(m.t, it.seq, began, "added and reported by one Advance")
		if !it.late {
			first := slices.IndexFunc(m.queued, func(q *item) bool { return !q.late })
			require.Same(m.t, m.queued[first], it, "out of order")
		}
		m.drop(it)
		switch rapid.IntRange(0, 4).Draw(m.t, "callback") {
		case 0:
			m.add(it, m.drawTime("again"))
			return
		case 1:
			m.removeQueued()
		case 2:
			m.addIdle()
		}
		m.idle = append(m.idle, it)
	})
	m.left = more
	switch due := m.due(began); {
	case !more:
		require.Zero(m.t, due)
	case m.w.moves == MaxMoves: // more than there are
		require.Positive(m.t, due)
		require.Equal(m.t, max(0, limit), reported, "due entries left below the limit")
	}
}

// advanceAll advances until nothing is left to do.
func (m *model) advanceAll(now int64) {
	calls := 0
	for m.advance(now, math.MaxInt); m.left; m.advance(now, math.MaxInt) {
		calls++
		require.Less(m.t, calls, 10_000, "calls of Advance")
	}
}

func (m *model) checkNext() {
	at, ok := m.w.Next()
	require.Equal(m.t, len(m.queued) > 0, ok)
	if !ok {
		return
	}
	for _, it := range m.queued {
		if it.late {
			require.LessOrEqual(m.t, at, m.now)
		} else {
			require.LessOrEqual(m.t, at, it.Deadline())
		}
	}
	first := m.queued[0]
	switch {
	case first.Deadline() <= m.now:
		require.LessOrEqual(m.t, at, m.now)
	case !m.left:
		require.Greater(m.t, at, m.now)
		if first.Deadline()>>digitBits == m.now>>digitBits {
			require.Equal(m.t, first.Deadline(), at)
		}
	}
}

func TestWheelAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.SampledFrom([]int64{0, 1_700_000_000_000, -100, -year}).Draw(t, "start")
		m := &model{t: t, w: New[*item](start), now: start}
		m.w.moves = rapid.SampledFrom([]int{MaxMoves, 1, 3}).Draw(t, "moves")
		for range 40 {
			it := &item{}
			it.Value = it
			m.idle = append(m.idle, it)
		}
		t.Repeat(map[string]func(*rapid.T){
			"add":    func(*rapid.T) { m.addIdle() },
			"add3":   func(*rapid.T) { m.addIdle(); m.addIdle(); m.addIdle() },
			"remove": func(*rapid.T) { m.removeQueued() },
			"removeIdle": func(*rapid.T) {
				if len(m.idle) > 0 {
					m.w.Remove(&m.idle[0].Entry)
				}
			},
			"advance": func(t *rapid.T) {
				limit := rapid.OneOf(rapid.IntRange(-1, 4), rapid.Just(math.MaxInt)).Draw(t, "limit")
				m.advance(m.drawTime("now"), limit)
			},
			"advanceToNext": func(t *rapid.T) {
				if at, ok := m.w.Next(); ok {
					m.advance(at, rapid.IntRange(1, 3).Draw(t, "limit"))
				}
			},
			"advanceAll": func(t *rapid.T) { m.advanceAll(m.drawTime("now")) },
			"advanceToFirst": func(t *rapid.T) {
				if len(m.queued) > 0 {
					m.advance(m.queued[0].Deadline()+rapid.Int64Range(-1, 0).Draw(t, "off"), math.MaxInt)
				}
			},
			"": func(t *rapid.T) {
				check(t, m.w)
				m.checkNext()
			},
		})
	})
}

// A caller that sleeps until Next reports every entry at its deadline, to the millisecond. For each
// entry it wakes up at most once a level.
func TestNextWakesOnceALevel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Int64().Draw(t, "start")
		w := New[int64](start)
		deadlines := rapid.SliceOfN(rapid.Int64Range(start, math.MaxInt64), 1, 20).Draw(t, "deadlines")
		for _, d := range deadlines {
			w.Add(&Entry[int64]{Value: d}, d)
		}
		var got []int64
		for wakes := 0; w.Len() > 0; wakes++ {
			require.Less(t, wakes, levels*len(deadlines))
			at, ok := w.Next()
			require.True(t, ok)
			require.False(t, w.Advance(at, math.MaxInt, func(d int64) {
				require.Equal(t, at, d)
				got = append(got, d)
			}))
			check(t, w)
		}
		slices.Sort(deadlines)
		require.Equal(t, deadlines, got)
	})
}

func TestZeroEntry(t *testing.T) {
	w := New[string](0)
	_, ok := w.Next()
	require.False(t, ok)
	var e Entry[string]
	require.False(t, e.Queued())
	w.Remove(&e)
	require.Zero(t, w.Len())
	w.Add(&e, 5)
	require.Panics(t, func() { w.Add(&e, 6) })
	require.EqualValues(t, 5, e.Deadline())
	require.Equal(t, 1, w.Len())
}

// The ends of int64 are deadlines like others, and the range between them is not scanned.
func TestWholeRange(t *testing.T) {
	w := New[int64](math.MinInt64)
	want := []int64{math.MinInt64, math.MinInt64 + 1, -1, 0, 1, math.MaxInt64 - 1, math.MaxInt64}
	for _, d := range slices.Backward(want) {
		w.Add(&Entry[int64]{Value: d}, d)
	}
	check(t, w)
	var got []int64
	report := func(d int64) { got = append(got, d) }
	require.False(t, w.Advance(math.MaxInt64-1, math.MaxInt, report))
	require.Equal(t, want[:6], got)
	at, _ := w.Next()
	require.EqualValues(t, int64(math.MaxInt64), at)
	require.False(t, w.Advance(math.MaxInt64, math.MaxInt, report))
	require.Equal(t, want, got)
}

func TestEqualDeadlinesKeepTheOrderOfAdd(t *testing.T) {
	const deadline = 10 * hour
	w := New[int](0)
	for i := range 5 {
		w.Add(&Entry[int]{Value: i}, deadline)
		w.Advance(deadline-deadline>>(4*i+1), 10, func(int) { t.Fatal("early") })
	}
	var got []int
	w.Advance(deadline, 10, func(i int) { got = append(got, i) })
	require.Equal(t, []int{0, 1, 2, 3, 4}, got)
}

func TestExpireInChunks(t *testing.T) {
	const n, chunk = 100_000, 999
	w := New[int](0)
	entries := make([]Entry[int], n)
	for i := range entries {
		entries[i].Value = i
		w.Add(&entries[i], hour+int64(i%3)) // the order by deadline is by i%3, then by i
	}
	seen, last := 0, -1
	for more, calls := true, 0; more; calls++ {
		before := seen
		more = w.Advance(2*hour, chunk, func(i int) {
			place := i%3*n + i
			require.Greater(t, place, last)
			last = place
			seen++
		})
		require.LessOrEqual(t, seen-before, chunk)
		require.Equal(t, n-seen, w.Len())
		require.LessOrEqual(t, calls, n/chunk+levels*n/MaxMoves)
	}
	require.Equal(t, n, seen)
	check(t, w)
}

func TestNoAllocation(t *testing.T) {
	w := New[int](0)
	entries := make([]Entry[int], 100)
	now := int64(0)
	expire := func(i int) { w.Add(&entries[i], now+int64(i)*hour) }
	for i := range entries {
		entries[i].Value = i
		w.Add(&entries[i], int64(i))
	}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		w.Remove(&entries[7])
		w.Add(&entries[7], now+year)
		now += 3 * hour
		w.Advance(now, 50, expire)
		w.Next()
	}))
	require.Equal(t, len(entries), w.Len())
}

// An Add and a Remove among a million other entries; the deadline goes through all levels.
func BenchmarkAddRemove(b *testing.B) {
	w := New[int](0)
	for i := range 1_000_000 {
		w.Add(&Entry[int]{}, int64(i)*977)
	}
	var e Entry[int]
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		w.Add(&e, int64(i)*7919%year)
		w.Remove(&e)
	}
}

// An entry a second ahead that expires and is added again, among 10,000 such entries.
func BenchmarkAdvance(b *testing.B) {
	const n = 10_000
	w := New[int](0)
	entries := make([]Entry[int], n)
	for i := range entries {
		entries[i].Value = i
		w.Add(&entries[i], int64(i)%1000)
	}
	now := int64(0)
	b.ReportAllocs()
	for i := 0; i < b.N; {
		now++
		w.Advance(now, n, func(v int) {
			w.Add(&entries[v], now+1000)
			i++
		})
	}
}
