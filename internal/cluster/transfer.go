package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// Why transfer has done nothing.
var (
	errOffered = errors.New("the leadership was offered a moment ago")
	errUnfit   = errors.New("another node cannot lead now")
)

// offerPause bounds how often a shard stands still in a term for another node to
// lead it, and goes on here after all.
const offerPause = time.Minute

// transfer lets another node lead. The shard ends here, so that no more entries come;
// when the other node has all of them, it is to stand for election at once, as in
// Raft's LeadershipTransfer. That one is not used: an attempt that follows one to a
// node that could not be reached may never end, and Raft refuses all entries
// meanwhile (github.com/hashicorp/raft/issues/696). If nothing comes of it within
// twice ElectionTimeout, the shard goes on here.
func (g *Group) transfer(to raft.Server) error {
	ctx, cancel := context.WithTimeout(g.node.ctx, 2*g.node.c.ElectionTimeout)
	defer cancel()
	if err := g.isFit(ctx, to); err != nil {
		return err
	}
	term, err := g.beginOffer()
	if err != nil {
		return err
	}
	led := g.leave(base.ErrNotLeader)
	defer g.endOffer(led)
	last := g.raft.LastIndex()
	if err := g.node.poll(ctx, func() (bool, error) {
		s, err := g.stateAt(ctx, to)
		return err == nil && s.LastIndex >= last, err
	}); err != nil {
		return fmt.Errorf("shard %d: wait for node %s: %w", g.index, to.ID, err)
	}
	sent := make(chan error, 1)
	g.node.background.Go(func() { // it may take raftTimeout
		sent <- g.node.guarded("offer of a leadership", func() error {
			return g.transport.TimeoutNow(to.ID, to.Address, &raft.TimeoutNowRequest{RPCHeader: g.transport.header()}, new(raft.TimeoutNowResponse))
		})
	})
	for again := (Patience{}); ; {
		change := g.route.next()
		if g.raft.State() != raft.Leader || g.raft.CurrentTerm() != term {
			return nil
		}
		select {
		case err := <-sent:
			if err != nil {
				return fmt.Errorf("shard %d: node %s: %w", g.index, to.ID, err)
			}
		default:
		}
		if !again.Wait(ctx, change) {
			return fmt.Errorf("shard %d: node %s has not been elected: %w", g.index, to.ID, base.EndOf(ctx))
		}
	}
}

// isFit reports whether a node can lead soon, if this one ends.
func (g *Group) isFit(ctx context.Context, m raft.Server) error {
	s, err := g.stateAt(ctx, m)
	switch {
	case err != nil:
	case m.Suffrage != raft.Voter:
		err = errors.New("it does not vote")
	case s.Failed:
		err = errors.New("its replica has failed")
	case s.Applied+g.log.newest(g.Applied(), closeMessages) < g.Applied():
		err = fmt.Errorf("it has applied %d of %d entries", s.Applied, g.Applied())
	default:
		return nil
	}
	return fmt.Errorf("shard %d: %w: node %s: %w", g.index, errUnfit, m.ID, err)
}

// stateAt asks a node for the state of its replica of the shard.
func (g *Group) stateAt(ctx context.Context, m raft.Server) (replicaState, error) {
	states, err := g.node.stateOf(ctx, peerOf(m))
	if err == nil && g.index >= len(states) {
		err = ErrMalformedCall
	}
	if err != nil {
		return replicaState{}, err
	}
	return states[g.index], nil
}

// beginOffer notes that the shard is handed over in this term.
func (g *Group) beginOffer() (term uint64, err error) {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	term, now := g.raft.CurrentTerm(), time.Now()
	if last := g.leading.offer; g.leading.handing || last.term == term && now.Sub(last.at) < offerPause {
		return 0, fmt.Errorf("shard %d, term %d: %w", g.index, term, errOffered)
	}
	g.leading.offer, g.leading.handing = offer{term, now}, true
	return term, nil
}

// endOffer lets watch serve the shard again if the shard was led here, and Raft's
// leadership is still this node's.
func (g *Group) endOffer(led bool) {
	g.leading.mu.Lock()
	g.leading.handing = false
	g.leading.mu.Unlock()
	if led {
		select {
		case g.kept <- struct{}{}:
		default:
		}
	}
}

// handOver lets any other node lead: of those that can, the one whose log is longest.
func (g *Group) handOver() error {
	members, err := g.members()
	if err != nil {
		return err
	}
	var heir raft.Server
	var longest uint64
	for _, m := range members {
		if m.ID == g.node.self.ServerID() || g.health.outage(m.ID, g.raft.CurrentTerm()) != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(g.node.ctx, g.node.c.ElectionTimeout)
		s, err := g.stateAt(ctx, m)
		cancel()
		if err == nil && !s.Failed && m.Suffrage == raft.Voter && s.LastIndex > longest {
			heir, longest = m, s.LastIndex
		}
	}
	if longest == 0 {
		return fmt.Errorf("shard %d: %w", g.index, errUnfit)
	}
	return g.transfer(heir)
}

// offer is when the shard was to be handed over.
type offer struct {
	term uint64
	at   time.Time
}

// resign hands the shards that this node leads to others, as far as they are
// there to take them.
func (n *Node) resign() {
	var transfers sync.WaitGroup
	for _, g := range n.groups {
		if g.leads() {
			transfers.Go(func() {
				n.contain("resignation", func() { _ = g.handOver() }, nil) // or they will miss this one
			})
		}
	}
	transfers.Wait()
}
