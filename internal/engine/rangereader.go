package engine

import (
	"bytes"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/store"
)

// rangeReader reads a range as it was before the group, with one iterator for the whole group.
type rangeReader struct {
	prefix byte
	it     *pebble.Iterator // nil until needed
}

func (r *rangeReader) open(in *round) (it *pebble.Iterator, err error) {
	if r.it == nil {
		lower, upper := keys.Range(r.prefix)
		r.it, err = in.Store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	}
	return r.it, store.Error(err)
}

// read is State.read of an entry as it was before the group.
func (r *rangeReader) read(in *round, key []byte) ([]byte, error) {
	it, err := r.open(in)
	if err != nil {
		return nil, err
	}
	limit := append(bytes.Clone(key), 0)
	found := false
	if it.Valid() && bytes.Compare(it.Key(), key) < 0 { // it is often the next one
		found = it.NextWithLimit(limit) == pebble.IterValid && bytes.Equal(it.Key(), key)
	}
	if !found && it.SeekGEWithLimit(key, limit) != pebble.IterValid {
		in.noteRead(0)
		return nil, store.Error(it.Error())
	}
	v, err := it.ValueAndErr()
	in.noteRead(len(v))
	return bytes.Clone(v), store.Error(err)
}

// waiter is the blocked task at the reader's position.
func (r *rangeReader) waiter(in *round) (w waiter, err error) {
	_, _, id, err := keys.ParseGrouped(r.it.Key())
	if err != nil {
		return w, err
	}
	v, err := r.it.ValueAndErr()
	in.noteRead(len(v))
	return waiter{id, bytes.Clone(v)}, store.Error(err)
}

// closeReaders closes the readers of ranges as they were before the group. Write-back caches close
// theirs when they are sealed.
func (s *State) closeReaders() {
	s.Ties.blocked.close(&s.round)
	s.Ties.children.close(&s.round)
	s.dead.close(&s.round)
	s.Names.totals.reader.close(&s.round)
	s.Names.totals.written = false
}

func (r *rangeReader) close(in *round) {
	if r.it != nil {
		in.walked += uint64(r.it.Stats().ForwardStepCount[pebble.InternalIterCall])
		_ = r.it.Close() // its error is that of it.Error
		r.it = nil
	}
}
