package engine

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/fingerprint"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// writeBackCache holds small entries of a range in memory: all of them while they are few, and some
// when they are many. An entry that it does not hold is then read from disk, unless the
// fingerprints of all entries say that it does not exist. Only the shard's owner uses it; changes
// are written once for each group and entry.
//
// Invariant: an entry that the group has changed is held until the group has persisted, so that no
// read misses a change that is not on disk yet.
//
// Invariant: the fingerprints are those of the entries with keys before listed, as they are on disk
// and as the group changes them. After Open the range is listed in pieces, before the group changes
// anything.
type writeBackCache[K comparable, V any] struct {
	prefix byte
	key    func([]byte, K) []byte
	parse  func(key, value []byte) (K, V, error)
	encode func(V, []byte) []byte
	order  func(a, b K) int // that of the keys

	held    map[K]cacheEntry[V]
	whole   bool // an entry that is not held does not exist
	changed []K  // in this group

	prints fingerprint.Multiset
	listed K    // the first key that is not listed yet
	all    bool // every key is listed
	// fingerprints take more than there is room for: there are none until the range is loaded again
	tooMany    bool
	mostPrints int // bytes of fingerprints; 0: printsCap

	reader         *pebble.Iterator // of disk as it was before the group; nil until it is needed
	scratch, value []byte
	salted         []byte // the salt of fingerprints, and the key of the last one
}

type cacheEntry[V any] struct {
	value   V
	present bool
	stored  uint8 // how often the key was written since it last did not exist; stops at many
	changed bool
}

// many means more writes than SINGLEDEL allows, or an unknown number.
const many = 2

// cacheBytes is how many bytes memory holds of a range at most between two groups, not counting the
// overhead of the map: 65,536 idempotency keys, 112,347 groups.
const cacheBytes = 3 << 20

// most is cacheBytes in entries.
func (m *writeBackCache[K, V]) most() int {
	var k K
	var e cacheEntry[V]
	return cacheBytes / int(unsafe.Sizeof(k)+unsafe.Sizeof(e))
}

// printsCap limits the fingerprints of a range, in bytes: those of about ten million entries.
const printsCap = 32 << 20

// anyCache is a cache of any entries.
type anyCache interface {
	salt(seed [32]byte)
	load(r pebble.Reader) error
	listIsDue() bool
	list(in *round) error
	close()
	seal(g *commitGroup)
	trim()
}

// caches returns all caches, in the order of their writes in a group.
func (ti *ties) caches() [5]anyCache {
	return [...]anyCache{&ti.uniques, &ti.turns, &ti.pending, &ti.notices.ends, &ti.pins.counts}
}

// load reads the range if it is small.
func (m *writeBackCache[K, V]) load(r pebble.Reader) error {
	m.held, m.whole = make(map[K]cacheEntry[V]), true
	m.forgetPrints()
	lower, upper := keys.Range(m.prefix)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	for valid := it.First(); valid; valid = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return store.Error(err)
		}
		k, value, err := m.parse(it.Key(), v)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if len(m.held) == m.most() {
			m.whole, m.listed = false, k
			return nil
		}
		m.held[k] = cacheEntry[V]{value: value, present: true, stored: many}
		m.prints.Add(m.print(k))
	}
	m.all = true
	return store.Error(it.Error())
}

// print is the fingerprint of a key. It depends on the seed of the shard, so that users cannot
// choose keys with equal fingerprints.
func (m *writeBackCache[K, V]) print(k K) uint64 {
	m.salted = m.key(m.salted[:saltLen], k)
	return xxhash.Sum64(m.salted)
}

// saltLen is how much of the seed goes into a fingerprint, in bytes.
const saltLen = 8

// salt sets the seed of the fingerprints. REQUIRES: there are none yet.
func (m *writeBackCache[K, V]) salt(seed [32]byte) {
	m.salted = append(m.salted[:0], seed[:saltLen]...)
}

// isListed reports whether the fingerprints cover a key.
func (m *writeBackCache[K, V]) isListed(k K) bool { return m.all || m.order(k, m.listed) < 0 }

func (m *writeBackCache[K, V]) forgetPrints() {
	var first K
	m.prints, m.listed, m.all, m.tooMany = fingerprint.Multiset{}, first, false, false
}

func (m *writeBackCache[K, V]) listIsDue() bool { return !m.all && !m.tooMany }

// list adds the fingerprints of more keys. REQUIRES: the group has changed nothing.
func (m *writeBackCache[K, V]) list(in *round) error {
	_, upper := keys.Range(m.prefix)
	from := m.key(nil, m.listed)
	m.all = true // unless it ends early
	return in.walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		k, _, err := m.parse(it.Key(), v)
		if err != nil {
			return false, err
		}
		if in.Spent() {
			m.all, m.listed = false, k
			return false, nil
		}
		return m.note(k), nil
	})
}

// note adds the fingerprint of a key. It returns false if there are too many.
func (m *writeBackCache[K, V]) note(k K) bool {
	m.prints.Add(m.print(k))
	if m.prints.Bytes() > cmp.Or(m.mostPrints, printsCap) {
		m.forgetPrints()
		m.tooMany = true
	}
	return !m.tooMany
}

// listKeys lists more keys of all caches.
func (ti *ties) listKeys() {
	for _, m := range ti.caches() {
		if m.listIsDue() && ti.Broken == nil {
			ti.Broken = m.list(ti.round)
		}
	}
}

