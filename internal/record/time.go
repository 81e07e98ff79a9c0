package record

import (
	"math"
	"time"
)

// LastTime is the last millisecond of the year 9999 in UTC: later times have no text in RFC 3339,
// nor in JSON.
const LastTime = 253_402_300_799_999

// Millis rounds a duration up to milliseconds, so that nothing lasts shorter than asked for.
func Millis(d time.Duration) uint64 {
	ms := uint64(d / time.Millisecond)
	if d%time.Millisecond != 0 {
		ms++
	}
	return ms
}

// Duration is the inverse of Millis; the longest duration, rounded up, becomes itself again.
func Duration(ms uint64) time.Duration {
	if ms > uint64(math.MaxInt64/time.Millisecond) {
		return math.MaxInt64
	}
	return time.Duration(ms) * time.Millisecond
}

// Retention converts a retention to ms; -1: for ever.
func Retention(d time.Duration) int64 {
	if d < 0 {
		return -1
	}
	return int64(Millis(d))
}
