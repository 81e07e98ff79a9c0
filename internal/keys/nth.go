package keys

import (
	"encoding/binary"
	"math"
)

// Nth is a placeholder for the ID of the i-th task (from 0) of a batch, among the parents of
// another task of the batch. No real ID begins with eight zeros.
func Nth(i int) (id ID) {
	binary.BigEndian.PutUint64(id[8:], uint64(i)+1)
	return id
}

// NthOf is the inverse of Nth. It may return an index outside the batch, also a negative one; the
// caller refuses it. The zero ID is no placeholder: i is -1.
func NthOf(id ID) (i int, ok bool) {
	n := int64(binary.BigEndian.Uint64(id[8:]))
	return int(min(max(n-1, math.MinInt), math.MaxInt)), n != 0 && binary.BigEndian.Uint64(id[:8]) == 0
}
