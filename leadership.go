package codeq

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/keys"
)

// A node that is elected leader of a shard's Raft group takes office:
//
//	begin    it commits an entry of its term; when that is applied, so is
//	         everything that any leader before it has acknowledged
//	load     it builds the shard's memory from the store, as Open does
//	serve    the shard's owner runs, and the node's verbs find it
//
// and leaves it at once when it is leader no more: the first entry of a later
// term is applied, or the store replaced, only after the owner has ended. So an
// owner never sees a store that others write, and what it reads is what it wrote.

// office is who decides for the replica's shard.
type office struct {
	leaving sync.Mutex // held while a shard comes to its end; taken before mu
	mu      sync.Mutex // guards what follows, and that lead is set in the light of seen
	seen    uint64     // the latest term of which an entry has been applied
	offer   offer      // the last one
}

// watch follows the elections of the shard's Raft group until quit is closed.
func (r *replica) watch(quit <-chan struct{}) {
	retry := time.NewTimer(0)
	retry.Stop()
	defer retry.Stop()
	var elected <-chan bool = r.raft.LeaderCh()
	for {
		select {
		case <-quit:
			r.leave(ErrClosed)
			return
		case <-elected:
		case s := <-r.ended:
			if s != r.lead.Load() {
				continue
			}
			if r.leave(ErrNotLeader); s.panicked && r.transfer(r.raft.LeadershipTransfer) != nil {
				retry.Reset(r.node.opts.HeartbeatTimeout) // nobody else leads: this node tries again, not at once
				continue
			}
		case <-retry.C:
		}
		r.leave(ErrNotLeader)
		if r.raft.State() != raft.Leader || r.failure() != nil {
			continue
		}
		if err := r.takeOffice(); err != nil && r.raft.State() == raft.Leader {
			r.node.log.Warn("shard cannot be led yet", "shard", r.index, "err", err)
			retry.Reset(r.node.opts.HeartbeatTimeout / 4)
		}
	}
}

// takeOffice makes this node's replica the shard.
func (r *replica) takeOffice() error {
	term := r.raft.CurrentTerm()
	begin := proposer{replica: r, term: term}
	if err := begin.commit(nil); err != nil {
		return err
	}
	if err := r.christen(&begin); err != nil {
		return err
	}
	s, err := r.load(term)
	if err != nil {
		return err
	}
	r.office.mu.Lock()
	if r.office.seen > term {
		r.office.mu.Unlock()
		return fmt.Errorf("%w: term %d is over", ErrNotLeader, term)
	}
	r.lead.Store(s)
	r.office.mu.Unlock()
	go func() {
		s.runGuarded()
		select {
		case r.ended <- s:
		default:
		}
	}()
	r.node.log.Info("leading", "shard", r.index, "term", term)
	r.changed()
	r.node.claims.joined(s)
	return nil
}

// christen has the first leader ever, and the first of a format, store what the shard is.
func (r *replica) christen(p *proposer) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	shards := len(r.node.queue.replicas)
	got, err := lookup(r.store.db, []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got != nil {
		if old, err := checkReplicaIdentity(r.index, shards, got); err != nil || !old {
			return err
		}
	}
	b := r.store.db.NewBatch()
	defer func() { _ = b.Close() }() // it does no more than to recycle memory
	if err := b.Set([]byte{keys.Meta}, []byte(replicaIdentity(format, r.index, shards)), nil); err != nil {
		return storageError(err)
	}
	return p.commit(b)
}

func replicaIdentity(format, index, shards int) string {
	return fmt.Sprintf("codeq %d replicated %d/%d", format, index, shards)
}

// checkReplicaIdentity is manifest.checkIdentity for a replica. All nodes have the same
// identity, that of the format in which the last leader knew it.
func checkReplicaIdentity(index, shards int, got []byte) (old bool, err error) {
	return checkIdentity(got, format, func(f int) string { return replicaIdentity(f, index, shards) })
}

// load builds the shard from the store.
func (r *replica) load(term uint64) (*shard, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	q := r.node.queue
	var gates *gateTable
	if len(q.replicas) == 1 {
		gates = newGateTable() // nobody else leases tasks
	}
	s := newShard(r.index, q.opts, r.store, gates)
	s.node, s.replica, s.office = r.node, r, r.applied.Load()
	s.steps.table = &r.steps
	s.commit = &proposer{replica: r, term: term, news: &s.group.news}
	if err := s.load(); err != nil {
		return nil, err
	}
	s.board = q.heads
	s.join(nil)
	return s, nil
}

// leave ends the shard that is led here, if any, and returns when it has ended,
// whoever ends it.
func (r *replica) leave(reason error) {
	r.office.leaving.Lock()
	defer r.office.leaving.Unlock()
	s := r.lead.Swap(nil)
	if s == nil {
		return
	}
	s.inbox.stop(notLed(s.index, reason))
	<-s.done
	r.changed()
	r.node.log.Info("leads no more", "shard", r.index, "reason", reason)
}

func notLed(shard int, reason error) error {
	if errors.Is(reason, ErrClosed) {
		return ErrClosed
	}
	return fmt.Errorf("%w: shard %d", reason, shard)
}

// errOffered: see transfer.
var errOffered = errors.New("the leadership was offered a moment ago")

// offerPause is how long Raft may take to forget an offer to a node that it
// cannot reach: a call of raftTimeout, and its wait after failures, with room to spare.
const offerPause = time.Minute

// transfer has Raft hand the leadership over; begin is Raft's LeadershipTransfer
// or LeadershipTransferToServer. In one term it does so only every offerPause: an
// attempt that follows one to a node that could not be reached may never end in
// Raft, which then refuses all entries, even in later terms
// (github.com/hashicorp/raft/issues/696).
func (r *replica) transfer(begin func() raft.Future) error {
	term, now := r.raft.CurrentTerm(), time.Now()
	r.office.mu.Lock()
	last := r.office.offer
	again := last.term == term && now.Sub(last.at) < offerPause
	if !again {
		r.office.offer = offer{term, now}
	}
	r.office.mu.Unlock()
	if again {
		return fmt.Errorf("shard %d, term %d: %w", r.index, term, errOffered)
	}
	return begin().Error()
}

// offer is when Raft was to transfer the leadership.
type offer struct {
	term uint64
	at   time.Time
}

// obey has what was decided here in an earlier term than the given one come to
// its end, before an entry of that term is applied. Raft calls it.
func (r *replica) obey(term uint64) {
	r.office.mu.Lock()
	later := term > r.office.seen
	r.office.seen = max(term, r.office.seen)
	r.office.mu.Unlock()
	if later {
		r.leave(ErrNotLeader)
	}
}
