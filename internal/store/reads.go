package store

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Reads reads the store of a shard for its owner, as the store is before the current group, and
// counts the work.
type Reads struct {
	Store       *Store
	ReadEntries int    // entries that were read
	ReadBytes   int    // of their values
	Walked      uint64 // keys that iterators have stepped over, including deleted ones
	Broken      error  // why the owner must not go on: memory and disk may differ
}

// NoteRead counts an entry that was read.
func (r *Reads) NoteRead(bytes int) {
	r.ReadEntries++
	r.ReadBytes += bytes
}

// Lookup returns a copy of the value of a key, or nil.
func (r *Reads) Lookup(key []byte) ([]byte, error) {
	v, err := Lookup(r.Store.DB(), key)
	r.NoteRead(len(v))
	return v, err
}

// Walk visits the entries of a range in order, until visit returns false or an error; n counts the
// entries.
func (r *Reads) Walk(lower, upper []byte, visit func(it *pebble.Iterator, n int) (bool, error)) error {
	it, err := r.Store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return Error(err)
	}
	defer r.close(it)
	n := 0
	for valid := it.First(); valid; valid = it.Next() {
		value := it.LazyValue()
		r.NoteRead(value.Len())
		more, err := visit(it, n)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if !more {
			return nil
		}
		n++
	}
	return Error(it.Error())
}

func (r *Reads) close(it *pebble.Iterator) {
	r.Walked += uint64(it.Stats().ForwardStepCount[pebble.InternalIterCall])
	_ = it.Close() // its error is that of it.Error
}

// RangeReader reads a range with one iterator for a whole group.
type RangeReader struct {
	in     *Reads
	prefix byte
	it     *pebble.Iterator // nil until needed
}

// Range returns a reader of the range with a prefix.
func (r *Reads) Range(prefix byte) RangeReader { return RangeReader{in: r, prefix: prefix} }

// Open returns the iterator, which Close closes.
func (r *RangeReader) Open() (it *pebble.Iterator, err error) {
	if r.it == nil {
		lower, upper := keys.Range(r.prefix)
		r.it, err = r.in.Store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	}
	return r.it, Error(err)
}

// Walk visits the entries from a key to an end, until visit returns false or an error.
func (r *RangeReader) Walk(from, end []byte, visit func(key, value []byte) (bool, error)) error {
	it, err := r.Open()
	if err != nil {
		return err
	}
	for at := it.SeekGEWithLimit(from, end); at == pebble.IterValid; at = it.NextWithLimit(end) {
		value, err := it.ValueAndErr()
		if err != nil {
			return Error(err)
		}
		r.in.NoteRead(len(value))
		more, err := visit(it.Key(), value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if !more {
			return nil
		}
	}
	return Error(it.Error())
}

// Lookup returns a copy of the value of a key, or nil. It is cheap for the key that follows the
// last one.
func (r *RangeReader) Lookup(key []byte) ([]byte, error) {
	it, err := r.Open()
	if err != nil {
		return nil, err
	}
	limit := append(bytes.Clone(key), 0)
	found := false
	if it.Valid() && bytes.Compare(it.Key(), key) < 0 {
		found = it.NextWithLimit(limit) == pebble.IterValid && bytes.Equal(it.Key(), key)
	}
	if !found && it.SeekGEWithLimit(key, limit) != pebble.IterValid {
		r.in.NoteRead(0)
		return nil, Error(it.Error())
	}
	return r.value()
}

// value returns a copy of the value at which the iterator is.
func (r *RangeReader) value() ([]byte, error) {
	v, err := r.it.ValueAndErr()
	r.in.NoteRead(len(v))
	return bytes.Clone(v), Error(err)
}

// Close ends the use of the store for this group.
func (r *RangeReader) Close() {
	if r.it != nil {
		r.in.close(r.it)
		r.it = nil
	}
}
