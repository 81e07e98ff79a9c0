package recent

import (
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
