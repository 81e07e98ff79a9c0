package store

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/cockroachdb/pebble/v2"
)

// Pebble looks for the place of a key in its memtable from the key inserted before it. So a batch
// in the order of its keys costs a third to two thirds of a batch with scattered keys. The writes
// of the hot path are in this order already. Operations that move tasks write to several ranges in
// turn: their batch is sorted.

// sortBytes limits the batches that are sorted.
const sortBytes = 2 << 20

// batchOrder sorts batches. It keeps its memory for the next batch.
type batchOrder struct {
	ranges  []batchEntry // deletions of ranges; the values are their ends
	entries []batchEntry // the entries after the ranges
	order   []batchPlace
	sorted  *pebble.Batch
}

type batchEntry struct {
	key, value []byte
	kind       pebble.InternalKeyKind
}

// batchPlace is an entry of the batch while it is sorted.
type batchPlace struct {
	head uint64 // first bytes of the key after the byte of its range
	at   int32
}

// sort returns a batch with the entries of b in the order of their keys; entries of one key keep
// their order. It returns b itself if b cannot be sorted; otherwise it keeps b for the next call.
func (o *batchOrder) sort(db *pebble.DB, b *pebble.Batch) *pebble.Batch {
	if b.Len() > sortBytes || !o.read(b) {
		return b
	}
	o.arrange()
	if o.sorted == nil {
		o.sorted = db.NewBatch()
	}
	sorted := o.sorted
	for i := range o.ranges {
		// DeleteRange and Finish fail for indexed batches only.
		_ = sorted.DeleteRange(o.ranges[i].key, o.ranges[i].value, nil)
	}
	for _, p := range o.order {
		e := &o.entries[p.at]
		var op *pebble.DeferredBatchOp
		switch e.kind {
		case pebble.InternalKeyKindSet:
			op = sorted.SetDeferred(len(e.key), len(e.value))
			copy(op.Value, e.value)
		case pebble.InternalKeyKindDelete:
			op = sorted.DeleteDeferred(len(e.key))
		default:
			op = sorted.SingleDeleteDeferred(len(e.key))
		}
		copy(op.Key, e.key)
		_ = op.Finish()
	}
	b.Reset()
	o.sorted = b
	return sorted
}

// read reads the entries of a batch. It returns false if they cannot be sorted: the deletion of a
// range concerns the entries before it.
func (o *batchOrder) read(b *pebble.Batch) bool {
	o.ranges, o.entries = o.ranges[:0], o.entries[:0]
	for r := b.Reader(); ; {
		kind, key, value, ok, err := r.Next()
		if err != nil || !ok {
			return err == nil
		}
		switch kind {
		case pebble.InternalKeyKindSet, pebble.InternalKeyKindDelete, pebble.InternalKeyKindSingleDelete:
			o.entries = append(o.entries, batchEntry{key, value, kind})
		case pebble.InternalKeyKindRangeDelete:
			if len(o.entries) > 0 {
				return false
			}
			o.ranges = append(o.ranges, batchEntry{key, value, kind})
		default:
			return false
		}
	}
}

// arrange sorts the entries, first by range. Within a range, most are in order already.
func (o *batchOrder) arrange() {
	var ends [256]int32
	for i := range o.entries {
		ends[o.entries[i].key[0]]++
	}
	for i, sum := 0, int32(0); i < len(ends); i++ {
		sum, ends[i] = sum+ends[i], sum
	}
	o.order = slices.Grow(o.order[:0], len(o.entries))[:len(o.entries)]
	for i := range o.entries {
		key := o.entries[i].key
		end := &ends[key[0]] // end of the placed entries of the range
		o.order[*end] = batchPlace{headOf(key[1:]), int32(i)}
		*end++
	}
	from := int32(0)
	for _, end := range ends {
		if part := o.order[from:end]; !slices.IsSortedFunc(part, o.compare) {
			slices.SortFunc(part, o.compare)
		}
		from = end
	}
}

func (o *batchOrder) compare(x, y batchPlace) int {
	if x.head != y.head {
		return cmp.Compare(x.head, y.head)
	}
	return cmp.Or(bytes.Compare(o.entries[x.at].key, o.entries[y.at].key), cmp.Compare(x.at, y.at))
}

// headOf returns the first eight bytes as a number, in the same order; missing bytes count as zero.
func headOf(b []byte) uint64 {
	if len(b) >= 8 {
		return binary.BigEndian.Uint64(b)
	}
	var head [8]byte
	copy(head[:], b)
	return binary.BigEndian.Uint64(head[:])
}
