package codeq

import (
	"bytes"
	"errors"
	"math/big"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// salvage reads what can be read of a store with damaged tables.
type salvage struct {
	db     *pebble.DB
	bounds [][]byte      // where its tables begin, and the first keys behind them, in order
	gaps   map[byte]bool // ranges of which something cannot be read, as far as they have been read
}

func newSalvage(db *pebble.DB) (*salvage, error) {
	levels, err := db.SSTables()
	if err != nil {
		return nil, err
	}
	s := &salvage{db: db, gaps: make(map[byte]bool)}
	for _, level := range levels {
		for _, t := range level {
			s.bounds = append(s.bounds, t.Smallest.UserKey, append(bytes.Clone(t.Largest.UserKey), 0))
		}
	}
	slices.SortFunc(s.bounds, bytes.Compare)
	return s, nil
}

// scan visits the entries of a range that can be read, in order.
func (s *salvage) scan(prefix byte, visit func(key, value []byte)) error {
	from, upper := keys.Range(prefix)
	for from != nil {
		var err error
		if from, err = s.read(from, upper, visit); err != nil {
			return err
		}
	}
	return nil
}

// read visits the entries from a key on. When one cannot be read it returns the next
// key from which on one can be.
func (s *salvage) read(from, upper []byte, visit func(key, value []byte)) (next []byte, err error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: upper})
	if err != nil {
		return nil, err
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; valid = it.Next() {
		var value []byte
		if value, err = it.ValueAndErr(); err != nil {
			break
		}
		visit(it.Key(), value)
		from = append(bytes.Clone(it.Key()), 0)
	}
	if err = errors.Join(err, it.Error()); err == nil || isIOError(err) {
		return nil, err
	}
	s.gaps[from[0]] = true
	return s.skip(from, upper)
}

// skip returns the first key below upper from which on the store can be read, while from is
// not one; nil if there is none. What can be read changes where a block begins or a table ends.
func (s *salvage) skip(from, upper []byte) (next []byte, err error) {
	for {
		if from, err = s.nextBlock(from, upper); from == nil || err != nil || s.readable(from, upper) {
			return from, err
		}
	}
}

// nextBlock returns the first key behind from, and below upper, of another block of any table, or at an end
// of a table; nil if there is none. Pebble has no call for it, but says what a range of keys takes on the disk, whole blocks
// at a time, by the indexes of the tables. A part of an index that is damaged takes nothing; behind from, what can be
// read is looked for then.
func (s *salvage) nextBlock(from, upper []byte) (next []byte, err error) {
	end := upper
	i, _ := slices.BinarySearchFunc(s.bounds, append(bytes.Clone(from), 0), bytes.Compare)
	if i < len(s.bounds) && bytes.Compare(s.bounds[i], upper) < 0 {
		end = s.bounds[i]
	}
	n := max(len(from), len(end), 48)
	number := func(key []byte) *big.Int {
		return new(big.Int).SetBytes(append(bytes.Clone(key), make([]byte, n-len(key))...))
	}
	within, err := s.db.EstimateDiskUsage(from, from)
	if err != nil {
		return nil, err
	}
	low, high := number(from), number(end) // in the same blocks; perhaps not
	one, grown := big.NewInt(1), false
	for new(big.Int).Sub(high, low).Cmp(one) > 0 {
		middle := new(big.Int).Add(low, high)
		middle.Rsh(middle, 1)
		key := middle.FillBytes(make([]byte, n))
		reached, err := s.db.EstimateDiskUsage(from, key)
		if err != nil {
			return nil, err
		}
		if reached != within || within == 0 && s.readable(key, upper) {
			high, grown = middle, true
		} else {
			low = middle
		}
	}
	switch {
	case grown:
		return high.FillBytes(make([]byte, n)), nil
	case bytes.Equal(end, upper):
		return nil, nil
	}
	return end, nil
}

func (s *salvage) readable(from, upper []byte) bool {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: upper})
	if err != nil {
		return false
	}
	if it.First() {
		_, err = it.ValueAndErr()
	}
	return errors.Join(err, it.Error(), it.Close()) == nil
}
