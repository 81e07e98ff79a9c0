package store

import (
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// Writes collects the entries that a group writes.
type Writes struct {
	Batch  *pebble.Batch
	Ranged bool // something is deleted by range
	store  *Store
	order  batchOrder
	value  []byte // of counters, before it is copied
}

// NewWrites returns the writes of a store, without any.
func NewWrites(st *Store) Writes { return Writes{Batch: st.DB().NewBatch(), store: st} }

// Set stores an entry.
func (w *Writes) Set(key, value []byte) {
	op := w.Batch.SetDeferred(len(key), len(value))
	copy(op.Key, key)
	copy(op.Value, value)
	_ = op.Finish() // fails for indexed batches only
}

// Delete deletes an entry.
func (w *Writes) Delete(key []byte) {
	op := w.Batch.DeleteDeferred(len(key))
	copy(op.Key, key)
	_ = op.Finish()
}

// SingleDelete deletes an entry that was written once since it last did not exist.
func (w *Writes) SingleDelete(key []byte) {
	op := w.Batch.SingleDeleteDeferred(len(key))
	copy(op.Key, key)
	_ = op.Finish()
}

// DeleteRange deletes the keys from lower to before upper, at the cost of one entry.
func (w *Writes) DeleteRange(lower, upper []byte) {
	w.Ranged = true
	_ = w.Batch.DeleteRange(lower, upper, nil)
}

// SetTask stores the record of a task in its lane.
func (w *Writes) SetTask(lane uint32, since uint64, id keys.ID, rec []byte) {
	op := w.Batch.SetDeferred(keys.TaskLen(since), len(rec))
	keys.PutTask(op.Key, lane, since, id)
	copy(op.Value, rec)
	_ = op.Finish()
}

// DeleteTask deletes the record of a task from its lane. once: its key has been written once in the
// life of the store, and will not be written again, which makes SINGLEDEL legal.
func (w *Writes) DeleteTask(lane uint32, since uint64, id keys.ID, once bool) {
	var op *pebble.DeferredBatchOp
	if once {
		op = w.Batch.SingleDeleteDeferred(keys.TaskLen(since))
	} else {
		op = w.Batch.DeleteDeferred(keys.TaskLen(since))
	}
	keys.PutTask(op.Key, lane, since, id)
	_ = op.Finish()
}

// SetLeases stores a lease record.
func (w *Writes) SetLeases(seq uint64, value []byte) {
	op := w.Batch.SetDeferred(keys.LeaseLen, len(value))
	keys.PutLease(op.Key, seq)
	copy(op.Value, value)
	_ = op.Finish()
}

// DeleteLeases deletes a lease record, which was written once.
func (w *Writes) DeleteLeases(seq uint64) {
	op := w.Batch.SingleDeleteDeferred(keys.LeaseLen)
	keys.PutLease(op.Key, seq)
	_ = op.Finish()
}

// SetCounters stores the counters of a queue.
func (w *Writes) SetCounters(queue uint32, v *keys.CountersValue) {
	w.value = v.Append(w.value[:0])
	op := w.Batch.SetDeferred(1+4, len(w.value))
	keys.AppendNumbered(op.Key[:0], keys.Counters, queue)
	copy(op.Value, w.value)
	_ = op.Finish()
}

// Sort puts the entries in the order of their keys, if it can.
func (w *Writes) Sort() {
	entries := w.Batch.Count()
	w.Batch = w.order.sort(w.store.DB(), w.Batch)
	if base.Invariants && w.Batch.Count() != entries {
		base.Violated("%d entries are sorted, %d remain", entries, w.Batch.Count())
	}
}
