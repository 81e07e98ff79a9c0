package cluster

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFailures: the first failure of a node has no consequence, the next ones each twice that of
// the one before, up to a bound, and after a quiet time all is forgotten. Shards that are lost at
// one moment are one failure.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f crashLog
		wait := func() time.Duration {
			begin := time.Now()
			for f.distrusts("a") {
				time.Sleep(time.Second)
			}
			return time.Since(begin)
		}
		require.Zero(t, wait())
		for range 2 {
			for _, want := range []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 30} {
				for range 3 {
					f.note("a")
					time.Sleep(time.Second)
				}
				require.False(t, f.distrusts("b"))
				require.InDelta(t, want*time.Minute, wait(), float64(5*time.Second))
				time.Sleep(failureSpan)
			}
			time.Sleep(failureMemory)
		}
	})
}
