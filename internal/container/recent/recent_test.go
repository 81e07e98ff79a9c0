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
