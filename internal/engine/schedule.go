package engine

import (
	"bytes"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// dueCursor is where a range that is ordered by time begins: no entry lies before it. It is as
// precise as a key, since many entries may have the same time, and tombstones lie before it.
type dueCursor struct {
	at   uint64 // wall clock, ms; Never: the range is empty
	name [keys.IDLen]byte
}

var nothingDue = dueCursor{at: Never}

// lower makes the range begin no later than at an entry.
func (c *dueCursor) lower(at uint64, name [keys.IDLen]byte) {
	if at < c.at || at == c.at && bytes.Compare(name[:], c.name[:]) < 0 {
		c.at, c.name = at, name
	}
}

// promoteDue moves on the scheduled tasks whose time has come.
// REQUIRES: the group has scheduled no task, and moved no scheduled one: nextDue becomes what disk
// says.
func (s *State) promoteDue() {
	lower := keys.AppendScheduled(nil, s.nextDue.at, s.nextDue.name)
	_, upper := keys.Range(keys.Scheduled)
	s.nextDue = nothingDue
	s.Broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		due, id, err := keys.ParseScheduled(it.Key())
		if err != nil {
			return false, err
		}
		if due > s.Wall || s.Spent() {
			s.nextDue.lower(due, id)
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

func (s *State) promoteIsDue() bool { return s.nextDue.at <= s.Wall }
