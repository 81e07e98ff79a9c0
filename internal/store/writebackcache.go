package store

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/fingerprint"
	"codeq/internal/keys"
)

// WriteBackCache holds small entries of a range in memory: all of them while they are few, and some
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
type WriteBackCache[K comparable, V any] struct {
	Form[K, V]
	reader RangeReader

	held    map[K]cacheEntry[V]
	whole   bool // an entry that is not held does not exist
	changed []K  // in this group

	prints fingerprint.Multiset
	listed K    // the first key that is not listed yet
	all    bool // every key is listed
	// fingerprints take more than there is room for: there are none until the range is loaded again
	tooMany    bool
	mostPrints int // bytes of fingerprints

	scratch, value []byte
	salted         []byte // the salt of fingerprints, and the key of the last one
}

// Form is the form of the entries of a range.
type Form[K comparable, V any] struct {
	Prefix   byte
	Key      func(dst []byte, k K) []byte
	ParseKey func(key []byte) (K, error)
	Order    func(a, b K) int // that of the keys
	Append   func(v V, dst []byte) []byte
	Parse    func(value []byte) (V, error)
}

// parse reads an entry.
func (f *Form[K, V]) parse(key, value []byte) (k K, v V, err error) {
	if k, err = f.ParseKey(key); err == nil {
		v, err = f.Parse(value)
	}
	return k, v, err
}

// NewWriteBackCache returns a cache that is not loaded. The fingerprints depend on the seed of the
// shard, so that users cannot choose keys with equal ones.
func NewWriteBackCache[K comparable, V any](in *Reads, seed [32]byte, f Form[K, V]) WriteBackCache[K, V] {
	return WriteBackCache[K, V]{Form: f, reader: in.Range(f.Prefix), mostPrints: printsCap, salted: seed[:saltLen]}
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

// MostHeld returns cacheBytes in entries.
func MostHeld[K comparable, V any]() int {
	var k K
	var e cacheEntry[V]
	return cacheBytes / int(unsafe.Sizeof(k)+unsafe.Sizeof(e))
}

func (m *WriteBackCache[K, V]) most() int { return MostHeld[K, V]() }

// printsCap limits the fingerprints of a range, in bytes: those of about ten million entries.
const printsCap = 32 << 20

// Load reads the range if it is small.
func (m *WriteBackCache[K, V]) Load(r pebble.Reader) error {
	m.held, m.whole = make(map[K]cacheEntry[V]), true
	m.forgetPrints()
	m.all = true
	err := Scan(r, m.Prefix, func(key, value []byte) error {
		k, v, err := m.parse(key, value)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if len(m.held) == m.most() {
			m.whole, m.all, m.listed = false, false, k
			return errTooMany
		}
		m.held[k] = cacheEntry[V]{value: v, present: true, stored: many}
		m.prints.Add(m.print(k))
		return nil
	})
	if errors.Is(err, errTooMany) {
		return nil
	}
	return err
}

// errTooMany ends the load of a large range.
var errTooMany = errors.New("the range has more entries than memory holds")

// print is the fingerprint of a key.
func (m *WriteBackCache[K, V]) print(k K) uint64 {
	m.salted = m.Key(m.salted[:saltLen], k)
	return xxhash.Sum64(m.salted)
}

// saltLen is how much of the seed goes into a fingerprint, in bytes.
const saltLen = 8

// isListed reports whether the fingerprints cover a key.
func (m *WriteBackCache[K, V]) isListed(k K) bool { return m.all || m.Order(k, m.listed) < 0 }

func (m *WriteBackCache[K, V]) forgetPrints() {
	var first K
	m.prints, m.listed, m.all, m.tooMany = fingerprint.Multiset{}, first, false, false
}

// ListIsDue reports whether some keys are not listed.
func (m *WriteBackCache[K, V]) ListIsDue() bool { return !m.all && !m.tooMany }

// List adds the fingerprints of more keys, until spent returns true. REQUIRES: the group has
// changed nothing.
func (m *WriteBackCache[K, V]) List(spent func() bool) error {
	_, upper := keys.Range(m.Prefix)
	from := m.Key(nil, m.listed)
	m.all = true // unless it ends early
	return m.reader.in.Walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		k, err := m.ParseKey(it.Key())
		if err != nil {
			return false, err
		}
		if spent() {
			m.all, m.listed = false, k
			return false, nil
		}
		return m.addPrint(m.print(k)), nil
	})
}

