package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

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

// leaseChunk is how many lease entries ValidLeases looks up together.
const leaseChunk = 1 << 16

// storedLease is an entry of a lease record.
type storedLease[R any] struct {
	record R
	keys.LeaseEntry
}

// ValidLeases visits the valid entries of lease records, with the heads of their tasks. A task may
// have several: the newest one comes last. recordOf makes what visit gets for a lease record. The
// tasks are looked up in the order of their keys, which costs a fraction of single lookups.
func ValidLeases[R any](
	r pebble.Reader, recordOf func(seq uint64, h keys.LeaseHeader) R, visit func(of R, e *keys.LeaseEntry, head *record.Head) error,
) error {
	lower, upper := keys.Range(keys.Task)
	tasks, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return Error(err)
	}
	defer func() { _ = tasks.Close() }() // its error is that of tasks.Error
	var chunk []storedLease[R]
	visitChunk := func() error {
		slices.SortStableFunc(chunk, func(a, b storedLease[R]) int {
			return cmp.Or(cmp.Compare(a.Lane, b.Lane), cmp.Compare(a.Since, b.Since), bytes.Compare(a.ID[:], b.ID[:]))
		})
		for i := range chunk {
			e := &chunk[i]
			head, err := nextLeasedHead(tasks, &e.LeaseEntry)
			if err != nil {
				return err
			}
			if head == nil {
				continue
			}
			if err := visit(e.record, &e.LeaseEntry, head); err != nil {
				return err
			}
		}
		chunk = chunk[:0]
		return nil
	}
	if err := ScanLeases(r, func(seq uint64, h keys.LeaseHeader, entries []keys.LeaseEntry) error {
		of := recordOf(seq, h)
		for _, e := range entries {
			chunk = append(chunk, storedLease[R]{of, e})
		}
		if len(chunk) < leaseChunk {
			return nil
		}
		return visitChunk()
	}); err != nil {
		return err
	}
	return visitChunk()
}

// nextLeasedHead is LeasedHead with an iterator over the range Task, for entries in the order of
// their tasks' keys.
func nextLeasedHead(it *pebble.Iterator, e *keys.LeaseEntry) (*record.Head, error) {
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
