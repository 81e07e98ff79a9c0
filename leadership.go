package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/dispatch"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// A node that is elected leader of a shard's Raft group comes to lead the shard:
//
//	begin    it commits an entry of its term; when that is applied, so is
//	         everything that any leader before it has acknowledged
//	load     it builds the shard's memory from the store, as Open does
//	serve    the shard's owner runs, and the node's verbs find it
//
// and stops at once when it is leader no more: the first entry of a later
// term is applied, or the store replaced, only after the owner has ended. So an
// owner never sees a store that others write, and what it reads is what it wrote.

// leaderTerm is who decides for the replica's shard.
type leaderTerm struct {
	// leaving has an element while a shard comes to its end, which is for as long as a commit
	// takes: what waits for it waits in a channel, as a fake clock goes on only then.
	leaving chan struct{}
	mu      sync.Mutex // guards what follows, and that lead is set in the light of seen
	seen    uint64     // the latest term of which an entry has been applied
	offer   offer      // the last one
	handing bool       // the shard is being handed over: nobody comes to lead it here
}

func newLeaderTerm() leaderTerm { return leaderTerm{leaving: make(chan struct{}, 1)} }

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
			if r.leave(ErrNotLeader); s.panicked && r.handOver() != nil {
				retry.Reset(r.node.opts.HeartbeatTimeout) // nobody else leads: this node tries again, not at once
				continue
			}
		case <-r.kept:
			if r.lead.Load() != nil {
				continue
			}
		case <-retry.C:
		}
		r.leave(ErrNotLeader)
		if r.raft.State() != raft.Leader || r.failure() != nil {
			continue
		}
		if err := r.becomeLeader(); err != nil && r.raft.State() == raft.Leader {
			r.node.log.Warn("shard cannot be led yet", "shard", r.index, "err", err)
			retry.Reset(r.node.opts.HeartbeatTimeout / 4)
		}
	}
}

