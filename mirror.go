package codeq

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// mirror is what memory holds of a range of small entries: all of them while
// they are few, and some when they are many; then an entry that it does not
// hold is read from disk. The shard's owner uses it; changes are written once
// for each group and entry.
//
// Invariant: an entry that the group has changed is held until the group has
// persisted, so that no read misses what is still under way.
type mirror[K comparable, V any] struct {
	prefix byte
	key    func([]byte, K) []byte
	parse  func(key, value []byte) (K, V, error)
	encode func(V, []byte) []byte
	order  func(a, b K) int // that of the keys

	held    map[K]mirrored[V]
	whole   bool // what is not held does not exist
	changed []K  // in this group

	reader         *pebble.Iterator // of disk before the group; nil until it is needed
	scratch, value []byte
}

type mirrored[V any] struct {
	value   V
	present bool
	stored  uint8 // how often the key has been written since it did not exist; stops at many
	changed bool
}

// many is more writes than SINGLEDEL is legal for, or an unknown number.
const many = 2

// mirrorCap is how many entries of a range memory holds at the most between
// two groups.
const mirrorCap = 1 << 16

// load reads the range if it is small.
func (m *mirror[K, V]) load(r pebble.Reader) error {
	m.held, m.whole = make(map[K]mirrored[V]), true
	lower, upper := keys.Range(m.prefix)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return storageError(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; valid = it.Next() {
		if len(m.held) == mirrorCap {
			m.whole = false
			return nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return storageError(err)
		}
		k, value, err := m.parse(it.Key(), v)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		m.held[k] = mirrored[V]{value: value, present: true, stored: many}
	}
	return storageError(it.Error())
}

// get returns an entry, the zero value if there is none. An error of the disk ends the shard.
func (m *mirror[K, V]) get(s *shard, k K) (v V, ok bool) {
	e := m.entry(s, k)
	return e.value, e.present
}

// put stores an entry.
func (m *mirror[K, V]) put(s *shard, k K, v V) {
	e := m.entry(s, k)
	e.value, e.present = v, true
	m.change(k, e)
}

// drop removes an entry, if there is one.
func (m *mirror[K, V]) drop(s *shard, k K) {
	if e := m.entry(s, k); e.present {
		var none V
		e.value, e.present = none, false
		m.change(k, e)
	}
}

// hasChanged reports whether the group changes an entry.
func (m *mirror[K, V]) hasChanged(k K) bool { return m.held[k].changed }

func (m *mirror[K, V]) change(k K, e mirrored[V]) {
	if !e.changed {
		e.changed = true
		m.changed = append(m.changed, k)
	}
	m.held[k] = e
}

// entry returns what is held of k, after reading it if need be.
func (m *mirror[K, V]) entry(s *shard, k K) mirrored[V] {
	e, ok := m.held[k]
	if ok || m.whole {
		return e
	}
	var err error
	if m.reader == nil {
		lower, upper := keys.Range(m.prefix)
		m.reader, err = s.store.db.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	}
	if err == nil {
		m.scratch = m.key(m.scratch[:0], k)
		if m.reader.SeekPrefixGE(m.scratch) {
			_, e.value, err = m.parse(m.reader.Key(), m.reader.Value())
			e.present, e.stored = true, many
		} else {
			err = m.reader.Error()
		}
	}
	if err != nil {
		s.broken = fmt.Errorf("%w: %w", ErrCorrupt, storageError(err))
	}
	m.held[k] = e
	return e
}

// close ends the reading of what was on disk before the group.
func (m *mirror[K, V]) close() {
	if m.reader != nil {
		_ = m.reader.Close() // its error is that of reader.Error
		m.reader = nil
	}
}

// seal adds to the group what it has changed, in the order of the keys.
func (m *mirror[K, V]) seal(g *group) {
	m.close()
	slices.SortFunc(m.changed, m.order)
	for _, k := range m.changed {
		e := m.held[k]
		m.scratch = m.key(m.scratch[:0], k)
		switch {
		case e.present:
			m.value = m.encode(e.value, m.value[:0])
			g.set(m.scratch, m.value)
			e.stored = min(e.stored+1, many)
		case e.stored == 1:
			g.singleDelete(m.scratch)
			e.stored = 0
		case e.stored == many:
			g.delete(m.scratch)
			e.stored = 0
		}
		if !e.present && m.whole {
			delete(m.held, k)
			continue
		}
		e.changed = false
		m.held[k] = e
	}
	m.changed = m.changed[:0]
}

// trim bounds the memory. REQUIRES: the group has persisted.
func (m *mirror[K, V]) trim() {
	if len(m.held) > mirrorCap {
		clear(m.held)
		m.whole = false
	}
}

// The mirrors of a shard, by hash of the idempotency key, by scope, and by ID.
type (
	uniqueMirror  = mirror[[keys.UniqueLen]byte, keys.UniqueValue]
	groupMirror   = mirror[uint64, keys.GroupValue]
	pendingMirror = mirror[ID, uint64]
)

func newUniqueMirror() uniqueMirror {
	return uniqueMirror{
		prefix: keys.Unique, key: keys.AppendHashed, encode: keys.UniqueValue.Append,
		order: func(a, b [keys.UniqueLen]byte) int { return bytes.Compare(a[:], b[:]) },
		parse: func(key, value []byte) (k [keys.UniqueLen]byte, v keys.UniqueValue, err error) {
			if k, err = keys.ParseHashed(key); err == nil {
				v, err = keys.ParseUnique(value)
			}
			return k, v, err
		},
	}
}

func newGroupMirror() groupMirror {
	return groupMirror{
		prefix: keys.Group, key: keys.AppendScope, encode: keys.GroupValue.Append, order: cmp.Compare[uint64],
		parse: func(key, value []byte) (k uint64, v keys.GroupValue, err error) {
			if k, err = keys.ParseScope(key); err == nil {
				v, err = keys.ParseGroup(value)
			}
			return k, v, err
		},
	}
}

func newPendingMirror() pendingMirror {
	return pendingMirror{
		prefix: keys.Pending,
		key:    func(dst []byte, id ID) []byte { return keys.AppendByID(dst, keys.Pending, id) },
		encode: func(n uint64, dst []byte) []byte { return keys.AppendNumber(dst, n) },
		order:  func(a, b ID) int { return bytes.Compare(a[:], b[:]) },
		parse: func(key, value []byte) (k ID, n uint64, err error) {
			if k, err = keys.ParseByID(key); err == nil {
				n, err = keys.ParseNumber(value)
			}
			return k, n, err
		},
	}
}
