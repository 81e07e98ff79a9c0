package entries

import (
	"io"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLine: calls leave the line after their last message is taken. Calls that have given up do not
// accumulate.
func TestLine(t *testing.T) {
	l := NewLines[*Patience](2)
	calls := make([]Patience, 4)
	for i := range calls {
		l.Add(1, uint64(10+i/2), &calls[i])
	}
	took := func(taken uint64) (gone []*Patience) {
		l.Take(1, taken, func(c *Patience) { gone = append(gone, c) })
		return gone
	}
	require.Empty(t, took(9))
	require.Equal(t, []*Patience{&calls[0], &calls[1]}, took(10))
	require.Equal(t, []*Patience{&calls[2], &calls[3]}, slices.Collect(l.All))
	require.Equal(t, []*Patience{&calls[2], &calls[3]}, took(99))
	require.Empty(t, slices.Collect(l.All))
	require.False(t, l.Wait())

	l.Add(0, 7, &calls[0])
	l.Add(1, 7, &calls[1])
	require.True(t, l.Wait())
	var gone []*Patience
	collect := func(c *Patience) { gone = append(gone, c) }
	l.End(0, io.EOF, collect)
	require.Equal(t, []*Patience{&calls[0]}, gone)
	require.Equal(t, io.EOF, l.Ended(0))
	require.NoError(t, l.Ended(1))
	l.Dismiss(collect)
	require.Equal(t, []*Patience{&calls[0], &calls[1]}, gone)
	require.False(t, l.Wait())

	stays := new(Patience)
	l.Add(1, 1, stays)
	for range 100 * SweepMin {
		gone := new(Patience)
		l.Add(1, 1, gone)
		gone.GiveUp()
		require.LessOrEqual(t, len(l.lines[1].calls), 2+SweepMin+2)
	}
	require.Same(t, stays, took(1)[0])
}
