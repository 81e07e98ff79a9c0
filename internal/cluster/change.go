package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/wire"
)

// Change is a change of a group, or a check before one.
type Change byte

const (
	AddNode          Change = iota // without a vote
	GiveVote                       // to a node that was added and has caught up
	RemoveNode                     // for good
	MakeLeader                     // by hand; without a node: undo it
	CheckRemoval                   // whether a node can be removed
	CheckReplacement               // whether a node can be removed once another one votes
	CheckMember                    // whether a node is a member
	CheckLeader                    // whether a node can lead
	Readmit                        // a node with a new ID
	BeginReplacement               // of a node, by the node in the field of the address, with a token in the field of the ID
	KeepReplacement                // the replacement goes on
	EndReplacement
	EndOfChanges
)

// AppendChange encodes a change of a group for a call to its leader.
func AppendChange(dst []byte, how Change, p Peer, former []string) []byte {
	dst = wire.AppendBytes(append(dst, byte(how)), p.Node)
	dst = wire.AppendBytes(wire.AppendBytes(dst, p.Address), p.ID)
	for _, id := range former {
		dst = wire.AppendBytes(dst, id)
	}
	return dst
}

// ReadChange decodes the result of AppendChange.
func ReadChange(r *wire.Reader) (how Change, p Peer, former []string) {
	how, p = Change(r.Byte()), Peer{Node: r.String(), Address: r.String(), ID: r.String()}
	for how == Readmit && r.Len() > 0 {
		former = append(former, r.String())
	}
	if how >= EndOfChanges {
		r.Fail()
	}
	return how, p, former
}

// ErrLastNode: a node cannot be removed because it is the last of its group.
var ErrLastNode = errors.New("the last node")

// errReconfigured: the group was changed in the meantime.
var errReconfigured = fmt.Errorf("%w: the members have changed", base.ErrNotLeader)

// configTimeout bounds the wait of one change of a group for the one before.
const configTimeout = 10 * time.Second

// Change changes the group, and passes the outcome to settle, on a goroutine that Close waits for.
// It is called on the node that leads the group, before the Leader has ended. former are the
// earlier IDs of the node's directory.
func (g *Group) Change(how Change, p Peer, former []string, settle func(error)) {
	g.node.background.Go(func() {
		settle(g.node.guarded("change of members", func() error {
			ctx, cancel := context.WithTimeout(g.node.ctx, configTimeout)
			defer cancel()
			for {
				err := g.changeInTurn(ctx, how, p, former)
				if !errors.Is(err, errReconfigured) || ctx.Err() != nil {
					return err
				}
				Pause(ctx, nil)
			}
		}))
	})
}

// changeInTurn is change, but adds and removes nodes one at a time: if the first shard has removed
// a node after its addition, the addition here comes before the removal here.
func (g *Group) changeInTurn(ctx context.Context, how Change, p Peer, former []string) error {
	if how == AddNode || how == Readmit || how == RemoveNode {
		select {
		case g.changing <- struct{}{}:
			defer func() { <-g.changing }()
		case <-ctx.Done():
			return fmt.Errorf("%w: shard %d: another change of its members takes long", base.ErrNotLeader, g.index)
		}
	}
	return g.change(ctx, how, p, former)
}