func (ti *ties) listKeysIsDue() bool {
	for _, m := range ti.caches() {
		if m.listIsDue() {
			return true
		}
	}
	return false
}

// get returns an entry, or the zero value if there is none. A disk error makes the shard fail.
func (m *writeBackCache[K, V]) get(in *round, k K) (v V, ok bool) {
	e := m.entry(in, k)
	return e.value, e.present
}

// peek is get without reading disk; known is false if only disk could tell.
func (m *writeBackCache[K, V]) peek(k K) (v V, known bool) {
	e, ok := m.held[k]
	return e.value, ok || m.isAbsent(k)
}

// fetch reads the given entries that memory does not know, in the order of their keys. Zero keys
// are skipped.
func (m *writeBackCache[K, V]) fetch(in *round, ks []K) {
	var none K
	ks = slices.DeleteFunc(ks, func(k K) bool {
		_, known := m.peek(k)
		return k == none || known
	})
	slices.SortFunc(ks, m.order)
	for _, k := range ks {
		m.entry(in, k)
	}
}

// put stores an entry.
func (m *writeBackCache[K, V]) put(in *round, k K, v V) {
	e := m.entry(in, k)
	if !e.present && m.isListed(k) {
		m.note(k)
	}
	e.value, e.present = v, true
	m.change(k, e)
}

// drop removes an entry, if there is one.
func (m *writeBackCache[K, V]) drop(in *round, k K) { m.remove(k, m.entry(in, k)) }

// dropBlind removes an entry that is known to exist, without reading it.
func (m *writeBackCache[K, V]) dropBlind(k K) {
	e, ok := m.held[k]
	if !ok {
		e.present, e.stored = !m.isAbsent(k), many
	}
	m.remove(k, e)
}

func (m *writeBackCache[K, V]) remove(k K, e cacheEntry[V]) {
	if !e.present {
		return
	}
	if m.isListed(k) {
		m.prints.Remove(m.print(k))
	}
	var none V
	e.value, e.present = none, false
	m.change(k, e)
}

// isAbsent reports whether an entry that is not held is known not to exist.
func (m *writeBackCache[K, V]) isAbsent(k K) bool {
	return m.whole || m.isListed(k) && !m.prints.Has(m.print(k))
}

// hasChanged reports whether the group changes an entry.
func (m *writeBackCache[K, V]) hasChanged(k K) bool { return m.held[k].changed }

func (m *writeBackCache[K, V]) change(k K, e cacheEntry[V]) {
	if !e.changed {
		e.changed = true
		m.changed = append(m.changed, k)
	}
	m.held[k] = e
}

// entry returns the held entry of k, after reading it if necessary.
func (m *writeBackCache[K, V]) entry(in *round, k K) cacheEntry[V] {
	e, ok := m.held[k]
	if ok || m.isAbsent(k) {
		return e
	}
	var err error
	if m.reader == nil {
		lower, upper := keys.Range(m.prefix)
		m.reader, err = in.Store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	}
	if err == nil {
		m.scratch = m.key(m.scratch[:0], k)
		if m.reader.SeekPrefixGE(m.scratch) {
			in.noteRead(len(m.reader.Value()))
			_, e.value, err = m.parse(m.reader.Key(), m.reader.Value())
			e.present, e.stored = true, many
		} else {
			in.noteRead(0)
			err = m.reader.Error()
		}
	}
	if err != nil {
		in.Broken = fmt.Errorf("%w: %w", base.ErrCorrupt, store.Error(err))
	}
	m.held[k] = e
	return e
}

// close closes the reader of disk as it was before the group.
func (m *writeBackCache[K, V]) close() {
	if m.reader != nil {
		_ = m.reader.Close() // its error is that of reader.Error
		m.reader = nil
	}
}

// seal adds the changed entries to the group, in the order of their keys.
func (m *writeBackCache[K, V]) seal(g *commitGroup) {
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

// trim limits the memory. REQUIRES: the group has persisted.
func (m *writeBackCache[K, V]) trim() {
	for k := range m.held { // in any order
		if len(m.held) <= m.most() {
			return
		}
		delete(m.held, k)
		m.whole = false
	}
}

// The caches of a shard, by hash of the idempotency key, by scope, and by ID.
type (
	uniqueCache  = writeBackCache[[keys.UniqueLen]byte, keys.UniqueValue]
	turnCache    = writeBackCache[uint64, keys.GroupValue]
	pendingCache = writeBackCache[keys.ID, uint64]
)

func newUniqueCache() uniqueCache {
	return uniqueCache{
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

func newTurnCache() turnCache {
	return turnCache{
		prefix: keys.Group, key: keys.AppendScope, encode: keys.GroupValue.Append, order: cmp.Compare[uint64],
		parse: func(key, value []byte) (k uint64, v keys.GroupValue, err error) {
			if k, err = keys.ParseScope(key); err == nil {
				v, err = keys.ParseGroup(value)
			}
			return k, v, err
		},
	}
}

func newPendingCache() pendingCache {
	return pendingCache{
		prefix: keys.Pending,
		key:    func(dst []byte, id keys.ID) []byte { return keys.AppendByID(dst, keys.Pending, id) },
		encode: func(n uint64, dst []byte) []byte { return keys.AppendNumber(dst, n) },
		order:  func(a, b keys.ID) int { return bytes.Compare(a[:], b[:]) },
		parse: func(key, value []byte) (k keys.ID, n uint64, err error) {
			if k, err = keys.ParseByID(key); err == nil {
				n, err = keys.ParseNumber(value)
			}
			return k, n, err
		},
	}
}
