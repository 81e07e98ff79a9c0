package codeq

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// upkeepCap is how many scheduled tasks become ready, and how many kept
// results expire, in one group.
const upkeepCap = 512

// promoteDue makes scheduled tasks ready whose time has come.
// REQUIRES: the group is empty, so that disk has every task.
func (s *shard) promoteDue() (more bool) {
	if s.nextDue > s.wall || s.broken != nil {
		return false
	}
	s.nextDue, s.broken = s.walkDue(keys.Scheduled, s.nextDue, func(key []byte, due uint64, id ID, v []byte) error {
		number, rec, err := keys.SplitLane(v)
		if err != nil {
			return err
		}
		l, err := s.laneNumbered(number)
		if err != nil {
			return err
		}
		s.promote(key, due, id, l, append([]byte(nil), rec...))
		return nil
	})
	return s.nextDue <= s.wall
}

// expireResults forgets completed tasks that have been kept long enough.
// REQUIRES: the group is empty.
func (s *shard) expireResults() (more bool) {
	if s.nextExpiry > s.wall || s.broken != nil {
		return false
	}
	s.nextExpiry, s.broken = s.walkDue(keys.Done, s.nextExpiry, func(key []byte, _ uint64, id ID, v []byte) error {
		done, _, err := keys.ParseDone(v)
		if err != nil {
			return err
		}
		l, err := s.laneNumbered(done.Lane)
		if err != nil {
			return err
		}
		s.expireDone(key, id, l)
		return nil
	})
	return s.nextExpiry <= s.wall
}

// walkDue visits the entries of a range that is ordered by time, from the
// time from until now, and returns the time of the first one that it leaves.
// Nothing lies before from, but perhaps many tombstones: it begins there.
func (s *shard) walkDue(prefix byte, from uint64, visit func(key []byte, at uint64, id ID, value []byte) error) (next uint64, err error) {
	_, upper := keys.Range(prefix)
	lower := keys.AppendTimed(nil, prefix, from, ID{})
	it, err := s.store.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return never, storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for n, valid := 0, it.First(); valid; n, valid = n+1, it.Next() {
		at, id, err := keys.ParseTimed(it.Key())
		if err != nil {
			return never, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if at > s.wall || n == upkeepCap || s.group.full() {
			return at, nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return never, storageError(err)
		}
		if err := visit(it.Key(), at, id, v); err != nil {
			return never, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
	}
	return never, storageError(it.Error())
}

func (s *shard) laneNumbered(n uint32) (*lane, error) {
	if int(n) >= len(s.lanes) {
		return nil, fmt.Errorf("%w: lane %d of %d", ErrCorrupt, n, len(s.lanes))
	}
	return s.lanes[n], nil
}
