package testbase

import "testing"

// SkipUnderRace skips a test when the race detector is on: a long test of one goroutine after the
// other, one that kills processes, or one with a race in another library.
func SkipUnderRace(t testing.TB) {
	t.Helper()
	if underRace {
		t.Skip("runs without the race detector")
	}
}
