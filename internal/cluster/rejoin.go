package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// A node that may have lost acknowledged entries gets a new ID when it is opened (see
// manifest.Volatile and manifest.Incarnations). By the former ID it is still a voter, but one that
// never answers: its groups go on if a majority of the voters has lost nothing. Such a majority has
// every acknowledged entry, and elects no leader without them. It then gives the node its old place
// back, in one shard after the other: first as a member without a vote, which is sent the entries
// that it lacks, and then as a voter. Until then the node asks for it. If a majority may have lost
// entries, the acknowledged entries are unknown, and all groups stand still until RecoverCluster
// chooses one of the nodes.

// joining is the request of a node to become a member.
type joining struct {
	Peer
	// Former are the former IDs of its directory. The node is added only if it is a member by one
	// of them, or Join is set.
	Former []string `json:",omitempty"`
	Join   bool     `json:",omitempty"`
}

// former returns the former IDs of this directory that may still be those of a member.
func (n *Node) former() []string {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	return n.c.Directory.Former
}

// rejoin asks the other nodes to take this one back, until one has, or the node is about to be
// closed.
func (n *Node) rejoin() {
	n.log.Warn("the node may have lost what it has acknowledged, as its power has failed since it was open, or its directory "+
		"is an older copy: it asks the others to take it back", "id", n.self.ID, "former", n.former())
	n.suspect(n.self.ID, n.former())
	for pause := n.c.HeartbeatTimeout; ; pause = min(2*pause, maxRejoinPause*n.c.HeartbeatTimeout) {
		ctx, cancel := context.WithTimeout(n.membership.ctx, joinTimeout)
		err := n.askToRejoin(ctx)
		cancel()
		if err == nil {
			err = n.rejoined()
		}
		if errors.Is(err, base.ErrOldCopy) {
			n.failAll(err)
			return
		}
		if err == nil || n.membership.ctx.Err() != nil {
			return
		}
		n.membership.wait("not taken back yet", err, n.log)
		if !sleep(n.membership.ctx, pause) {
			return
		}
	}
}

// maxRejoinPause times HeartbeatTimeout is the longest pause between two requests.
const maxRejoinPause = 8

// rejoined records that this node is no longer a member by a former ID.
func (n *Node) rejoined() error {
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) { d.Rejoined(); return true, nil })
	if err != nil {
		return err
	}
	n.logs.SyncToDisk(false)
	n.membership.mu.Lock()
	n.membership.waiting = nil
	n.membership.mu.Unlock()
	n.log.Info("taken back", "id", n.self.ID)
	return nil
}

// askToRejoin returns nil when this node votes again in every shard, or an error if no node helped.
func (n *Node) askToRejoin(ctx context.Context) error {
	j := joining{Peer: n.self, Former: n.former(), Join: n.c.Join}
	all := slices.Clone(n.c.Peers)
	for _, p := range n.known() {
		if !slices.ContainsFunc(all, func(o Peer) bool { return o.Node == p.Node && o.Address == p.Address }) {
			all = append(all, p)
		}
	}
	if n.votesForGood() { // a leader has found this node
		return nil
	}
	errs := []error{fmt.Errorf("%w: nobody has taken this node back, which may have lost what it had acknowledged", base.ErrNotLeader)}
	for _, a := range n.introduceAll(ctx, all) {
		if a.err != nil {
			errs = append(errs, a.err)
			continue
		}
		var err error
		switch {
		case a.Cluster != n.Cluster():
			err = fmt.Errorf("%w: it is of cluster %s, not %s", base.ErrNotMember, a.Cluster, n.Cluster())
		case len(a.Former) > 0:
			n.suspect(a.ID, a.Former)
			err = errors.New("it may have lost what it had acknowledged, too")
		default:
			if err = n.joinBy(ctx, a.peer(), j); err == nil {
				return n.poll(ctx, func() (bool, error) { return n.votesForGood(), nil }) // until this node knows its vote
			}
			if errors.Is(err, base.ErrOldCopy) {
				return fmt.Errorf("node %q: %w", a.Node, err)
			}
		}
		errs = append(errs, fmt.Errorf("node %q: %w", a.Node, err))
	}
	return errors.Join(errs...)
}

// missed searches for a member after a leader has found another directory at its address. The
// member may ask to be taken back, and know no node that is still up.
func (n *Node) missed(p Peer, err error) {
	var refused *peer.RefusedError
	if errors.As(err, &refused) && refused.Reason == peer.RefusedNode {
		n.search(p)
	}
}

// search searches for a member, unless another search is under way.
func (n *Node) search(p Peer) {
	if !n.membership.searching.CompareAndSwap(false, true) {
		return
	}
	n.run("search for a member", func() {
		defer n.membership.searching.Store(false)
		n.find(n.membership.ctx, p)
	}, nil)
}

