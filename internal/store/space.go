package store

// How often those who write ask the file system how much is free.
const (
	LookBytes     = 4 << 20 // that were written since, at the most
	LookEvery     = 1000    // ms, while there is room
	LookEveryFull = 100     // ms, while there is not and somebody calls
)

// IsTight reports whether space is to be reclaimed at once, before any call is refused, which is
// below low.
func IsTight(free, low uint64) bool { return free < low+low/2 }
