package cluster

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestClockAhead: by how much a clock is ahead follows from the majority of the voters, and is
// known only while they answer.
func TestClockAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var skew [3]atomic.Int64
		nodes, network := openTrio(t, 3, &skew[0], &skew[1], &skew[2])
		a := nodes[0].Group(0)
		requireAhead := func(want time.Duration, offset time.Duration) {
			t.Helper()
			ahead, known := a.clockAhead(time.Now().Add(offset))
			require.True(t, known)
			require.InDelta(t, want.Seconds(), ahead.Seconds(), 0.01)
		}
		requireAhead(0, 0)
		requireAhead(0, clockBound-time.Second)
		requireAhead(0, -time.Hour)
		requireAhead(time.Hour, time.Hour)

		set := func(offset time.Duration) {
			skew[1].Store(int64(offset))
			time.Sleep(time.Second)
		}
		set(time.Hour)
		requireAhead(0, 0)
		set(-time.Hour)
		requireAhead(0, 0)

		network.Isolate("c", trioNames)
		time.Sleep(clockFresh)
		requireAhead(time.Hour, 0) // of two clocks that differ, the earlier one
		set(0)
		requireAhead(0, 0)
		network.Heal(true)
		network.Isolate("a", trioNames)
		time.Sleep(clockFresh + time.Second)
		_, known := a.clockAhead(time.Now())
		require.False(t, known)
		network.Heal(true)
		closeAll(t, nodes)
	})
}
