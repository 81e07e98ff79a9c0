package codeq

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// promoteDue lets scheduled tasks go on whose time has come. Nothing lies before
// nextDue, but perhaps many tombstones: it begins there.
// REQUIRES: the group has scheduled no task, and moved none that was: nextDue is
// what disk says afterwards.
func (s *shard) promoteDue() {
	lower := keys.AppendScheduled(nil, s.nextDue, ID{})
	_, upper := keys.Range(keys.Scheduled)
	s.nextDue = never
	s.broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		due, id, err := keys.ParseScheduled(it.Key())
		if err != nil {
			return false, err
		}
		if due > s.wall || s.spent() {
			s.nextDue = min(s.nextDue, due)
			return false, nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		number, rec, err := keys.SplitLane(v)
		if err != nil {
			return false, err
		}
		l, err := s.laneNumbered(number)
		if err != nil {
			return false, err
		}
		return true, s.promote(it.Key(), due, id, l, append([]byte(nil), rec...))
	})
}

func (s *shard) promoteIsDue() bool { return s.nextDue <= s.wall }

func (s *shard) laneNumbered(n uint32) (*lane, error) {
	if int(n) >= len(s.lanes) {
		return nil, fmt.Errorf("%w: lane %d of %d", ErrCorrupt, n, len(s.lanes))
	}
	return s.lanes[n], nil
}