// becomeLeader makes this node's replica the shard.
func (r *replica) becomeLeader() error {
	term := r.raft.CurrentTerm()
	begin := proposer{replica: r, term: term}
	if err := begin.Commit(nil); err != nil {
		return err
	}
	if err := r.writeIdentity(&begin); err != nil {
		return err
	}
	s, err := r.load(term)
	if err != nil {
		return err
	}
	r.leading.mu.Lock()
	if r.leading.seen > term || r.leading.handing {
		r.leading.mu.Unlock()
		return fmt.Errorf("%w: term %d is over, or another node is to lead", ErrNotLeader, term)
	}
	r.lead.Store(s)
	r.leading.mu.Unlock()
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

// writeIdentity has the first leader ever, and the first of a format, store what the shard is.
func (r *replica) writeIdentity(p *proposer) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	shards := len(r.node.queue.replicas)
	got, err := schema.Lookup(r.store.DB(), []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got != nil {
		if old, err := manifest.CheckReplicaIdentity(r.index, shards, got); err != nil || !old {
			return err
		}
	}
	b := r.store.DB().NewBatch()
	defer func() { _ = b.Close() }() // it does no more than to recycle memory
	if err := b.Set([]byte{keys.Meta}, []byte(manifest.ReplicaIdentity(manifest.Format, r.index, shards)), nil); err != nil {
		return store.Error(err)
	}
	return p.Commit(b)
}

// load builds the shard from the store.
func (r *replica) load(term uint64) (*shard, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	q := r.node.queue
	var gates *dispatch.Gates
	if len(q.replicas) == 1 {
		gates = dispatch.NewGates() // nobody else leases tasks
	}
	s := newShard(r.index, q.opts, r.store, gates)
	s.node, s.replica, s.epoch = r.node, r, r.applied.Load()
	s.steps.table = &r.steps
	s.commit = &proposer{replica: r, term: term, effects: &s.Effects}
	if err := s.load(); err != nil {
		return nil, err
	}
	s.claims.Join(q.heads)
	s.join(nil)
	return s, nil
}

// leave ends the shard that is led here, and returns when it has ended, whoever
// ends it. It is false if none is.
func (r *replica) leave(reason error) bool {
	r.leading.leaving <- struct{}{}
	defer func() { <-r.leading.leaving }()
	s := r.lead.Swap(nil)
	if s == nil {
		return false
	}
	s.inbox.stop(notLed(s.index, reason))
	<-s.done
	r.changed()
	r.node.log.Info("leads no more", "shard", r.index, "reason", reason)
	return true
}

func notLed(shard int, reason error) error {
	if errors.Is(reason, ErrClosed) {
		return ErrClosed
	}
	return fmt.Errorf("%w: shard %d", reason, shard)
}

// Why transfer has done nothing.
var (
	errOffered = errors.New("the leadership was offered a moment ago")
	errUnfit   = errors.New("another node cannot lead now")
)

// offerPause bounds how often a shard stands still in a term for another node to
// lead it, and goes on here after all.
const offerPause = time.Minute

// transfer has another node lead. The shard ends here, so that no more entries come;
// when the other node has all of them, it is to stand for election at once, as in
// Raft's LeadershipTransfer. That one is not used: an attempt that follows one to a
// node that could not be reached may never end, and Raft refuses all entries
// meanwhile (github.com/hashicorp/raft/issues/696). If nothing comes of it within
// twice ElectionTimeout, the shard goes on here.
func (r *replica) transfer(to raft.Server) error {
	ctx, cancel := context.WithTimeout(r.node.ctx, 2*r.node.opts.ElectionTimeout)
	defer cancel()
	if err := r.isFit(ctx, to); err != nil {
		return err
	}
	term, err := r.beginOffer()
	if err != nil {
		return err
	}
	led := r.leave(ErrNotLeader)
	defer r.endOffer(led)
	last := r.raft.LastIndex()
	if err := poll(ctx, func() (bool, error) {
		s, err := r.stateAt(ctx, to)
		return err == nil && s.LastIndex >= last, err
	}); err != nil {
		return fmt.Errorf("shard %d: wait for node %s: %w", r.index, to.ID, err)
	}
	sent := make(chan error, 1)
	r.node.background.Go(func() { // it may take raftTimeout
		sent <- guarded(r.node.log, "offer of a leadership", func() error {
			return r.transport.TimeoutNow(to.ID, to.Address, r.timeoutNow(), new(raft.TimeoutNowResponse))
		})
	})
	for again := (patience{}); ; {
		change := r.route.next()
		if r.raft.State() != raft.Leader || r.raft.CurrentTerm() != term {
			return nil
		}
		select {
		case err := <-sent:
			if err != nil {
				return fmt.Errorf("shard %d: node %s: %w", r.index, to.ID, err)
			}
		default:
		}
		if !again.wait(ctx, change) {
			return fmt.Errorf("shard %d: node %s has not been elected: %w", r.index, to.ID, base.EndOf(ctx))
		}
	}
}

// isFit reports whether a node can lead soon, if this one ends.
func (r *replica) isFit(ctx context.Context, m raft.Server) error {
	s, err := r.stateAt(ctx, m)
	switch {
	case err != nil:
	case m.Suffrage != raft.Voter:
		err = errors.New("it does not vote")
	case s.Failed:
		err = errors.New("its replica has failed")
	case s.Applied+closeBehind < r.applied.Load():
		err = fmt.Errorf("it has applied %d of %d entries", s.Applied, r.applied.Load())
	default:
		return nil
	}
	return fmt.Errorf("shard %d: %w: node %s: %w", r.index, errUnfit, m.ID, err)
}

// stateAt asks a node for the state of its replica of the shard.
func (r *replica) stateAt(ctx context.Context, m raft.Server) (replicaState, error) {
	states, err := r.node.stateOf(ctx, string(m.Address))
	if err == nil && r.index >= len(states) {
		err = errMalformedCall
	}
	if err != nil {
		return replicaState{}, err
	}
	return states[r.index], nil
}

// timeoutNow is the message that has a node stand for election.
func (r *replica) timeoutNow() *raft.TimeoutNowRequest {
	self := raft.ServerID(r.node.self.Node)
	return &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(self),
		Addr: r.transport.EncodePeer(self, r.transport.LocalAddr()),
	}}
}

