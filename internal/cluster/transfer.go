package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// errOffered: transfer has done nothing.
var errOffered = fmt.Errorf("%w: the leadership was offered a moment ago", base.ErrCannotLead)

// offerPause is the shortest time between two transfers of a shard in one term, as it stands still
// during each, even one without success.
const offerPause = time.Minute

// transfer makes another node the leader. The shard stops here, so that no more entries come; when
// the other node has all of them, it must stand for election at once, as in Raft's
// LeadershipTransfer. That one is not used: an attempt that follows one to an unreachable node may
// never end, and Raft refuses all entries meanwhile (github.com/hashicorp/raft/issues/696). Without
// success within twice ElectionTimeout, the shard goes on here.
func (g *Group) transfer(to raft.Server) (err error) {
	ctx, cancel := context.WithTimeout(g.node.ctx, 2*g.node.c.ElectionTimeout)
	defer cancel()
	if err := g.isFit(ctx, to); err != nil {
		return err
	}
	var term uint64
	if err := g.node.poll(ctx, func() (begun bool, err error) {
		term, begun, err = g.beginOffer()
		return begun, err
	}); err != nil {
		return err
	}
	led := g.leave(base.ErrNotLeader)
	defer func() { g.endOffer(led, err) }()
	last := g.raft.LastIndex()
	if err := g.node.poll(ctx, func() (bool, error) {
		s, err := g.stateAt(ctx, to)
		return err == nil && s.LastIndex >= last, err
	}); err != nil {
		return fmt.Errorf("shard %d: wait for node %s: %w", g.index, to.ID, err)
	}
	sent := make(chan error, 1)
	g.node.background.Go(func() { // may take raftTimeout
		sent <- g.node.guarded("offer of a leadership", func() error {
			return g.transport.TimeoutNow(to.ID, to.Address, &raft.TimeoutNowRequest{RPCHeader: g.transport.header()}, new(raft.TimeoutNowResponse))
		})
	})
	for again := (base.Patience{}); ; {
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

// checkLeader returns an error if a node cannot lead.
func (g *Group) checkLeader(ctx context.Context, d *decision) error {
	if done, err := g.isLedBy(d); done || err != nil {
		return err
	}
	return g.isFit(ctx, d.members[d.at])
}

// makeLeader hands the shard over to a node by hand; without a node it undoes that. The shard has
// stored the choice.
func (g *Group) makeLeader(d *decision) error {
	if d.Node == "" {
		g.node.routes.notify() // wakes balance
		return nil
	}
	if done, err := g.isLedBy(d); done || err != nil {
		return err
	}
	err := g.transfer(d.members[d.at])
	if err == nil || errors.Is(err, base.ErrCannotLead) {
		return err
	}
	return fmt.Errorf("%w: %w", base.ErrUncertain, err)
}

// isLedBy reports whether the chosen leader is this node already, or any. It returns an error if
// the chosen node is not a member, or is this node, drained.
func (g *Group) isLedBy(d *decision) (bool, error) {
	switch self := g.node.self.ServerID(); {
	case d.Node == "":
		return true, nil
	case d.at < 0:
		return false, fmt.Errorf("%w: node %s", base.ErrNotFound, d.Node)
	case d.ServerID() != self:
		return false, nil
	case g.node.drained():
		return false, fmt.Errorf("shard %d: %w: node %s: it is drained", g.index, base.ErrCannotLead, d.Node)
	}
	return true, nil
}

// isFit returns an error if a node cannot lead soon after this one ends.
func (g *Group) isFit(ctx context.Context, m raft.Server) error {
	goal := g.goal()
	s, err := g.stateToLead(ctx, m)
	if err == nil {
		err = goal.lackOf(m, s)
	}
	if err != nil {
		return fmt.Errorf("shard %d: %w: %s", g.index, base.ErrCannotLead, err.Error())
	}
	return nil
}

// checkCaughtUp returns an error if a node without a vote lacks too many entries for one: until it
// has them, it would not help the majority that it counts for.
func (g *Group) checkCaughtUp(ctx context.Context, m raft.Server) error {
	if m.Suffrage == raft.Voter {
		return nil
	}
	goal := g.goalToVote()
	s, err := g.stateAt(ctx, m)
	if err == nil {
		err = goal.lackOf(m, s)
	} else {
		err = fmt.Errorf("node %s: %s", peerOf(m).Node, strings.TrimPrefix(err.Error(), "codeq: "))
	}
	if err != nil {
		return fmt.Errorf("shard %d: %w: %s", g.index, ErrBehind, err.Error())
	}
	return nil
}

// closeMessages is how many messages of entries a node may lack when it gets a vote, or leads.
const closeMessages = 4

// goal is the least index that a node must have applied before it may vote or lead. It gets the
// rest soon. The goal is set before the node is asked: entries applied until its answer comes do
// not count against it.
type goal struct {
	least, all uint64
	err        error
}

// goal is the goal of a voter that is asked from now on: all but closeMessages.
func (g *Group) goal() goal {
	all := g.Applied()
	return goal{least: all - g.log.newest(all, closeMessages), all: all}
}

// goalToVote is the goal of a node that may have nothing: also all entries that the log no longer
// has. The log may begin after the last applied entry, as Raft has entries that are not applied.
func (g *Group) goalToVote() (o goal) {
	o = g.goal()
	var first uint64
	if first, _, o.err = g.log.bounds(); first == 0 { // it is empty
		first = o.all + 1
	}
	o.least = max(o.least, min(first-1, o.all))
	return o
}

// lackOf returns an error if a node has not reached the goal.
func (o goal) lackOf(m raft.Server, s replicaState) error {
	if o.err == nil && s.Applied < o.least {
		return fmt.Errorf("node %s has applied %d of %d entries", peerOf(m).Node, s.Applied, o.all)
	}
	return o.err
}

// stateToLead asks a node for the state of its replica of the shard. The error gives the reason why
// the node cannot lead; it is no error of the shard.
func (g *Group) stateToLead(ctx context.Context, m raft.Server) (replicaState, error) {
	name := peerOf(m).Node
	s, err := g.stateAt(ctx, m)
	switch {
	case err != nil:
		err = fmt.Errorf("node %s: %s", name, strings.TrimPrefix(err.Error(), "codeq: "))
	case m.Suffrage != raft.Voter:
		err = fmt.Errorf("node %s does not vote", name)
	case s.Drained:
		err = fmt.Errorf("node %s: it is drained", name)
	case s.Unsteady:
		err = fmt.Errorf("node %s: its disk does not answer, or did not lately", name)
	}
	return s, err
}

// stateAt asks a node for the state of its replica of the shard. A failed replica is an error.
func (g *Group) stateAt(ctx context.Context, m raft.Server) (replicaState, error) {
	states, err := g.node.stateOf(ctx, peerOf(m))
	if err == nil && g.index >= len(states) {
		err = ErrMalformedCall
	}
	if err != nil {
		return replicaState{}, err
	}
	if states[g.index].Failed {
		return replicaState{}, errors.New("its replica has failed")
	}
	return states[g.index], nil
}

// beginOffer records that the shard is handed over in this term, unless a change of its members is
// being decided.
func (g *Group) beginOffer() (term uint64, begun bool, err error) {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	term, now := g.raft.CurrentTerm(), time.Now()
	if last := g.leading.offer; g.leading.handing || last.term == term && now.Sub(last.at) < offerPause {
		return 0, false, fmt.Errorf("shard %d, term %d: %w: %v", g.index, term, errOffered, last.outcome) //nolint:errorlint // nil if the other node was elected
	}
	if g.leading.reforming > 0 {
		return 0, false, nil
	}
	g.leading.offer, g.leading.handing = offer{term, now, errors.New("it is not known yet what has come of it")}, true
	return term, true, nil
}

// endOffer makes watch serve the shard again if the shard was led here, and this node still leads
// in Raft.
func (g *Group) endOffer(led bool, outcome error) {
	g.leading.mu.Lock()
	g.leading.handing, g.leading.offer.outcome = false, outcome
	g.leading.mu.Unlock()
	if led {
		g.wake()
	}
}

// wake makes watch check whether this node must serve the shard again.
func (g *Group) wake() {
	select {
	case g.kept <- struct{}{}:
	default:
	}
}

// handOver makes another node the leader: of those that can lead, the one with the longest log.
func (g *Group) handOver() error {
	members, err := g.members()
	if err != nil {
		return err
	}
	var heir raft.Server
	var longest uint64
	var why []string // the others cannot lead
	for _, m := range members {
		if m.ID == g.node.self.ServerID() {
			continue
		}
		if g.health.outage(m.ID, g.raft.CurrentTerm()) != nil {
			why = append(why, fmt.Sprintf("node %s cannot be reached", peerOf(m).Node))
			continue
		}
		ctx, cancel := context.WithTimeout(g.node.ctx, g.node.c.ElectionTimeout)
		s, err := g.stateToLead(ctx, m)
		cancel()
		if err != nil {
			why = append(why, err.Error())
		} else if s.LastIndex > longest {
			heir, longest = m, s.LastIndex
		}
	}
	if longest == 0 {
		return fmt.Errorf("shard %d: %w: %s", g.index, base.ErrCannotLead, cmp.Or(strings.Join(why, "; "), "there is none"))
	}
	return g.transfer(heir)
}

// offer is the time at which the shard was offered to another node.
type offer struct {
	term    uint64
	at      time.Time
	outcome error // why it failed; nil: the other node was elected
}

// resign hands over the shards that this node leads, as far as other nodes can take them.
func (n *Node) resign() {
	n.together("resignation", len(n.groups), func(i int) error {
		if g := n.groups[i]; g.leads() {
			return g.handOver() // after an error the others miss this node
		}
		return nil
	})
}
