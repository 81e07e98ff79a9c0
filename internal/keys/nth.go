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

// NthOf is the inverse of Nth.
func NthOf(id ID) (i int, ok bool) {
	n := binary.BigEndian.Uint64(id[8:])
	return int(n) - 1, n != 0 && n <= math.MaxInt32 && binary.BigEndian.Uint64(id[:8]) == 0
}