// addPrint adds the fingerprint of a key. It returns false if there are too many.
func (m *WriteBackCache[K, V]) addPrint(print uint64) bool {
	m.prints.Add(print)
	if m.prints.Bytes() > m.mostPrints {
		m.forgetPrints()
		m.tooMany = true
	}
	return !m.tooMany
}

// Get returns an entry, or the zero value if there is none. A disk error makes the shard fail.
func (m *WriteBackCache[K, V]) Get(k K) (v V, ok bool) {
	e := m.entry(k)
	return e.value, e.present
}

// Peek is Get without reading disk; known is false if only disk could tell.
func (m *WriteBackCache[K, V]) Peek(k K) (v V, known bool) {
	e, ok := m.held[k]
	return e.value, ok || m.isAbsent(k)
}

// Fetch reads the given entries that memory does not know, in the order of their keys. Zero keys
// are skipped.
func (m *WriteBackCache[K, V]) Fetch(ks []K) {
	var none K
	ks = slices.DeleteFunc(ks, func(k K) bool {
		_, known := m.Peek(k)
		return k == none || known
	})
	slices.SortFunc(ks, m.Order)
	for _, k := range ks {
		m.entry(k)
	}
}

// Put stores an entry.
func (m *WriteBackCache[K, V]) Put(k K, v V) {
	e := m.entry(k)
	if !e.present && m.isListed(k) {
		m.addPrint(m.print(k))
	}
	e.value, e.present = v, true
	m.change(k, e)
}

// Drop removes an entry, if there is one.
func (m *WriteBackCache[K, V]) Drop(k K) { m.remove(k, m.entry(k)) }

// DropBlind removes an entry that is known to exist, without reading it.
func (m *WriteBackCache[K, V]) DropBlind(k K) {
	e, ok := m.held[k]
	if !ok {
		e.present, e.stored = !m.isAbsent(k), many
	}
	m.remove(k, e)
}

