package testbase

import "testing"

// SkipUnderRace skips a test when the race detector is on: a long story of one goroutine after the
// other, one that kills processes, or one in which another library has a race.
func SkipUnderRace(t testing.TB) {
	t.Helper()
	if underRace {
		t.Skip("runs without the race detector")
	}
}