// beginOffer notes that the shard is handed over in this term.
func (r *replica) beginOffer() (term uint64, err error) {
	r.leading.mu.Lock()
	defer r.leading.mu.Unlock()
	term, now := r.raft.CurrentTerm(), time.Now()
	if last := r.leading.offer; r.leading.handing || last.term == term && now.Sub(last.at) < offerPause {
		return 0, fmt.Errorf("shard %d, term %d: %w", r.index, term, errOffered)
	}
	r.leading.offer, r.leading.handing = offer{term, now}, true
	return term, nil
}

// endOffer lets watch serve the shard again if the shard was led here, and Raft's
// leadership is still this node's.
func (r *replica) endOffer(led bool) {
	r.leading.mu.Lock()
	r.leading.handing = false
	r.leading.mu.Unlock()
	if led {
		select {
		case r.kept <- struct{}{}:
		default:
		}
	}
}

// handOver has any other node lead: of those that can, the one whose log is longest.
func (r *replica) handOver() error {
	members, err := r.members()
	if err != nil {
		return err
	}
	var heir raft.Server
	var longest uint64
	for _, m := range members {
		if m.ID == raft.ServerID(r.node.self.Node) || r.health.outage(m.ID, r.raft.CurrentTerm()) != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(r.node.ctx, r.node.opts.ElectionTimeout)
		s, err := r.stateAt(ctx, m)
		cancel()
		if err == nil && !s.Failed && m.Suffrage == raft.Voter && s.LastIndex > longest {
			heir, longest = m, s.LastIndex
		}
	}
	if longest == 0 {
		return fmt.Errorf("shard %d: %w", r.index, errUnfit)
	}
	return r.transfer(heir)
}

// offer is when the shard was to be handed over.
type offer struct {
	term uint64
	at   time.Time
}

// observeTerm has what was decided here in an earlier term than the given one come to
// its end, before an entry of that term is applied. Raft calls it.
func (r *replica) observeTerm(term uint64) {
	r.leading.mu.Lock()
	later := term > r.leading.seen
	r.leading.seen = max(term, r.leading.seen)
	r.leading.mu.Unlock()
	if later {
		r.leave(ErrNotLeader)
	}
}

// Leaders are spread over the nodes: of the nodes that vote, in the order of
// their names, each has its turn to be at home in a shard. A node that leads a
// shard that is at home elsewhere hands it over when the other one is there and
// has what it takes; that is looked at some time after the leaders have changed,
// for the nodes to have settled, and again as long as it is not so.
const (
	settleTime   = 2 * time.Second
	balanceEvery = 5 * time.Second
)

// balance hands over what is at home elsewhere, until quit is closed.
func (n *node) balance(quit <-chan struct{}) {
	t := time.NewTimer(settleTime)
	defer t.Stop()
	for {
		change := n.routes.next()
		if n.homing() {
			t.Reset(balanceEvery)
		}
		select {
		case <-change:
			t.Reset(settleTime)
			select {
			case <-t.C:
			case <-quit:
				return
			}
		case <-t.C:
		case <-quit:
			return
		}
	}
}

// homing hands over the shards that are at home elsewhere, as far as that is
// possible now. It reports whether some stay.
func (n *node) homing() (left bool) {
	for _, r := range n.queue.replicas {
		if r.lead.Load() == nil {
			continue
		}
		members, err := r.members()
		if err != nil {
			continue
		}
		home, ok := homeNode(members, r.index)
		if !ok || home.ID == raft.ServerID(n.self.Node) {
			continue
		}
		left = true
		err = r.transfer(home)
		if err != nil && !errors.Is(err, errOffered) && !errors.Is(err, errUnfit) {
			n.log.Info("shard stays", "shard", r.index, "home", home.ID, "err", err)
		}
	}
	return left
}

// homeNode is the node that is to lead a shard.
func homeNode(members []raft.Server, shard int) (home raft.Server, ok bool) {
	voters := slices.DeleteFunc(slices.Clone(members), func(m raft.Server) bool { return m.Suffrage != raft.Voter })
	if len(voters) == 0 {
		return raft.Server{}, false
	}
	slices.SortFunc(voters, func(a, b raft.Server) int { return cmp.Compare(a.ID, b.ID) })
	return voters[shard%len(voters)], true
}
