package keys

import (
	"encoding/binary"
	"math"
)

// Nth stands for the ID of the i-th task (from 0) of a batch among the parents of another task of
// it. No ID that is made begins with eight zeros.
func Nth(i int) (id ID) {
	binary.BigEndian.PutUint64(id[8:], uint64(i)+1)
	return id
}

// NthOf is the inverse of Nth, also for places that no batch has, which are to be refused: negative
// ones, and those beyond its tasks. -1 is the zero ID, which stands for nothing.
func NthOf(id ID) (i int, ok bool) {
	n := int64(binary.BigEndian.Uint64(id[8:]))
	return int(min(max(n-1, math.MinInt), math.MaxInt)), n != 0 && binary.BigEndian.Uint64(id[:8]) == 0
}
