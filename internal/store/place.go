package store

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// PlaceOf finds the place of the record of an unended task: where the index says, or else its first
// place, in case it exists.
func PlaceOf(r pebble.Reader, id keys.ID) (p keys.Place, indexed bool, err error) {
	value, closer, err := r.Get(keys.AppendByID(nil, keys.Index, id))
	if errors.Is(err, pebble.ErrNotFound) {
		return keys.FirstPlace(keys.LaneOf(id), id), false, nil
	}
	if err != nil {
		return p, false, Error(err)
	}
	defer func() { _ = closer.Close() }()
	if p, err = keys.ParsePlace(value); err != nil {
		return p, true, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	return p, true, nil
}

// JoinValue returns the value of a task by its range; ended is for the ranges of ended tasks.
func JoinValue(p keys.Place, lane uint32, rec *record.Record, ended keys.EndedValue) []byte {
	switch p.Range {
	case keys.Task:
		return rec.Encode()
	case keys.Scheduled, keys.Blocked:
		return rec.Append(keys.AppendLaneNumber(nil, lane))
	}
	ended.Lane = lane
	return rec.Append(ended.Append(nil))
}

// SplitValue splits the value of a task by its range.
func SplitValue(p keys.Place, value []byte) (lane uint32, rec []byte, ended keys.EndedValue, err error) {
	switch p.Range {
	case keys.Task:
		return p.Group, value, ended, nil
	case keys.Scheduled, keys.Blocked:
		lane, rec, err = keys.SplitLane(value)
		return lane, rec, ended, err
	}
	ended, rec, err = keys.ParseEnded(value)
	return ended.Lane, rec, ended, err
}
