package engine

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestBucketOf: a bucket ends no sooner than what it keeps may be forgotten, and
// an eighth of the retention later at the most, or a second; and a retention has
// few of them.
func TestBucketOf(t *testing.T) {
	const second = 1000
	walls := []uint64{0, 1, 999, 1000, 1_700_000_000_000, 1_700_000_000_001, 1_700_000_123_456, 1<<48 - 1}
	var retentions []int64
	for _, r := range []int64{1, second, 8 * second, 16 * second, 60 * second, 3600 * second, 86400 * second, 365 * 86400 * second} {
		retentions = append(retentions, r-1, r, r+1)
	}
	for bit := range 53 {
		retentions = append(retentions, 1<<bit-1, 1<<bit, 1<<bit+1, 1<<bit+1<<bit/3)
	}
	retentions = append(retentions, int64(record.Millis(math.MaxInt64)))
	for _, wall := range walls {
		for _, r := range retentions {
			until := BucketOf(wall, r)
			require.GreaterOrEqual(t, until, wall+uint64(r), "wall %d, retention %d", wall, r)
			require.LessOrEqual(t, until, wall+uint64(r)+max(uint64(r)/8, second), "wall %d, retention %d", wall, r)
		}
		require.Equal(t, uint64(keys.Forever), BucketOf(wall, -1))
	}
	for _, r := range retentions[1:] {
		if r < second {
			continue
		}
		buckets := make(map[uint64]bool)
		for i := range int64(200) { // over the time of one retention
			buckets[BucketOf(1_700_000_000_000+uint64(r/200*i), r)] = true
		}
		require.LessOrEqual(t, len(buckets), 18, "retention %d", r)
	}
}