// find takes back a member that has another ID, or was being taken back. It returns when another
// search makes sense. If the member has had its ID for some time, an older copy of its directory
// does not know the ID.
func (n *Node) find(ctx context.Context, p Peer) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	i, err := n.introduce(ctx, p)
	if err == nil && i.Cluster == n.Cluster() && len(i.Former) > 0 {
		if i.ID != p.ID && !slices.Contains(i.Former, p.ID) {
			i.Former = append(i.Former, p.ID)
		}
		p.ID = i.ID
		err = n.admit(ctx, joining{Peer: p, Former: i.Former})
	}
	if err != nil {
		n.log.Warn("member not found", "node", p.Node, "err", err)
	}
	sleep(ctx, maxRejoinPause*n.c.HeartbeatTimeout)
}

// suspect records that a directory may have lost the entries that its former IDs acknowledged.
func (n *Node) suspect(id string, former []string) {
	m := &n.membership
	m.mu.Lock()
	fresh := false
	for _, f := range former {
		fresh = fresh || m.suspects[f] != id
		put(&m.suspects, f, id)
	}
	m.mu.Unlock()
	if !fresh {
		return
	}
	for _, g := range n.groups {
		if err := g.standstill(); err != nil {
			n.log.Error("the shard stands still", "shard", g.index, "err", err)
		}
	}
}

// current is a member by the present ID of its directory; suspect: the directory may have lost
// entries that the member acknowledged.
func (n *Node) current(p Peer) (now Peer, suspect bool) {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	if id := n.membership.suspects[p.ID]; id != "" {
		p.ID, suspect = id, true
	}
	return p, suspect
}

// standstill returns an error if so many voters may have lost acknowledged entries that the others
// are no majority.
func (g *Group) standstill() error {
	members, err := g.members()
	if err != nil {
		return nil // the group has ended here
	}
	var lost []string
	voters := votersOf(members)
	for _, s := range voters {
		if p, suspect := g.node.current(peerOf(s)); suspect {
			lost = append(lost, p.Node)
		}
	}
	if len(lost) == 0 || len(voters)-len(lost) > len(voters)/2 {
		return nil
	}
	return fmt.Errorf("%w: of %d nodes, %s have lost power, or are older copies, and may lack what they had acknowledged; "+
		"RecoverCluster lets the furthest node go on alone", base.ErrPowerLost, len(voters), strings.Join(lost, ", "))
}

// admit gives a node the place that it had by a former ID, and a vote. As for a removal, the first
// shard decides whether the node is a member: a removal may be half complete.
//
// If a process with a former ID is up, it has lost nothing, and stays: the node that asks has a
// copy of its directory.
//
// Removals that are half complete are finished before: a leader that only the first shard has
// removed can add no node. If one cannot be finished, this node may be the one that it needs.
func (n *Node) admit(ctx context.Context, j joining) error {
	if _, err := n.finishRemovals(ctx); err != nil {
		n.log.Warn("removal not finished", "err", err)
	}
	if len(j.Former) == 0 {
		return n.add(ctx, j.Peer)
	}
	if err := n.checkFormer(ctx, j); err != nil {
		return err
	}
	n.suspect(j.ID, j.Former)
	for i := range n.groups {
		err := n.c.Leaders.Change(ctx, i, Readmit, j.Peer, j.Former...)
		if errors.Is(err, base.ErrNotFound) && i == 0 && !j.Join {
			return fmt.Errorf("%w: node %q was removed, or never added", base.ErrNotMember, j.Node)
		}
		if errors.Is(err, base.ErrNotFound) {
			err = n.c.Leaders.Change(ctx, i, AddNode, j.Peer)
		}
		if err != nil {
			return fmt.Errorf("take node %s back into shard %d: %w", j.Node, i, err)
		}
	}
	return n.giveVotes(ctx, j.Peer)
}

// readmit makes a node with a new ID a member by that ID, and no longer by its former ones, one
// step at a time. The new ID comes first, so that a node that is a member by none of them was
// removed; and with an alias of its address, since Raft wants the addresses of all members to be
// different. The node gets its own address last.
func (g *Group) readmit(ctx context.Context, d *decision) error {
	if g.index == 0 {
		isMember := func(id string) bool { return hasID(d.members, Peer{Node: d.Node, ID: id}.ServerID()) }
		if err := g.checkForgotten(d.Node, slices.DeleteFunc(slices.Clone(d.former), isMember)...); err != nil {
			return err
		}
	}
	old := slices.IndexFunc(d.members, func(m raft.Server) bool {
		o := peerOf(m)
		return o.Node == d.Node && slices.Contains(d.former, o.ID)
	})
	switch added := hasID(d.members, d.ServerID()); {
	case old < 0 && !added:
		if err := g.checkRemoved(ctx, d.Peer, d.former...); err != nil {
			return err
		}
		return fmt.Errorf("%w: node %s by a former ID", base.ErrNotFound, d.Node)
	case old < 0:
		return g.addLearner(ctx, d)
	case !added:
		if err := g.reconfigure(func() raft.Future { return g.raft.AddNonvoter(d.ServerID(), Alias(d.Peer), d.index, configTimeout) }); err != nil {
			return err
		}
	default:
		if err := g.reconfigure(func() raft.Future { return g.raft.RemoveServer(d.members[old].ID, d.index, configTimeout) }); err != nil {
			return err
		}
	}
	return errReconfigured // Change goes on with the next step
}