func (m *WriteBackCache[K, V]) remove(k K, e cacheEntry[V]) {
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
func (m *WriteBackCache[K, V]) isAbsent(k K) bool {
	return m.whole || m.isListed(k) && !m.prints.Has(m.print(k))
}

// HasChanged reports whether the group changes an entry.
func (m *WriteBackCache[K, V]) HasChanged(k K) bool { return m.held[k].changed }

func (m *WriteBackCache[K, V]) change(k K, e cacheEntry[V]) {
	if !e.changed {
		e.changed = true
		m.changed = append(m.changed, k)
	}
	m.held[k] = e
}

// entry returns the held entry of k, after reading it if necessary.
func (m *WriteBackCache[K, V]) entry(k K) cacheEntry[V] {
	e, ok := m.held[k]
	if ok || m.isAbsent(k) {
		return e
	}
	in := m.reader.in
	it, err := m.reader.Open()
	if err == nil {
		m.scratch = m.Key(m.scratch[:0], k)
		if it.SeekPrefixGE(m.scratch) {
			in.NoteRead(len(it.Value()))
			e.value, err = m.Parse(it.Value())
			e.present, e.stored = true, many
		} else {
			in.NoteRead(0)
			err = it.Error()
		}
	}
	if err != nil {
		in.Broken = fmt.Errorf("%w: %w", base.ErrCorrupt, Error(err))
	}
	m.held[k] = e
	return e
}

// Close closes the reader of disk as it was before the group.
func (m *WriteBackCache[K, V]) Close() { m.reader.Close() }

// Seal adds the changed entries to the group, in the order of their keys.
func (m *WriteBackCache[K, V]) Seal(w *Writes) {
	m.Close()
	slices.SortFunc(m.changed, m.Order)
	for _, k := range m.changed {
		e := m.held[k]
		m.scratch = m.Key(m.scratch[:0], k)
		switch {
		case e.present:
			m.value = m.Append(e.value, m.value[:0])
			w.Set(m.scratch, m.value)
			e.stored = min(e.stored+1, many)
		case e.stored == 1:
			w.SingleDelete(m.scratch)
			e.stored = 0
		case e.stored == many:
			w.Delete(m.scratch)
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

// Trim limits the memory. REQUIRES: the group has persisted.
func (m *WriteBackCache[K, V]) Trim() {
	for k := range m.held { // in any order
		if len(m.held) <= m.most() {
			return
		}
		delete(m.held, k)
		m.whole = false
	}
}

// CacheUsage counts the entries and fingerprints that a WriteBackCache holds.
type CacheUsage struct {
	Held    int
	Whole   bool // nothing else exists
	Listed  bool // all keys have fingerprints
	TooMany bool
	Prints  int
	Most    int // that are held between two groups, at most
}

// Usage returns the present CacheUsage.
func (m *WriteBackCache[K, V]) Usage() CacheUsage {
	return CacheUsage{len(m.held), m.whole, m.all, m.tooMany, m.prints.Len(), m.most()}
}

// HasChanges reports whether the group changes entries.
func (m *WriteBackCache[K, V]) HasChanges() bool { return len(m.changed) > 0 }

// Forget empties the cache, for tests: the next access to an entry reads disk, and keys are listed
// again. REQUIRES: the group has changed nothing.
func (m *WriteBackCache[K, V]) Forget() {
	clear(m.held)
	m.whole = false
	m.forgetPrints()
}

// Overflow adds more fingerprints than memory may hold, for tests: so many bytes from now on, or as
// many as ever for 0.
func (m *WriteBackCache[K, V]) Overflow(most int) {
	m.Forget()
	m.mostPrints = cmp.Or(most, printsCap)
	for n := uint32(0); m.addPrint(xxhash.Sum64(binary.BigEndian.AppendUint32(nil, n))); n++ {
	}
}

// Check compares the cache with disk, for tests, and returns the differences; what names an entry.
func (m *WriteBackCache[K, V]) Check(disk pebble.Reader, what string) (errs []error) {
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	onDisk := make(map[K][]byte)
	listed := 0
	if err := Scan(disk, m.Prefix, func(key, value []byte) error {
		k, _, err := m.parse(key, value)
		onDisk[k] = bytes.Clone(value)
		if m.isListed(k) {
			if listed++; !m.prints.Has(m.print(k)) {
				report("%s %v is on disk, and its fingerprint is missing", what, k)
			}
		}
		return err
	}); err != nil {
		report("%s: %w", what, err)
	}
	if m.HasChanges() {
		report("%d changes of %s are not stored", len(m.changed), what)
	}
	if n := m.prints.Len(); n != listed {
		report("%s: %d fingerprints of %d entries", what, n, listed)
	}
	for k, e := range m.held {
		v, ok := onDisk[k]
		if e.present != ok || (e.stored > 0) != ok || ok && !bytes.Equal(v, m.Append(e.value, nil)) || e.changed {
			report("%s %v is held as %+v, on disk: %t, %x", what, k, e, ok, v)
		}
		delete(onDisk, k)
	}
	if len(m.held) > m.most() {
		report("%d entries of %s are held", len(m.held), what)
	}
	if m.whole && len(onDisk) > 0 {
		report("%s is not held: %v", what, onDisk)
	}
	return errs
}
