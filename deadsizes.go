package codeq

import (
	"bytes"
	"math/rand/v2"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
)

// Records of one kind are of very different sizes: a table whose deletions are of small tasks may lie above
// large ones that are alive. What its deletions delete is therefore sampled: some of their keys, each as probable
// as any other, are looked for in the tables below.

const (
	sampleKeys    = 16       // of a table, at the most
	sampleLookups = 256      // of one look, about
	sampleBytes   = 16 << 20 // in tables of which keys are taken in one look
)

// sample is keys of deletions in one table, in any order.
type sample [][]byte

// deadSizes is what a deletion of a key deletes, in bytes in tables, by and large.
type deadSizes struct {
	tables map[uint64]uint64 // by the number of the table that has the deletions
	kinds  map[byte]uint64   // of all that were sampled, by the first byte of their keys
}

// of estimates it for a table; rest is for those of which nothing is known.
func (d *deadSizes) of(t *pebble.SSTableInfo, rest uint64) uint64 {
	if d == nil {
		return rest
	}
	if size, ok := d.tables[numberOf(t)]; ok {
		return size
	}
	if size, ok := d.kinds[t.Smallest.UserKey[0]]; ok {
		return size
	}
	return rest
}

func numberOf(t *pebble.SSTableInfo) uint64 { return uint64(t.BackingSSTNum) }

// sought is a key that a table deletes.
type sought struct {
	key   []byte
	table *pebble.SSTableInfo
}

// sample estimates what the deletions in tables delete. It reads each table that has deletions once, at most
// sampleBytes of them in a call.
func (r *reclaimer) sample(levels [][]pebble.SSTableInfo) *deadSizes {
	var deleting []*pebble.SSTableInfo
	for _, level := range levels {
		for i := range level {
			if level[i].TableStats.NumDeletions > 0 {
				deleting = append(deleting, &level[i])
			}
		}
	}
	before, left := r.sampled, uint64(sampleBytes)
	r.sampled = make(map[uint64]sample, len(deleting))
	for _, i := range rand.Perm(len(deleting)) {
		t := deleting[i]
		keys, ok := before[numberOf(t)]
		if !ok && t.Size <= left {
			left -= t.Size
			keys, ok = r.store.sampleOf(t)
		}
		if ok {
			r.sampled[numberOf(t)] = keys
		}
	}

	each := max(2, min(sampleKeys, sampleLookups/max(1, len(deleting))))
	lookups := make(map[*pebble.SSTableInfo][]sought) // by the table in which to look
	for n, level := range levels {
		for i := range level {
			t := &level[i]
			keys := r.sampled[numberOf(t)]
			for _, key := range keys[:min(each, len(keys))] {
				lowerTables(levels, n, t, &deadRange{first: key, last: key}, func(o *pebble.SSTableInfo) {
					lookups[o] = append(lookups[o], sought{key, t})
				})
			}
		}
	}
	found := make(map[*pebble.SSTableInfo]uint64)
	for o, all := range lookups {
		r.store.sizesIn(o, all, found)
	}
	d := &deadSizes{tables: make(map[uint64]uint64), kinds: make(map[byte]uint64)}
	counts := make(map[byte]uint64)
	for _, t := range deleting {
		if keys, ok := r.sampled[numberOf(t)]; ok {
			n := uint64(min(each, len(keys)))
			d.tables[numberOf(t)] = found[t] / max(1, n)
			kind := t.Smallest.UserKey[0]
			counts[kind] += n
			d.kinds[kind] += found[t]
		}
	}
	for kind, n := range counts {
		if n == 0 {
			delete(d.kinds, kind)
			continue
		}
		d.kinds[kind] /= n
	}
	r.sizes.Store(d)
	return d
}

// sampleOf reads the keys of deletions in a table, unless it has just gone, or cannot be read.
func (st *store) sampleOf(t *pebble.SSTableInfo) (keys sample, ok bool) {
	err := st.readTable(t, func(it sstable.Iterator) {
		seen := 0
		for kv := it.First(); kv != nil; kv = it.Next() {
			if !isDeletion(kv.K.Kind()) {
				continue
			}
			seen++
			if len(keys) < sampleKeys {
				keys = append(keys, bytes.Clone(kv.K.UserKey))
			} else if i := rand.IntN(seen); i < sampleKeys {
				keys[i] = append(keys[i][:0], kv.K.UserKey...)
			}
		}
	})
	rand.Shuffle(len(keys), func(i, k int) { keys[i], keys[k] = keys[k], keys[i] }) // each part of them is a sample
	return keys, err == nil
}

// sizesIn adds the bytes that a table takes for records of keys that other tables delete, by those.
func (st *store) sizesIn(o *pebble.SSTableInfo, all []sought, sum map[*pebble.SSTableInfo]uint64) {
	slices.SortFunc(all, func(a, b sought) int { return bytes.Compare(a.key, b.key) })
	raw := max(1, o.TableStats.RawKeySize+o.TableStats.RawValueSize, o.Size) // it is not larger than what is in it
	_ = st.readTable(o, func(it sstable.Iterator) {                          // what has just gone is nobody's
		for _, l := range all {
			for kv := it.SeekGE(l.key, 0); kv != nil && bytes.Equal(kv.K.UserKey, l.key); kv = it.Next() {
				if !isDeletion(kv.K.Kind()) {
					sum[l.table] += uint64(len(l.key)+kv.V.Len()) * o.Size / raw
				}
			}
		}
	})
}

func isDeletion(kind pebble.InternalKeyKind) bool {
	return kind == pebble.InternalKeyKindDelete || kind == pebble.InternalKeyKindSingleDelete || kind == pebble.InternalKeyKindDeleteSized
}

// readTable has a table read beside Pebble.
func (st *store) readTable(t *pebble.SSTableInfo, read func(sstable.Iterator)) error {
	return protect(func() error {
		r, err := openTable(st.fs, st.pathOf(t))
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }() // nothing was written
		it, err := r.NewIter(sstable.NoTransforms, nil, nil, sstable.AssertNoBlobHandles)
		if err != nil {
			return err
		}
		read(it)
		return it.Close()
	})
}