func (g *Group) change(ctx context.Context, how Change, p Peer, former []string) error {
	index, members := g.configuration.get()
	at := slices.IndexFunc(members, func(m raft.Server) bool {
		return peerOf(m).Node == p.Node && (how != RemoveNode || p.ID == "" || m.ID == p.ServerID())
	})
	if at >= 0 && p.ID == "" {
		p = peerOf(members[at])
	}
	id, addr := p.ServerID(), raft.ServerAddress(p.Address)
	switch how {
	case AddNode:
		return g.addLearner(ctx, members, index, p)
	case GiveVote:
		if at < 0 || members[at].ID != id {
			return fmt.Errorf("%w: node %s, which was added", base.ErrNotFound, p.Node)
		}
		if err := g.checkCaughtUp(ctx, members[at]); err != nil {
			return err
		}
		return g.reconfigure(func() raft.Future { return g.raft.AddVoter(id, addr, index, configTimeout) })
	case CheckMember, CheckRemoval, CheckReplacement, RemoveNode:
		switch {
		case at < 0 && how != RemoveNode, how == CheckMember && !hasID(members, id):
			return fmt.Errorf("%w: node %q", base.ErrNotMember, p.Node)
		case at < 0 || how == CheckMember:
			return nil
		case g.index == 0:
			if others := removing(g.node.Status(ctx)); len(others) > 0 {
				return fmt.Errorf("%w: shard %d: node %q is being removed from other shards", base.ErrNotLeader, g.index, others[0].Node)
			}
		}
		newcomers := 0
		if how == CheckReplacement {
			newcomers = 1
		}
		rest := slices.DeleteFunc(slices.Clone(members), func(m raft.Server) bool { return peerOf(m).Node == p.Node })
		if err := g.checkRest(ctx, rest, newcomers); err != nil || how != RemoveNode {
			return err
		}
		// The next leader is asked. If that one is being removed as well, it makes the removal that
		// waits before it hands the shard over; else the two would hand it to each other for ever.
		if id == g.node.self.ServerID() && (g.beganLately() || g.handOver() == nil) {
			return fmt.Errorf("%w: shard %d: node %s is to be removed", base.ErrNotLeader, g.index, p.Node)
		} // or else this node leads until it has removed itself
		if g.index == 0 {
			if err := g.node.c.Leaders.Forget(ctx, g.index, string(id)); err != nil {
				return err
			}
		}
		err := g.reconfigure(func() raft.Future { return g.raft.RemoveServer(id, index, configTimeout) })
		if err == nil && len(rest) < len(members)-1 {
			return errReconfigured // the node is being taken back, and is a member by another ID as well
		}
		return err
	case BeginReplacement, KeepReplacement, EndReplacement:
		return g.changeReplacement(how, p)
	case Readmit:
		return g.readmit(ctx, members, index, p, former)
	case MakeLeader, CheckLeader:
		switch {
		case p.Node == "":
			g.node.routes.changed() // wakes balance
			return nil
		case at < 0:
			return fmt.Errorf("%w: node %s", base.ErrNotFound, p.Node)
		case id == g.node.self.ServerID() && g.node.drained():
			return fmt.Errorf("shard %d: %w: node %s: it is drained", g.index, base.ErrCannotLead, p.Node)
		case id == g.node.self.ServerID():
			return nil
		case how == CheckLeader:
			return g.isFit(ctx, members[at])
		}
		err := g.transfer(members[at])
		if err == nil || errors.Is(err, base.ErrCannotLead) {
			return err
		}
		return fmt.Errorf("%w: %w", base.ErrUncertain, err)
	default:
		return ErrMalformedCall
	}
}

// hasID reports whether a member has an ID.
func hasID(members []raft.Server, id raft.ServerID) bool {
	return slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id })
}

// checkRemoved returns an error if a node is not a member, and the first shard has removed it by
// any of the IDs that its directory has had.
func (g *Group) checkRemoved(ctx context.Context, p Peer, former ...string) error {
	if g.index > 0 {
		return g.node.c.Leaders.Change(ctx, 0, CheckMember, p)
	}
	return g.checkForgotten(p.Node, append(slices.Clone(former), p.ID)...)
}

// checkForgotten returns an error if a node was removed by one of some IDs.
// REQUIRES: the group is that of the first shard.
func (g *Group) checkForgotten(node string, ids ...string) error {
	for _, id := range ids {
		removed, err := g.machine.IsForgotten(string(Peer{Node: node, ID: id}.ServerID()))
		if err != nil {
			return fmt.Errorf("%w: shard %d: %w", base.ErrNotLeader, g.index, err)
		}
		if removed {
			return fmt.Errorf("%w: node %q was removed from the cluster with its directory; it may be added again with an empty one",
				base.ErrNotMember, node)
		}
	}
	return nil
}

