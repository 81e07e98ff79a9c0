package codeq

import (
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/cluster"
	"codeq/internal/convert"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// With Options.Cluster, the batch of a group is an entry in the log of the shard's Raft group. The
// leader has decided everything in it, times and IDs included; every replica applies an entry by
// writing its bytes, the same ones in the same order.

// stateMachine is the replica's side for the shard's Raft group: it applies the log to the store.
type stateMachine struct {
	replica *replica
	writer  entries.Writer
}

func newStateMachine(r *replica) *stateMachine {
	return &stateMachine{replica: r, writer: entries.Writer{Adopt: func(identity []byte) error {
		return r.adoptFormat(identity, r.group.AwaitFormat)
	}, Answered: r.awaits.Answered}}
}

func (m *stateMachine) Apply(l cluster.Entry) error {
	e, err := entries.ParseEntry(l.Data)
	if err != nil {
		return err
	}
	r := m.replica
	clock, err := m.writer.Write(r.slot.Store(), &e, l.Index, l.Term)
	if err != nil {
		return err
	}
	if clock {
		r.noteClock()
	}
	if l.Reclaim > 0 {
		r.slot.Store().Reclaim(l.Reclaim)
	}
	if !l.Replayed {
		if err := r.publish(e.Broadcast); err != nil {
			r.node.log.Error("broadcast lost", "shard", r.index, "err", err)
		}
	}
	return nil
}

func (m *stateMachine) Open(install func() error) (last cluster.Position, err error) {
	m.writer.Reset()
	r := m.replica
	q := r.node.queue
	first := r.slot.Store() == nil
	err = r.slot.Replace(func() (*store.Store, error) {
		if err := install(); err != nil {
			return nil, err
		}
		if err := fsck.FinishRepair(q.dir.FS, q.dir.Path, r.index); err != nil {
			return nil, err // of a standalone queue, before it became a node
		}
		st, err := store.Open(manifest.ShardDir(q.dir.FS, q.dir.Path, r.index), q.opts.storeConfigIn(r.node.Format()), q.caches, q.dir.Creating)
		if err != nil {
			return nil, err
		}
		if last, err = r.begin(st, first); err != nil {
			return nil, errors.Join(err, st.Close())
		}
		return st, nil
	})
	if err == nil {
		r.noteClock()
	}
	return last, err
}

// begin returns the position of a store in the log, and adopts its format. The first store of this
// process may be that of a standalone queue.
func (r *replica) begin(st *store.Store, first bool) (last cluster.Position, err error) {
	q := r.node.queue
	err = st.Read(func() error {
		if first { // or else it is a replica, and the manifest in use
			if err := convert.ToReplica(st, &q.dir.Manifest, q.dir.Killed(), r.index); err != nil {
				return err
			}
		}
		if last.Index, last.Term, err = store.Applied(st.DB()); err != nil {
			return err
		}
		identity, err := store.Lookup(st.DB(), []byte{keys.Meta})
		if err != nil || identity == nil { // the shard has not been led yet
			return err
		}
		return r.adoptFormat(identity, r.group.AdoptFormat)
	})
	return last, err
}

func (m *stateMachine) Lead(term uint64) (cluster.Leader, error) {
	r := m.replica
	begin := proposer{replica: r, term: term}
	if err := begin.Commit(nil); err != nil {
		return nil, err
	}
	if err := r.identify(&begin); err != nil {
		return nil, err
	}
	r.group.LearnClocks()
	s, err := r.load(term)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (r *replica) identify(p *proposer) error {
	var known []byte
	err := r.slot.Use(func(st *store.Store) (err error) {
		known, err = store.Lookup(st.DB(), []byte{keys.Meta})
		return err
	})
	if err != nil || known != nil {
		return err
	}
	return r.writeIdentity(p, r.node.Format())
}

func (m *stateMachine) Raise(term uint64, format int) error {
	return m.replica.writeIdentity(&proposer{replica: m.replica, term: term}, format)
}

func (m *stateMachine) IsForgotten(name string) (is bool, err error) {
	err = m.replica.slot.Use(func(st *store.Store) (err error) { is, err = store.IsForgotten(st.DB(), name); return err })
	return is, err
}

func (r *replica) writeIdentity(p *proposer, format int) error {
	var b pebble.Batch
	identity := manifest.ReplicaIdentity(format, r.index, len(r.node.queue.replicas))
	if err := b.Set([]byte{keys.Meta}, []byte(identity), nil); err != nil {
		return store.Error(err)
	}
	return p.Commit(&b)
}

// adoptFormat makes sure that this node supports the format in the shard's identity.
func (r *replica) adoptFormat(identity []byte, adopt func(format int) error) error {
	format, err := manifest.ReplicaFormat(r.index, len(r.node.queue.replicas), identity)
	if err != nil {
		return err
	}
	return adopt(format)
}

func (r *replica) load(term uint64) (s *shard, err error) {
	q := r.node.queue
	var gates *dispatch.Gates
	if len(q.replicas) == 1 {
		gates = dispatch.NewGates() // no other shard leases tasks
	}
	err = r.slot.Use(func(st *store.Store) error {
		s = newShard(r.index, q.opts, st, gates)
		s.node, s.replica, s.epoch, s.space.Cluster = r.node, r, r.group.Applied(), r.group
		s.upkeep.UpkeepTable = &r.upkeep
		s.commit = &proposer{replica: r, term: term, effects: &s.rules.Effects}
		age := s.opts.private.Mono().Sub(*r.clockedAt.Load())
		if err := s.load(uint64(age / time.Millisecond)); err != nil {
			return err
		}
		r.group.Place(s.rules.Mail.Placement)
		return nil
	})
	return s, err
}

// noteClock notes that the store may have a new clock of leases, written no later than now.
func (r *replica) noteClock() {
	now := r.mono()
	r.clockedAt.Store(&now)
}

// The shard is the leader of its group.

func (s *shard) Serve() {
	s.replica.lead.Store(s)
	go s.runGuarded()
	s.node.claims.Each(s.admit) // they wait in all shards of this node
}

func (s *shard) StepDown(reason error) {
	s.replica.lead.Store(nil)
	s.inbox.Stop(notLed(s.index, reason))
	<-s.done
}

func (s *shard) Done() <-chan struct{} { return s.done }

func (s *shard) Crashed() bool { return s.panicked }

func notLed(shard int, reason error) error {
	if errors.Is(reason, ErrClosed) {
		return ErrClosed
	}
	return fmt.Errorf("%w: shard %d", reason, shard)
}

// proposer is the committer of a shard in one term of its leadership: a group is persistent when it
// is in the logs of a majority, and this node has applied it.
type proposer struct {
	replica *replica
	term    uint64
	effects *engine.Effects // of the group; nil: none
}

func (p *proposer) Commit(b *pebble.Batch) error {
	var e entries.Entry
	if b != nil {
		e.Batch = b.Repr()
	}
	if p.effects != nil {
		e.Broadcast = entries.EncodeEffects(p.effects)
	}
	// Raft keeps the entry, and Pebble's batch is about to be used again.
	data := make([]byte, cluster.EntryHeader, cluster.EntryHeader+e.Size())
	return p.replica.group.Propose(p.term, e.Append(data))
}

func (p *proposer) Confirm() error { return p.replica.group.Confirm(p.term) }
