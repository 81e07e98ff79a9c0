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
		s.run()
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

// christen has the first leader ever store what the shard is.
func (r *replica) christen(p *proposer) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	want := fmt.Sprintf("codeq %d replicated %d/%d", format, r.index, len(r.node.queue.replicas))
	got, err := lookup(r.store.db, []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got == nil {
		b := r.store.db.NewBatch()
		defer func() { _ = b.Close() }() // it does no more than to recycle memory
		if err := b.Set([]byte{keys.Meta}, []byte(want), nil); err != nil {
			return storageError(err)
		}
		return p.commit(b)
	}
	if string(got) != want {
		return fmt.Errorf("%w: identity %q, expected %q", ErrCorrupt, got, want)
	}
	return nil
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
	s.commit = &proposer{replica: r, term: term, news: &s.group.news}
	if err := s.load(); err != nil {
		return nil, err
	}
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

// restore replaces the store by one that the snapshots have received.
func (r *replica) restore() error {
	r.leave(ErrNotLeader)
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, _, ok := r.snapshots.Installed(); !ok {
		return nil // the store is as far as the snapshot
	}
	r.source = nil
	if err := r.store.close(); err != nil {
		return err
	}
	return r.openStore()
}

// openStore puts what the snapshots have received in place, if anything, and
// opens the store. REQUIRES: mu is held, or nobody else knows the replica.
func (r *replica) openStore() error {
	q := r.node.queue
	dir := shardDir(q.dir.fs, q.dir.path, r.index)
	if from, _, ok := r.snapshots.Installed(); ok {
		if err := q.dir.fs.RemoveAll(dir); err != nil {
			return err
		}
		if err := q.dir.fs.Rename(from, dir); err != nil {
			return err
		}
		if err := syncDirectory(q.dir.fs, q.dir.path); err != nil {
			return err
		}
		if err := r.snapshots.Swapped(); err != nil {
			return err
		}
	}
	st, err := openStore(dir, q.opts, q.caches, q.dir.Creating)
	if err != nil {
		return err
	}
	index, err := appliedIndex(st.db)
	if err != nil {
		return errors.Join(err, st.close())
	}
	r.store, r.source = st, &liveStore{r, st}
	r.applied.Store(index)
	return nil
}

// fail ends the replica: its store cannot be written. The others go on without it.
func (r *replica) fail(cause error) {
	err := fmt.Errorf("%w: shard %d: %w", ErrFailed, r.index, cause)
	if !r.broken.CompareAndSwap(nil, &err) {
		return
	}
	r.node.log.Error("replica failed", "shard", r.index, "err", cause)
	r.changed()
	r.node.background.Go(func() { _ = r.raft.Shutdown().Error() }) // of the group's goroutines; Raft has logged what went wrong
}

// failure is why the replica has ended; nil if it has not.
func (r *replica) failure() error {
	if err := r.broken.Load(); err != nil {
		return *err
	}
	return nil
}

// tenure is how long calls wait for a leader of the shard on another node.
type tenure struct {
	mu     sync.Mutex // guards what follows
	leader raft.ServerID
	over   chan struct{}
}

// begin notes who leads now.
func (t *tenure) begin(leader raft.ServerID, grace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader == leader {
		return
	}
	if over := t.over; over != nil {
		time.AfterFunc(grace, func() { close(over) })
	}
	t.leader, t.over = leader, make(chan struct{})
}

// of returns a channel that is closed some time after another node than the
// given one is known to lead: what has not been answered by then will not be.
func (t *tenure) of(leader raft.ServerID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader != leader { // not noted yet, or over already
		return nil
	}
	return t.over
}

// changed says that the shard may be led by another node, or be ready to be asked.
func (r *replica) changed() {
	r.route.changed()
	r.node.routes.changed()
}

// route is where a shard is, or all of them.
type route struct {
	mu     sync.Mutex // guards change
	change chan struct{}
}

// next returns a channel that is closed when the leader may be another one, or ready.
func (r *route) next() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.change == nil {
		r.change = make(chan struct{})
	}
	return r.change
}

func (r *route) changed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.change != nil {
		close(r.change)
		r.change = nil
	}
}
