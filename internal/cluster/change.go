package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
				base.Pause(ctx, nil)
			}
		}))
	})
}

// changeInTurn is change, but adds and removes nodes one at a time: if the first shard has removed
// a node after its addition, the addition here comes before the removal here.
func (g *Group) changeInTurn(ctx context.Context, how Change, p Peer, former []string) error {
	if how == AddNode || how == Readmit || how == RemoveNode {
		if !g.changing.LockUntil(ctx.Done()) {
			return fmt.Errorf("%w: shard %d: another change of its members takes long", base.ErrNotLeader, g.index)
		}
		defer g.changing.Unlock()
	}
	return g.change(ctx, how, p, former)
}

// decision is the node of a change, and the members that decide the change.
type decision struct {
	Peer
	former  []string      // earlier IDs of its directory
	index   uint64        // of the configuration
	members []raft.Server // of the configuration
	at      int           // of the node among them, by its name; -1: it is not a member
}

// decide begins a decision by the committed members. A node without an ID gets that of the member
// of its name.
func (g *Group) decide(how Change, p Peer, former []string) *decision {
	index, members := g.configuration.get()
	at := slices.IndexFunc(members, func(m raft.Server) bool {
		return peerOf(m).Node == p.Node && (how != RemoveNode || p.ID == "" || m.ID == p.ServerID())
	})
	if at >= 0 && p.ID == "" {
		p = peerOf(members[at])
	}
	return &decision{p, former, index, members, at}
}

// change makes one change, or one step of it: see errReconfigured.
func (g *Group) change(ctx context.Context, how Change, p Peer, former []string) error {
	d := g.decide(how, p, former)
	switch how {
	case AddNode:
		return g.addLearner(ctx, d)
	case GiveVote:
		return g.giveVote(ctx, d)
	case RemoveNode:
		return g.removeNode(ctx, d)
	case MakeLeader:
		return g.makeLeader(d)
	case CheckRemoval:
		return g.checkRemoval(ctx, d, 0)
	case CheckReplacement:
		return g.checkRemoval(ctx, d, 1)
	case CheckMember:
		return d.checkMember()
	case CheckLeader:
		return g.checkLeader(ctx, d)
	case Readmit:
		return g.readmit(ctx, d)
	case BeginReplacement, KeepReplacement, EndReplacement:
		return g.changeReplacement(how, p)
	default:
		return ErrMalformedCall
	}
}

// checkMember returns an error unless the node is a member with its directory.
func (d *decision) checkMember() error {
	if d.at < 0 || !hasID(d.members, d.ServerID()) {
		return fmt.Errorf("%w: node %q", base.ErrNotMember, d.Node)
	}
	return nil
}

// hasID reports whether a member has an ID.
func hasID(members []raft.Server, id raft.ServerID) bool {
	return slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id })
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
