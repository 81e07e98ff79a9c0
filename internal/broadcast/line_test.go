package broadcast

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLine: calls go when their last message has been taken, and those that have given up do not
// pile up.
func TestLine(t *testing.T) {
	var l Line[*Patience]
	calls := make([]Patience, 4)
	for i := range calls {
		l.Add(uint64(10+i/2), &calls[i])
	}
	took := func(taken uint64) (gone []*Patience) {
		l.Take(taken, func(c *Patience) { gone = append(gone, c) })
		return gone
	}
	require.Empty(t, took(9))
	require.Equal(t, []*Patience{&calls[0], &calls[1]}, took(10))
	require.Equal(t, []*Patience{&calls[2], &calls[3]}, slices.Collect(l.All))
	require.Equal(t, []*Patience{&calls[2], &calls[3]}, took(99))
	require.Empty(t, slices.Collect(l.All))

	stays := new(Patience)
	l.Add(1, stays)
	for range 100 * SweepMin {
		gone := new(Patience)
		l.Add(1, gone)
		gone.GiveUp()
		require.LessOrEqual(t, len(l.calls), 2+SweepMin+2)
	}
	require.Same(t, stays, took(1)[0])
}
