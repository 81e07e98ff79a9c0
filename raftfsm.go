package codeq

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/broadcast"
	"codeq/internal/cluster"
	"codeq/internal/conversion"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// With Options.Cluster, the batch of a group is an entry in the log of the
// shard's Raft group. The leader has decided everything that is in it, times
// and IDs included; to apply an entry is to write its bytes, on every replica
// the same ones in the same order.
//
// Invariant: the index and term of the last entry that a store has applied are written in
// the batch of that entry, so that none is applied twice, whatever Raft replays, and
// none of another history is taken for it; keys that are written once and removed by
// SINGLEDEL rely on it.

// entry is what a group of operations is in the log of Raft:
//
//	header  cluster.EntryHeader bytes
//	length  4 bytes  of the batch
//	batch            Pebble's representation; may be empty
//	broadcast        what callers and subscribers on all nodes learn
type entry struct {
	batch     []byte
	broadcast []byte
}

const lengthLen = 4

func (e *entry) append(dst []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(e.batch)))
	return append(append(dst, e.batch...), e.broadcast...)
}

// parseEntry takes an entry apart, which begins after the header. The parts alias b.
func parseEntry(b []byte) (entry, error) {
	if len(b) < lengthLen {
		return entry{}, fmt.Errorf("%w: log entry of %d bytes", ErrCorrupt, len(b))
	}
	n := uint64(binary.BigEndian.Uint32(b))
	if b = b[lengthLen:]; n > uint64(len(b)) {
		return entry{}, fmt.Errorf("%w: log entry with a batch of %d bytes in %d", ErrCorrupt, n, len(b))
	}
	return entry{batch: b[:n], broadcast: b[n:]}, nil
}

// stateMachine is a replica as the shard's Raft group knows it. It applies the log to the store.
type stateMachine struct {
	replica *replica
	adopt   func(identity []byte) error // replica.adoptFormat
	batch   *pebble.Batch               // nil after a restore
	buf     []byte                      // memory of batch
}

// Apply writes what an entry says, and tells this node of it.
func (m *stateMachine) Apply(l cluster.Entry) error {
	e, err := parseEntry(l.Data)
	if err != nil {
		return err
	}
	if err := m.write(&e, l.Index, l.Term); err != nil {
		return err
	}
	r := m.replica
	if l.Reclaim > 0 {
		r.store.Reclaim(l.Reclaim)
	}
	if !l.Replayed {
		if err := r.publish(e.broadcast); err != nil {
			r.node.log.Error("broadcast lost", "shard", r.index, "err", err)
		}
	}
	return nil
}

// write commits an entry's batch with its index and term. Pebble keeps the memory of a
// large batch until it is flushed.
func (m *stateMachine) write(e *entry, index, term uint64) error {
	st := m.replica.store
	large := len(e.batch) > largeBatch
	if m.batch == nil || large {
		m.batch, m.buf = st.DB().NewBatch(), nil
	}
	b := m.batch
	b.Reset()
	var has batchContents
	if len(e.batch) > 0 {
		// Pebble writes into the bytes of a batch, and those of the log are
		// still on their way to other nodes.
		m.buf = append(m.buf[:0], e.batch...)
		var err error
		if has, err = setRepr(b, m.buf); err != nil {
			return err
		}
	}
	if has.identity != nil {
		if err := m.adopt(has.identity); err != nil {
			return err
		}
	}
	var key [1]byte
	op := b.SetDeferred(len(key), keys.AppliedLen)
	op.Key[0] = keys.Applied
	keys.PutApplied(op.Value, index, term)
	if err := op.Finish(); err != nil {
		return store.Error(err)
	}
	if err := st.Commit(b); err != nil {
		return err
	}
	if has.ranged {
		st.DeletedRanges(has.trimmed)
	}
	if has.clock {
		m.replica.noteClock()
	}
	m.buf = b.Repr()[:0]
	if large {
		m.batch = nil
	}
	return nil
}

