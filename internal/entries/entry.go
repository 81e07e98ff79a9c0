package entries

import (
	"encoding/binary"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Entry is a group of operations in the log:
//
//	length  4 bytes  of the batch
//	batch            Pebble's representation; may be empty
//	broadcast        what callers and subscribers on all nodes learn
type Entry struct {
	Batch     []byte
	Broadcast []byte
}

const lengthLen = 4

// Size returns the number of bytes that Append appends.
func (e *Entry) Size() int { return lengthLen + len(e.Batch) + len(e.Broadcast) }

// Append appends the entry, for ParseEntry.
func (e *Entry) Append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(e.Batch)))
	return append(append(dst, e.Batch...), e.Broadcast...)
}

// ParseEntry takes an entry apart. The parts alias b.
func ParseEntry(b []byte) (Entry, error) {
	if len(b) < lengthLen {
		return Entry{}, fmt.Errorf("%w: log entry of %d bytes", base.ErrCorrupt, len(b))
	}
	n := uint64(binary.BigEndian.Uint32(b))
	if b = b[lengthLen:]; n > uint64(len(b)) {
		return Entry{}, fmt.Errorf("%w: log entry with a batch of %d bytes in %d", base.ErrCorrupt, n, len(b))
	}
	return Entry{Batch: b[:n], Broadcast: b[n:]}, nil
}

// Writer writes the batches of entries into the store of a replica.
//
// Invariant: the index and term of the last entry that a store has applied are written in the batch
// of that entry, so that none is applied twice, whatever Raft replays, and none of another history
// is taken for it; keys that are written once and removed by SINGLEDEL rely on it.
type Writer struct {
	// Adopt is called with an identity of the shard before it is stored.
	Adopt func(identity []byte) error
	// Answered is called with the session of the node named Node before it is stored.
	Node     string
	Answered func(session []byte) error

	batch *pebble.Batch // of the store; nil: none yet
	buf   []byte        // memory of batch
	last  uint64        // index of the last entry; only with base.Invariants
}

// Reset prepares for another store.
func (w *Writer) Reset() { w.batch, w.buf, w.last = nil, nil, 0 }

// largeBatch is below half of the smallest MemTableBytes: Pebble keeps the memory of larger batches
// until they are flushed.
const largeBatch = 64 << 10

// Write commits the batch of an entry with its index and term. clock reports whether the batch
// stores the clock of leases.
func (w *Writer) Write(st *store.Store, e *Entry, index, term uint64) (clock bool, err error) {
	if base.Invariants && index <= w.last {
		base.Violated("entry %d is applied after entry %d", index, w.last)
	}
	large := len(e.Batch) > largeBatch
	if w.batch == nil || large {
		w.batch, w.buf = st.DB().NewBatch(), nil
	}
	b := w.batch
	b.Reset()
	var has contents
	if len(e.Batch) > 0 {
		// Pebble writes into the bytes of a batch, and those of the log are
		// still on their way to other nodes.
		w.buf = append(w.buf[:0], e.Batch...)
		if has, err = setRepr(b, w.buf, w.Node); err != nil {
			return false, err
		}
	}
	if has.identity != nil {
		if err := w.Adopt(has.identity); err != nil {
			return false, err
		}
	}
	if has.session != nil {
		if err := w.Answered(has.session); err != nil {
			return false, err
		}
	}
	var key [1]byte
	op := b.SetDeferred(len(key), keys.AppliedLen)
	op.Key[0] = keys.Applied
	keys.PutApplied(op.Value, index, term)
	if err := op.Finish(); err != nil {
		return false, store.Error(err)
	}
	if err := st.Commit(b); err != nil {
		return false, err
	}
	if base.Invariants {
		w.last = index
	}
	if has.ranged {
		st.DeletedRanges(has.trimmed)
	}
	w.buf = b.Repr()[:0]
	if large {
		w.batch = nil
	}
	return has.clock, nil
}

// contents describes a batch for the replica.
type contents struct {
	ranged  bool // it deletes by range
	trimmed bool // consumed parts of lanes are among the ranges
	clock   bool // it stores the clock of leases
	// identity is that of the shard, which it stores; nil: it does not. It aliases the batch.
	identity []byte
	session  []byte // likewise, that of the node
}

// setRepr makes a batch of its bytes, after a check: malformed ones would make Pebble panic in the
// middle of a commit.
func setRepr(b *pebble.Batch, repr []byte, node string) (has contents, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: batch: %v", base.ErrCorrupt, p)
		}
	}()
	if err := b.SetRepr(repr); err != nil {
		return contents{}, fmt.Errorf("%w: batch: %w", base.ErrCorrupt, err)
	}
	n, r := uint32(0), b.Reader()
	for {
		kind, key, value, ok, err := r.Next()
		if err != nil {
			return contents{}, fmt.Errorf("%w: batch: %w", base.ErrCorrupt, err)
		}
		if !ok {
			break
		}
		switch kind {
		case pebble.InternalKeyKindSet, pebble.InternalKeyKindDelete, pebble.InternalKeyKindSingleDelete:
			has.clock = has.clock || len(key) > 0 && key[0] == keys.LeaseTime
			if kind == pebble.InternalKeyKindSet && len(key) > 0 {
				switch {
				case key[0] == keys.Meta:
					has.identity = value
				case key[0] == keys.Session && string(key[1:]) == node:
					has.session = value
				}
			}
			n++
		case pebble.InternalKeyKindRangeDelete:
			has.ranged = true
			has.trimmed = has.trimmed || len(key) > 0 && (key[0] == keys.Task || key[0] == keys.Scheduled)
			n++
		default:
			return contents{}, fmt.Errorf("%w: batch: %s", base.ErrCorrupt, kind)
		}
	}
	if n != b.Count() {
		return contents{}, fmt.Errorf("%w: batch: %d operations, it says %d", base.ErrCorrupt, n, b.Count())
	}
	return has, nil
}
