package store

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLeaseClock: the clock goes on with the next leader, whose own clock may show less, by its age
// as far as that counts. It is stored at once, after it has stood still, and now and then.
func TestLeaseClock(t *testing.T) {
	t.Parallel()
	c := NewLeaseClock(100_000, 300, 7_000)
	require.EqualValues(t, 100_300, c.At(7_000))
	old := NewLeaseClock(100_000, LeaseClockEvery+1, 7_000)
	require.EqualValues(t, 100_000+LeaseClockEvery, old.At(7_000))
	require.True(t, c.IsDue(7_000, 7_000))
	c.Note(7_000, 7_000)
	require.EqualValues(t, 100_300, c.Stored)
	require.False(t, c.IsDue(7_000+LeaseClockEvery-1, 7_000+LeaseClockEvery-1))
	require.EqualValues(t, 7_000+LeaseClockEvery, c.DueAt())
	require.True(t, c.IsDue(c.DueAt(), c.DueAt()))
	require.True(t, c.IsDue(7_001, 7_002), "it has stood still")

	require.EqualValues(t, 60_000, c.Left(0, 60_000, 7_000))
	require.EqualValues(t, 2_000, c.Left(102_300, 60_000, 7_000))
	require.EqualValues(t, LeaseGrace, c.Left(100_301, 60_000, 7_000))
	require.EqualValues(t, LeaseGrace, c.Left(1, 60_000, 7_000), "it is over")
	require.EqualValues(t, 10, c.Left(200_000, 10, 7_000))
}