// batchContents is what the replica has to know of a batch.
type batchContents struct {
	ranged  bool // it deletes by range
	trimmed bool // and so what was consumed
	clock   bool // it stores the clock of leases
	// identity is that of the shard, which it stores; nil: it does not. It aliases the batch.
	identity []byte
}

// setRepr lets a batch consist of these bytes, if they are one: Pebble panics in the middle of a
// commit if they are not.
func setRepr(b *pebble.Batch, repr []byte) (has batchContents, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: batch: %v", ErrCorrupt, p)
		}
	}()
	if err := b.SetRepr(repr); err != nil {
		return batchContents{}, fmt.Errorf("%w: batch: %w", ErrCorrupt, err)
	}
	n, r := uint32(0), b.Reader()
	for {
		kind, key, value, ok, err := r.Next()
		if err != nil {
			return batchContents{}, fmt.Errorf("%w: batch: %w", ErrCorrupt, err)
		}
		if !ok {
			break
		}
		switch kind {
		case pebble.InternalKeyKindSet, pebble.InternalKeyKindDelete, pebble.InternalKeyKindSingleDelete:
			has.clock = has.clock || len(key) > 0 && key[0] == keys.LeaseTime
			if kind == pebble.InternalKeyKindSet && len(key) > 0 && key[0] == keys.Meta {
				has.identity = value
			}
			n++
		case pebble.InternalKeyKindRangeDelete:
			has.ranged = true
			has.trimmed = has.trimmed || len(key) > 0 && (key[0] == keys.Task || key[0] == keys.Scheduled)
			n++
		default:
			return batchContents{}, fmt.Errorf("%w: batch: %s", ErrCorrupt, kind)
		}
	}
	if n != b.Count() {
		return batchContents{}, fmt.Errorf("%w: batch: %d operations, it says %d", ErrCorrupt, n, b.Count())
	}
	return has, nil
}

// largeBatch is below what Pebble keeps the memory of: half of the smallest MemTableBytes.
const largeBatch = 64 << 10

// Open opens the store, and closes the one before.
func (m *stateMachine) Open(install func() error) (last cluster.Position, err error) {
	m.batch, m.buf = nil, nil
	r := m.replica
	q := r.node.queue
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.store
	r.store, r.source = nil, nil
	if old != nil {
		if err := old.Close(); err != nil {
			return last, err
		}
	}
	if err := install(); err != nil {
		return last, err
	}
	if err := fsck.FinishRepair(q.dir.FS, q.dir.Path, r.index); err != nil {
		return last, err // of a queue by itself, before it became a node
	}
	st, err := store.Open(manifest.ShardDir(q.dir.FS, q.dir.Path, r.index), q.opts.storeConfig(), q.caches, q.dir.Creating)
	if err != nil {
		return last, err
	}
	err = st.Read(func() error {
		if old == nil { // or else it is a replica, and the manifest in use
			if err := conversion.ToReplica(st, &q.dir.Manifest, r.index); err != nil {
				return err
			}
		}
		if last.Index, last.Term, err = schema.Applied(st.DB()); err != nil {
			return err
		}
		identity, err := schema.Lookup(st.DB(), []byte{keys.Meta})
		if err != nil || identity == nil { // the shard has not been led yet
			return err
		}
		return m.adopt(identity)
	})
	if err != nil {
		return last, errors.Join(err, st.Close())
	}
	r.store, r.source = st, &liveStore{r, st}
	r.noteClock()
	return last, nil
}

