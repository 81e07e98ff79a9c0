package store

import "math"

// How often owners ask the file system for its free bytes.
const (
	LookBytes     = 4 << 20 // written between two questions, at most
	LookEvery     = 1000    // ms, while there is room
	LookEveryFull = 100     // ms, while there is none and callers come
)

// Shortage is how many quarters of low, begun ones included, the free space lacks: 0 to 4.
func Shortage(free, low uint64) int {
	switch quarter := low / 4; {
	case free >= low:
		return 0
	case free >= low-quarter:
		return 1
	case free >= low/2:
		return 2
	case free >= quarter:
		return 3
	}
	return 4
}

// IsTight reports whether space should be reclaimed at once. Calls are refused later, below low.
func IsTight(free, low uint64) bool { return free < low+low/2 }

// SizeWithout returns the size of the tables, about, without those of one range of keys.
func (st *Store) SizeWithout(prefix byte) (size uint64) {
	for _, r := range [][2][]byte{{{0}, {prefix}}, {{prefix + 1}, {math.MaxUint8}}} {
		n, err := st.db.EstimateDiskUsage(r[0], r[1])
		if err != nil {
			return math.MaxUint64
		}
		size += n
	}
	return size
}
