package owner

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestClock: a step lasts from the end of the step before it, or from the beginning of the round,
// to its own end, and counts the work of this time. A round lasts from its beginning to the end of
// its last step.
func TestClock(t *testing.T) {
	const read, write, round = 1, 2, 3
	c := UpkeepClock{UpkeepTable: new(UpkeepTable)}
	c.Begin(UpkeepMark{At: time.Second, Records: 10, Bytes: 1000})
	c.End(read, UpkeepMark{At: time.Second + 3*time.Microsecond, Records: 12, Bytes: 1100})
	c.End(write, UpkeepMark{At: time.Second + 10*time.Microsecond, Records: 12, Bytes: 1500})
	c.EndOf(write, UpkeepMark{At: time.Second + 12*time.Microsecond, Records: 13, Bytes: 1600}, 7, 70)
	c.EndRound(round)
	c.Begin(UpkeepMark{At: time.Minute, Records: 13, Bytes: 1600})
	c.End(read, UpkeepMark{At: time.Minute + time.Microsecond, Records: 18, Bytes: 1601})

	s := c.Stats(read)
	require.EqualValues(t, 2, s.Count)
	require.Equal(t, 3*time.Microsecond, s.Longest, "time between rounds is no step's")
	require.Equal(t, 4*time.Microsecond, s.Total)
	require.EqualValues(t, 5, s.Records)
	require.EqualValues(t, 100, s.Bytes)
	require.EqualValues(t, 1, s.Buckets[1], "1 us")
	require.EqualValues(t, 1, s.Buckets[2], "2 or 3 us")
	s = c.Stats(write)
	require.EqualValues(t, 2, s.Count)
	require.Equal(t, 7*time.Microsecond, s.Longest)
	require.EqualValues(t, 7, s.Records, "as EndOf says")
	require.EqualValues(t, 400, s.Bytes)
	s = c.Stats(round)
	require.EqualValues(t, 1, s.Count)
	require.Equal(t, 12*time.Microsecond, s.Longest)
	require.EqualValues(t, 3, s.Records)
	require.EqualValues(t, 600, s.Bytes)
	require.Zero(t, c.Stats(0))
}

// TestBuckets: bucket i has the steps of less than 2^i us and at least half of that. The last
// bucket has all longer steps.
func TestBuckets(t *testing.T) {
	for _, c := range []struct {
		took   time.Duration
		bucket int
	}{
		{0, 0}, {time.Microsecond - 1, 0}, {time.Microsecond, 1}, {2 * time.Microsecond, 2}, {5 * time.Microsecond, 3},
		{1 << (UpkeepBuckets - 2) * time.Microsecond, UpkeepBuckets - 1}, {time.Hour, UpkeepBuckets - 1},
	} {
		var table UpkeepTable
		table.Note(MaxUpkeepKinds-1, c.took, 0, 0)
		s := table.Stats(MaxUpkeepKinds - 1)
		require.EqualValues(t, 1, s.Buckets[c.bucket], c.took)
		require.EqualValues(t, 1, s.Count, c.took)
		require.Equal(t, c.took, s.Longest)
	}
	require.Greater(t, 1<<(UpkeepBuckets-1)*time.Microsecond, time.Minute)
}