// Lead makes this node's replica the shard.
func (m *stateMachine) Lead(term uint64) (cluster.Leader, error) {
	r := m.replica
	begin := proposer{replica: r, term: term}
	if err := begin.Commit(nil); err != nil {
		return nil, err
	}
	if err := r.identify(&begin); err != nil {
		return nil, err
	}
	s, err := r.load(term)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// identify lets the first leader ever store what the shard is.
func (r *replica) identify(p *proposer) error {
	var known []byte
	err := r.use(func(st *store.Store) (err error) {
		known, err = schema.Lookup(st.DB(), []byte{keys.Meta})
		return err
	})
	if err != nil || known != nil {
		return err
	}
	return r.writeIdentity(p, r.node.Format())
}

// Raise gives the shard a format.
func (m *stateMachine) Raise(term uint64, format int) error {
	return m.replica.writeIdentity(&proposer{replica: m.replica, term: term}, format)
}

// IsForgotten reports whether a node, or a directory, was removed.
func (m *stateMachine) IsForgotten(name string) (is bool, err error) {
	err = m.replica.use(func(st *store.Store) (err error) { is, err = schema.IsForgotten(st.DB(), name); return err })
	return is, err
}

// writeIdentity stores what the shard is, and of which format.
func (r *replica) writeIdentity(p *proposer, format int) error {
	var b pebble.Batch
	identity := manifest.ReplicaIdentity(format, r.index, len(r.node.queue.replicas))
	if err := b.Set([]byte{keys.Meta}, []byte(identity), nil); err != nil {
		return store.Error(err)
	}
	return p.Commit(&b)
}

// adoptFormat makes sure that this node knows the format of the shard, by its identity.
func (r *replica) adoptFormat(identity []byte) error {
	format, err := manifest.ReplicaFormat(r.index, len(r.node.queue.replicas), identity)
	if err != nil {
		return err
	}
	return r.group.AdoptFormat(format)
}

// load builds the shard from the store.
func (r *replica) load(term uint64) (s *shard, err error) {
	q := r.node.queue
	var gates *dispatch.Gates
	if len(q.replicas) == 1 {
		gates = dispatch.NewGates() // nobody else leases tasks
	}
	err = r.use(func(st *store.Store) error {
		s = newShard(r.index, q.opts, st, gates)
		s.node, s.replica, s.epoch = r.node, r, r.group.Applied()
		s.steps.Table = &r.steps
		s.commit = &proposer{replica: r, term: term, effects: &s.Effects}
		s.ClockAge = millisSince(*r.clockedAt.Load())
		if err := s.load(); err != nil {
			return err
		}
		r.group.Place(s.Placement)
		s.claims.Join(q.heads)
		s.join(nil)
		return nil
	})
	return s, err
}

// noteClock notes that the store has a new clock of leases, or may have one. What it has is of an
// earlier time.
func (r *replica) noteClock() {
	now := time.Now()
	r.clockedAt.Store(&now)
}

// The shard is the leader of its group.

// Serve starts the owner, and lets verbs find it.
func (s *shard) Serve() {
	s.replica.lead.Store(s)
	go s.runGuarded()
	s.node.claims.joined(s)
}

// StepDown ends the owner.
func (s *shard) StepDown(reason error) {
	s.replica.lead.Store(nil)
	s.inbox.Stop(notLed(s.index, reason))
	<-s.done
}

// Done is closed when the owner has ended.
func (s *shard) Done() <-chan struct{} { return s.done }

// Crashed reports whether the owner has panicked.
func (s *shard) Crashed() bool { return s.panicked }

func notLed(shard int, reason error) error {
	if errors.Is(reason, ErrClosed) {
		return ErrClosed
	}
	return fmt.Errorf("%w: shard %d", reason, shard)
}

// proposer is the committer of a shard in one term of its leadership: a group
// is persistent when it is in the logs of a majority, and this node has applied it.
type proposer struct {
	replica *replica
	term    uint64
	effects *engine.Effects // of the group; nil: none
}

func (p *proposer) Commit(b *pebble.Batch) error {
	var e entry
	if b != nil {
		e.batch = b.Repr()
	}
	if p.effects != nil {
		e.broadcast = broadcast.Encode(p.effects)
	}
	// Raft keeps the entry, and Pebble's batch is about to be used again.
	data := make([]byte, cluster.EntryHeader, cluster.EntryHeader+lengthLen+len(e.batch)+len(e.broadcast))
	return p.replica.group.Propose(p.term, e.append(data))
}

// Confirm makes sure that what has been read is still so.
func (p *proposer) Confirm() error { return p.replica.group.Confirm(p.term) }