// addLearner makes a node a member without a vote, or changes the address of a member.
func (g *Group) addLearner(ctx context.Context, members []raft.Server, index uint64, p Peer) error {
	known := make([]Peer, len(members))
	for i, m := range members {
		known[i] = peerOf(m)
	}
	if err := cmp.Or(namesake(known, p), addressee(known, p)); err != nil {
		return err
	}
	id, addr := p.ServerID(), raft.ServerAddress(p.Address)
	if !hasID(members, id) {
		if err := g.checkRemoved(ctx, p); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id && m.Address == addr }) {
		return nil // it has been added before
	}
	return g.reconfigure(func() raft.Future { return g.raft.AddNonvoter(id, addr, index, configTimeout) })
}

// checkRest checks that a majority of the remaining members and the newcomers would answer:
// otherwise the group would have no leader any more.
func (g *Group) checkRest(ctx context.Context, rest []raft.Server, newcomers int) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	voters := slices.DeleteFunc(slices.Clone(rest), func(m raft.Server) bool { return m.Suffrage != raft.Voter })
	if len(voters)+newcomers == 0 {
		return ErrLastNode
	}
	silent := make([]error, len(voters))
	var asking sync.WaitGroup
	for i, m := range voters {
		asking.Go(func() {
			g.node.contain("question for a state", func() {
				_, silent[i] = g.stateAt(ctx, m)
			}, func(err error) { silent[i] = err })
		})
	}
	asking.Wait()
	answers, need := newcomers, (len(voters)+newcomers)/2+1
	var why []string // texts: a node that does not answer is no error of the group
	for i, err := range silent {
		if err == nil {
			answers++
		} else {
			why = append(why, fmt.Sprintf("node %s: %s", peerOf(voters[i]).Node, strings.TrimPrefix(err.Error(), "codeq: ")))
		}
	}
	if answers >= need {
		return nil
	}
	return fmt.Errorf("%w: shard %d: %d of the %d that would be left have answered, start more of them: %s", base.ErrNoMajority, g.index,
		answers, len(voters)+newcomers, strings.Join(why, "; "))
}

// reconfigure returns when Raft has changed the group, or Node.commitLimit is over.
func (g *Group) reconfigure(change func() raft.Future) error {
	if g.log.full(0) {
		return fmt.Errorf("shard %d: %w", g.index, errNoRoom)
	}
	if err := g.beginReform(); err != nil {
		return err
	}
	err := g.propose(proposal{change: change, end: g.endReform})
	if err == nil {
		return nil
	}
	if strings.HasPrefix(err.Error(), "configuration changed since") { // Raft has no typed error for it
		return fmt.Errorf("%w: %w", errReconfigured, err)
	}
	if err = raftError(err); !errors.Is(err, base.ErrNotLeader) {
		err = fmt.Errorf("%w: shard %d: %w", base.ErrUncertain, g.index, err)
	}
	return err
}

// beginReform notes that a change of the members is being decided, unless the shard is handed over.
func (g *Group) beginReform() error {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	if g.leading.handing {
		return fmt.Errorf("%w: shard %d is being handed over", base.ErrNotLeader, g.index)
	}
	g.leading.reforming++
	return nil
}

func (g *Group) endReform() {
	g.leading.mu.Lock()
	defer g.leading.mu.Unlock()
	g.leading.reforming--
}

// members is the members of the group as this node knows them.
func (g *Group) members() ([]raft.Server, error) {
	f := g.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, raftError(err)
	}
	return f.Configuration().Servers, nil
}

// hasRemoved reports whether a node that this one has replicated to is no longer a member.
func (g *Group) hasRemoved(id raft.ServerID) bool {
	members, err := g.members()
	return err == nil && !hasID(members, id)
}

// HasMember reports whether a node is a member of the group, as the leader knows it. REQUIRES: this
// node leads the group, and has applied all entries of its predecessors.
func (g *Group) HasMember(node string) (bool, error) {
	members, err := g.members()
	return slices.ContainsFunc(members, func(m raft.Server) bool { return peerOf(m).Node == node }), err
}
