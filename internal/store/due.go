package store

import (
	"bytes"
	"cmp"
	"math"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// DueCursor is the beginning of a range in order of time: no entry lies before it. It is as precise
// as a key, since many entries may have the same time, and tombstones lie before it.
type DueCursor struct {
	At   uint64 // ms; 2^64-1: the range is empty
	Name [keys.IDLen]byte
}

// NothingDue is the beginning of an empty range.
var NothingDue = DueCursor{At: math.MaxUint64}

func (c *DueCursor) compare(o *DueCursor) int {
	return cmp.Or(cmp.Compare(c.At, o.At), bytes.Compare(c.Name[:], o.Name[:]))
}

// Lower makes the range begin no later than at an entry.
func (c *DueCursor) Lower(at uint64, name [keys.IDLen]byte) {
	if o := (DueCursor{at, name}); o.compare(c) < 0 {
		*c = o
	}
}

// Raise makes the range begin no earlier than at another position.
func (c *DueCursor) Raise(o DueCursor) {
	if c.compare(&o) < 0 {
		*c = o
	}
}

// FirstDue returns the first entry of a range that is ordered by time, from a key on.
func (r *Reads) FirstDue(lower []byte, parse func([]byte) (uint64, [keys.IDLen]byte, error)) (c DueCursor, err error) {
	_, upper := keys.Range(lower[0])
	c = NothingDue
	err = r.Walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		at, name, err := parse(it.Key())
		c.Lower(at, name)
		return false, err
	})
	return c, err
}
