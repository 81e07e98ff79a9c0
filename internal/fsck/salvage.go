package fsck

import (
	"bytes"
	"errors"
	"math/big"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// salvage reads the readable entries of a store with damaged tables.
type salvage struct {
	db     *pebble.DB
	bounds [][]byte      // the first keys of its tables, and the first keys behind them, in order
	gaps   map[byte]bool // ranges with entries that could not be read, as far as they were scanned
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

// scan visits the entries of a range that can be read, in order. It reads from one boundary of a
// table to the next: an iterator reads the first block of each level that lies within its bounds,
// and fails on a damaged one even if entries of other levels come before it.
func (s *salvage) scan(prefix byte, visit func(key, value []byte)) error {
	for from, upper := keys.Range(prefix); from != nil; {
		to, err := upper, error(nil)
		if i, _ := slices.BinarySearchFunc(s.bounds, successor(from), bytes.Compare); i < len(s.bounds) && bytes.Compare(s.bounds[i], upper) < 0 {
			to = s.bounds[i]
		}
		for from != nil && err == nil {
			from, err = s.read(from, to, visit)
		}
		if err != nil {
			return err
		}
		if from = to; bytes.Equal(to, upper) {
			break
		}
	}
	return nil
}

// scanParsed visits the entries of a range that can be read and parsed, in order.
func scanParsed[K, V any](
	s *salvage, prefix byte, parseKey func([]byte) (K, error), parseValue func([]byte) (V, error), visit func(k K, v V, key, value []byte),
) error {
	return s.scan(prefix, func(key, value []byte) {
		k, err := parseKey(key)
		v, valueErr := parseValue(value)
		if err == nil && valueErr == nil {
			visit(k, v, key, value)
		}
	})
}

// read visits the entries from a key on, and below to. When one cannot be read it returns the next
// key at which reading may go on.
// REQUIRES: no table begins or ends between from and to.
func (s *salvage) read(from, to []byte, visit func(key, value []byte)) (next []byte, err error) {
	if from, err = s.readable(from, to, visit); from == nil || err != nil {
		return nil, err
	}
	// Each block that contains from holds entries up to the beginning of the next block.
	if next, err = s.nextBlock(from, to); err != nil {
		return nil, err
	}
	end := to
	if next != nil {
		end = next
	}
	from, err = s.readable(from, end, visit)
	if from != nil {
		s.gaps[from[0]] = true
	}
	return next, err
}

// readable visits the entries from a key on, and below to, and returns the smallest key of the
// first one that cannot be read; nil if all can be read.
func (s *salvage) readable(from, to []byte, visit func(key, value []byte)) (unread []byte, err error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: from, UpperBound: to})
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
		from = successor(it.Key())
	}
	if err = errors.Join(err, it.Error()); err == nil || store.IsIOError(err) {
		return nil, err
	}
	return from, nil
}

// successor returns the next possible key.
func successor(key []byte) []byte { return append(bytes.Clone(key), 0) }

// nextBlock returns the first key after from, and below to, of another block of any table; nil if
// there is none. Pebble has no call for it, but estimates by the indexes of the tables the size of
// a range of keys on disk, in whole blocks. A damaged part of an index takes nothing; then it
// searches for a key after from that can be read. REQUIRES: no table begins or ends between from
// and to.
func (s *salvage) nextBlock(from, to []byte) (next []byte, err error) {
	n := max(len(from), len(to), 48)
	number := func(key []byte) *big.Int {
		return new(big.Int).SetBytes(append(bytes.Clone(key), make([]byte, n-len(key))...))
	}
	within, err := s.db.EstimateDiskUsage(from, from)
	if err != nil {
		return nil, err
	}
	low, high := number(from), number(to) // low is in the same blocks; high may not be
	one, grown := big.NewInt(1), false
	for new(big.Int).Sub(high, low).Cmp(one) > 0 {
		middle := new(big.Int).Add(low, high)
		middle.Rsh(middle, 1)
		key := middle.FillBytes(make([]byte, n))
		reached, err := s.db.EstimateDiskUsage(from, key)
		if err != nil {
			return nil, err
		}
		if reached != within || within == 0 && s.has(key) {
			high, grown = middle, true
		} else {
			low = middle
		}
	}
	if !grown {
		return nil, nil
	}
	return high.FillBytes(make([]byte, n)), nil
}

// has reports whether a key can be read, even if it has no value.
func (s *salvage) has(key []byte) bool {
	unread, err := s.readable(key, successor(key), func(_, _ []byte) {})
	return unread == nil && err == nil
}
