package recent

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLatestAreRemembered: the set holds the latest elements, up to its capacity.
func TestLatestAreRemembered(t *testing.T) {
	var s Set[int]
	require.False(t, s.Has(0))
	const n = 2*Capacity + 3
	for i := range n {
		s.Add(i)
	}
	for i := range n {
		require.Equal(t, i >= n-Capacity, s.Has(i), i)
	}
	require.Len(t, s.members, Capacity)
}

// TestNumbers: the names that were added last have their numbers, until they are taken or removed.
func TestNumbers(t *testing.T) {
	var s Numbers[string]
	held := func(want ...string) {
		t.Helper()
		var got []string
		for name := range s.All() {
			got = append(got, name)
		}
		require.Equal(t, want, got, "oldest first")
	}
	s.Remove(1)
	for n, name := range []string{"a", "b", "c", "d"} {
		s.Add(name, uint32(n), 3)
	}
	held("b", "c", "d")
	s.Add("b", 7, 3)
	held("c", "d", "b")
	n, ok := s.Take("b")
	require.True(t, ok)
	require.EqualValues(t, 7, n)
	_, ok = s.Take("b")
	require.False(t, ok)
	s.Remove(2)
	held("d")
}

// TestTexts: the keys that were added last have their values and texts, in bounded memory, and
// without an allocation once this memory is full.
func TestTexts(t *testing.T) {
	var s Texts[int, string]
	text := func(n, size int) string { return strings.Repeat(string(rune('a'+n%26)), size) }
	add := func(n, size int) { s.Add(n, text(n, 3), []byte(text(n, size)), text(n, size/2)) }
	find := func(n, size int) {
		t.Helper()
		value, first, second, ok := s.Find(n)
		require.True(t, ok, n)
		require.Equal(t, text(n, 3), value)
		require.Equal(t, text(n, size), string(first))
		require.Equal(t, size == 0, first == nil)
		require.Equal(t, text(n, size/2), second)
	}
	has := func(n int) bool {
		_, _, _, ok := s.Find(n)
		return ok
	}
	for n := range 3 * TextsHalf {
		add(n, n%50)
		for _, back := range []int{0, 1, TextsHalf - 1} {
			if past := n - back; past >= 0 {
				find(past, past%50)
			}
		}
	}
	require.False(t, has(0), "many ago")
	require.False(t, has(1<<20))
	n := 0
	require.Zero(t, testing.AllocsPerRun(5*TextsHalf, func() { s.Add(n, "", nil, ""); n++ }))

	s = Texts[int, string]{}
	const size = TextsBytes / 4
	for n := range 9 {
		add(n, size)
		require.LessOrEqual(t, len(s.now.texts)+len(s.before.texts), 2*TextsBytes)
		find(n, size)
		require.Equal(t, n > 0, has(n-1))
	}
	add(9, TextsBytes)
	require.False(t, has(9), "too long")
	require.True(t, has(8))
}
