package owner

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestStalls: of a stall, only stallAfter counts. A sleep that ends in time counts in full, and so
// does a sleep until the owner is woken.
func TestStalls(t *testing.T) {
	c := NewClock()
	require.EqualValues(t, 0, c.Tick(0, false))
	c.Sleep(100)
	require.EqualValues(t, 100, c.Tick(100, false), "in time")
	c.Sleep(100)
	require.EqualValues(t, 200+stallAfter, c.Tick(200+stallAfter, false), "no stall yet")
	c.Sleep(100)
	require.EqualValues(t, 300+2*stallAfter, c.Tick(10_000, false), "woken too late")
	c.Sleep(engine.Never)
	require.EqualValues(t, 300+2*stallAfter+50_000, c.Tick(60_000, false), "nothing was to be done")
	require.EqualValues(t, 300+3*stallAfter+50_000, c.Tick(70_000, false), "a step took long")
}

// TestFullDiskStopsTheClock: no time counts while the disk has no room, for any time.
func TestFullDiskStopsTheClock(t *testing.T) {
	c := NewClock()
	c.Sleep(engine.Never)
	require.EqualValues(t, 1000, c.Tick(1000, false))
	for at := uint64(1001); at < 1_000_000; at += 999 {
		require.EqualValues(t, 1000, c.Tick(at, true))
	}
	last := c.uptime
	require.EqualValues(t, 1010, c.Tick(last+10, false))
}

// TestReapable: a lease is not taken back if an undecided operation may have come before its
// deadline. The operation may be in the inbox, taken from it, or deferred.
func TestReapable(t *testing.T) {
	c := NewClock()
	c.Sleep(engine.Never)
	now := c.Tick(100, false)
	c.Look(now, engine.Never, engine.Never)
	require.EqualValues(t, 100, c.Reapable(false), "nothing waits")

	// An operation that the next look finds has come after the last look.
	now = c.Tick(150, false)
	require.EqualValues(t, 100, c.Reapable(false))
	c.Look(now, engine.Never, engine.Never)
	require.EqualValues(t, 100, c.Taken(), "between the two readings")
	require.EqualValues(t, 100, c.Reapable(true), "it is not decided")
	require.EqualValues(t, 150, c.Reapable(false), "it is")

	// The operation is deferred to the next group, which decides it.
	c.Defer(c.Taken())
	require.EqualValues(t, 100, c.Reapable(false))
	now = c.Tick(200, false)
	c.Look(now, engine.Never, engine.Never)
	require.EqualValues(t, 100, c.Reapable(false), "others do not hide it")
	require.EqualValues(t, 100, c.Retry())
	require.EqualValues(t, 200, c.Reapable(false))
	require.EqualValues(t, 150, c.Retry(), "none is deferred: those that were taken")

	// Operations that waited for room keep the time of their arrival.
	now = c.Tick(300, false)
	c.Look(now, 120, 110)
	require.EqualValues(t, 120, c.Taken())
	require.EqualValues(t, 110, c.Reapable(false), "one is left")

	// An operation that wakes the owner comes after the beginning of the sleep.
	c.Sleep(engine.Never)
	c.Wake(450)
	c.Tick(500, false)
	require.EqualValues(t, 450, c.Reapable(false))
}

// TestTimesOfStalls: the uncounted part of stalls is subtracted from the arrival of an operation,
// as from its decision. So a stall before it takes no lease from its worker.
func TestTimesOfStalls(t *testing.T) {
	c := NewClock()
	c.Tick(0, false)
	now := c.Tick(10_000, false)
	require.EqualValues(t, stallAfter, now)
	c.Look(now, 9_900, engine.Never)
	require.EqualValues(t, 0, c.Taken(), "it may have come at the last look")
	now = c.Tick(10_100, false)
	c.Look(now, 10_050, 10_060)
	require.EqualValues(t, stallAfter, c.Taken(), "at the last look, which was before it waited for room")
	require.EqualValues(t, stallAfter+60, c.Reapable(false))
	c.Wake(100)
	require.Zero(t, c.Reapable(false), "what is earlier than all stalls is the beginning")
}
