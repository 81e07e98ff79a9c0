package store

import (
	"bytes"
	"math/rand/v2"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
)

// Records of one kind have very different sizes: a table with deletions of small tasks may lie
// above large live ones. So what its deletions delete is sampled: some of their keys, all with
// equal probability, are looked up in the tables below.

// sampleSize limits one sample.
type sampleSize struct {
	keys     int    // keys of a table
	lookups  int    // lookups of all tables, in each of the levels below
	bytes    uint64 // size of the tables that are read for keys, except for the first
	resample bool   // keys that were sampled before are not used again
}

// A usual sample may miss large records that a few of many deletions delete. So it is not relied on
// for long: a thorough one follows when the average of all records suggests more dead bytes.
var (
	usualSample    = sampleSize{keys: 64, lookups: 1024, bytes: 16 << 20}
	thoroughSample = sampleSize{keys: 1024, lookups: 16 << 10, bytes: 1 << 30, resample: true}
)

// sample is keys of deletions in one table, in random order.
type sample [][]byte

// deadSizes estimates how many bytes in tables the deletion of a key deletes.
type deadSizes struct {
	tables map[uint64]uint64 // by the number of the table that has the deletions
	kinds  map[byte]uint64   // for all that were sampled, by the first byte of their keys
}

// of returns the estimate for a table, or rest if nothing is known of it.
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

// deleting is a table that has deletions.
type deleting struct {
	*pebble.SSTableInfo
	level int
	keys  sample
}

// sample estimates the bytes that the deletions in tables delete. The keys of a table are read
// once, unless size.resample is set.
func (r *reclaimer) sample(levels [][]pebble.SSTableInfo, size sampleSize) *deadSizes {
	var all []deleting
	for n, level := range levels {
		for i := range level {
			if level[i].TableStats.NumDeletions > 0 {
				all = append(all, deleting{SSTableInfo: &level[i], level: n})
			}
		}
	}
	rand.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	r.takeKeys(all, size)

	each := max(2, min(size.keys, size.lookups/max(1, len(all))))
	lookups := make(map[*pebble.SSTableInfo][]sought) // by the table to look in
	left := size.lookups
	for i := range all {
		t := &all[i]
		t.keys = t.keys[:min(each, left, len(t.keys))]
		left -= len(t.keys)
		for _, key := range t.keys {
			lowerTables(levels, t.level, t.SSTableInfo, &deadRange{first: key, last: key}, func(o *pebble.SSTableInfo) {
				lookups[o] = append(lookups[o], sought{key, t.SSTableInfo})
			})
		}
	}
	found := make(map[*pebble.SSTableInfo]uint64)
	for o, keys := range lookups {
		if r.ctx.Err() != nil {
			break
		}
		r.store.sizesIn(o, keys, found)
	}
	d := &deadSizes{tables: make(map[uint64]uint64), kinds: make(map[byte]uint64)}
	counts := make(map[byte]uint64)
	for i := range all {
		t := &all[i]
		if n := uint64(len(t.keys)); n > 0 {
			d.tables[numberOf(t.SSTableInfo)] = found[t.SSTableInfo] / n
			kind := t.Smallest.UserKey[0]
			counts[kind] += n
			d.kinds[kind] += found[t.SSTableInfo]
		}
	}
	for kind, n := range counts {
		d.kinds[kind] /= n
	}
	r.sizes.Store(d)
	return d
}

// takeKeys gives tables their samples, if they are known or may be read.
func (r *reclaimer) takeKeys(all []deleting, size sampleSize) {
	before, left := r.sampled, size.bytes
	r.sampled = make(map[uint64]sample, len(all))
	for i := range all {
		t := &all[i]
		keys, ok := before[numberOf(t.SSTableInfo)]
		if (!ok || size.resample) && (t.Size <= left || left == size.bytes) && r.ctx.Err() == nil {
			left -= min(left, t.Size)
			keys, ok = r.store.sampleOf(t.SSTableInfo, size.keys)
		}
		if ok {
			t.keys = keys
			r.sampled[numberOf(t.SSTableInfo)] = keys[:min(len(keys), usualSample.keys):min(len(keys), usualSample.keys)]
		}
	}
}

// sampleOf reads keys of deletions in a table, unless it was just removed, or cannot be read.
func (st *Store) sampleOf(t *pebble.SSTableInfo, most int) (keys sample, ok bool) {
	err := st.readTable(t, func(it sstable.Iterator) {
		seen := 0
		for kv := it.First(); kv != nil; kv = it.Next() {
			if !isDeletion(kv.K.Kind()) {
				continue
			}
			seen++
			if len(keys) < most {
				keys = append(keys, bytes.Clone(kv.K.UserKey))
			} else if i := rand.IntN(seen); i < most {
				keys[i] = append(keys[i][:0], kv.K.UserKey...)
			}
		}
	})
	// so that each part of them is a sample
	rand.Shuffle(len(keys), func(i, k int) { keys[i], keys[k] = keys[k], keys[i] })
	return keys, err == nil
}

// sizesIn adds the bytes of records in a table that other tables delete, by those other tables.
func (st *Store) sizesIn(o *pebble.SSTableInfo, all []sought, sum map[*pebble.SSTableInfo]uint64) {
	slices.SortFunc(all, func(a, b sought) int { return bytes.Compare(a.key, b.key) })
	// the estimate must not exceed the size of the table
	raw := max(1, o.TableStats.RawKeySize+o.TableStats.RawValueSize, o.Size)
	// a table that was just removed counts nothing
	_ = st.readTable(o, func(it sstable.Iterator) {
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

// readTable reads a table without Pebble's store.
func (st *Store) readTable(t *pebble.SSTableInfo, read func(sstable.Iterator)) error {
	return Protect(func() error {
		r, err := OpenTable(st.fs, st.pathOf(t))
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
