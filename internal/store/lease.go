package store

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// ScanLeases visits the lease records, oldest first.
func ScanLeases(r pebble.Reader, visit func(seq uint64, h keys.LeaseHeader, entries []keys.LeaseEntry) error) error {
	return Scan(r, keys.Lease, func(key, value []byte) error {
		seq, err := keys.ParseLease(key)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		h, entries, err := keys.ParseLeases(seq, value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		return visit(seq, h, entries)
	})
}

// LeasedHead returns the head of the task that a lease entry names, or nil if the entry is not
// valid.
func LeasedHead(r pebble.Reader, e *keys.LeaseEntry) (*record.Head, error) {
	v, closer, err := r.Get(keys.AppendTask(nil, e.Lane, e.Since, e.ID))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, Error(err)
	}
	defer func() { _ = closer.Close() }()
	return headIfValid(e, v)
}

// NextLeasedHead is LeasedHead with an iterator over the range Task, for entries in the order of
// their tasks' keys.
func NextLeasedHead(it *pebble.Iterator, e *keys.LeaseEntry) (*record.Head, error) {
	key := keys.AppendTask(nil, e.Lane, e.Since, e.ID)
	if it.Valid() && bytes.Compare(it.Key(), key) < 0 {
		it.Next() // it is often the next one
	}
	if !it.Valid() || !bytes.Equal(it.Key(), key) {
		it.SeekGE(key)
	}
	if !it.Valid() || !bytes.Equal(it.Key(), key) {
		return nil, Error(it.Error())
	}
	v, err := it.ValueAndErr()
	if err != nil {
		return nil, Error(err)
	}
	return headIfValid(e, v)
}

// headIfValid returns the head of a record, or nil if a lease entry is of an earlier lease of it.
func headIfValid(e *keys.LeaseEntry, rec []byte) (*record.Head, error) {
	head, err := record.DecodeHead(rec)
	if err != nil {
		return nil, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(e.ID), err)
	}
	if !IsLeaseOf(e, &head) {
		return nil, nil
	}
	return &head, nil
}

// IsLeaseOf reports whether a lease entry is of the lease that comes after those that a record
// counts, and so in force.
func IsLeaseOf(e *keys.LeaseEntry, head *record.Head) bool { return head.Leases+1 == e.Leases }
