package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// Add makes a node part of the cluster: in the group of every shard it first follows, and votes
// when it has caught up.
func (n *Node) Add(ctx context.Context, p Peer) error {
	j, err := n.invite(ctx, p)
	if err != nil {
		return err
	}
	return n.admit(ctx, j)
}

// invite makes a node that is to be added one of this cluster, and returns it with its IDs. It waits
// for the node to be there.
func (n *Node) invite(ctx context.Context, p Peer) (joining, error) {
	j := joining{Peer: p, Join: true}
	var away error // why the node has not answered, the last time
	err := n.poll(ctx, func() (bool, error) {
		i, err := n.introduce(ctx, p)
		var refused *peer.RefusedError
		if errors.As(err, &refused) {
			return false, refusal(err)
		}
		if away = err; err != nil {
			return false, nil
		}
		if i.Cluster != "" && i.Cluster != n.Cluster() {
			return false, fmt.Errorf("%w: node %q is of cluster %s, not %s", base.ErrNotMember, p.Node, i.Cluster, n.Cluster())
		}
		j.ID, j.Former = i.ID, i.Former
		known := n.known()
		if err := cmp.Or(namesake(known, j.Peer), addressee(known, j.Peer)); err != nil || i.Cluster != "" {
			return true, err
		}
		_, err = n.peer.Introduce(ctx, peer.Target{Name: p.Node, Address: p.Address}, kindAdopt, []byte(n.Cluster()))
		if err != nil {
			return false, n.callError(ctx, err)
		}
		return true, nil
	})
	if err != nil && away != nil {
		err = fmt.Errorf("add node %s: %w: %w", p.Node, err, away)
	}
	return j, err
}

// refusal is what the refusal of a connection says to the application.
func refusal(err error) error {
	var refused *peer.RefusedError
	switch {
	case !errors.As(err, &refused):
		return err
	case refused.Reason == peer.RefusedGroups:
		return fmt.Errorf("%w: %w", base.ErrShardCount, err)
	case refused.Reason == peer.RefusedCluster, refused.Reason == peer.RefusedNode:
		return fmt.Errorf("%w: %w", base.ErrNotMember, err)
	case refused.Reason == peer.RefusedVersion, refused.Reason == peer.RefusedFormat:
		return fmt.Errorf("%w: %w", base.ErrFormat, err)
	}
	return err
}

// addressee returns an error if another member has the address of a node.
func addressee(members []Peer, p Peer) error {
	at := slices.IndexFunc(members, func(m Peer) bool { return m.Address == p.Address && m.ID != p.ID })
	if at < 0 {
		return nil
	}
	return fmt.Errorf("%w: address %s is that of node %q, which is to be removed first, or to be added with another address",
		base.ErrNotMember, p.Address, members[at].Node)
}

func (n *Node) add(ctx context.Context, p Peer) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, AddNode, p); err != nil {
			return fmt.Errorf("add node %s to shard %d: %w", p.Node, i, err)
		}
	}
	return n.giveVotes(ctx, p)
}

// giveVotes lets a member vote in each shard, as soon as it has caught up.
func (n *Node) giveVotes(ctx context.Context, p Peer) error {
	for i := range n.groups {
		err := n.awaitCatchUp(ctx, i, p)
		if err == nil {
			err = n.c.Leaders.Change(ctx, i, GiveVote, p)
		}
		if err != nil {
			return fmt.Errorf("give node %s a vote in shard %d: %w", p.Node, i, err)
		}
	}
	return nil
}

// Remove takes a node out of the cluster. Before the first change it makes sure that all shards can
// do without the node.
//
// Removals follow each other, whoever asks for them: each is decided by the first shard, which
// refuses the next one until all shards have made the last. If two nodes were removed from different
// shards first, each shard could lose its majority to the other removal.
//
// A message that adds the node may still be under way. So the first shard remembers the directories
// that it has removed, and takes none of them back; and the other shards add only what is a member of
// the first one.
func (n *Node) Remove(ctx context.Context, node string) error {
	finished, err := n.finishRemovals(ctx)
	if err != nil || slices.Contains(finished, node) {
		return err
	}
	if err := n.check(ctx, CheckRemoval, node); err != nil {
		return err
	}
	if err := n.remove(ctx, node); err != nil {
		return err
	}
	return n.forget(ctx, node)
}

// remove removes a node from all shards.
func (n *Node) remove(ctx context.Context, node string) error {
	for i := range n.groups {
		if err := n.c.Leaders.Change(ctx, i, RemoveNode, Peer{Node: node}); err != nil {
			if i > 0 {
				err = halfway(err)
			}
			return fmt.Errorf("remove node %s from shard %d: %w", node, i, err)
		}
	}
	return nil
}

// halfway is the outcome of what has begun, and has then failed: it is not one that says that nothing
// was done.
func halfway(err error) error {
	if errors.Is(err, base.ErrClosed) {
		return fmt.Errorf("%w: %v", base.ErrUncertain, err)
	}
	return fmt.Errorf("%w: %w", base.ErrUncertain, err)
}

// errForget: a node was removed.
var errForget = errors.New("the shard keeps what it knows of its produces")

// forget drops what the shards keep for a node that was removed.
func (n *Node) forget(ctx context.Context, node string) error {
	for i := range n.groups {
		if err := n.c.Leaders.Forget(ctx, i, node); err != nil {
			return fmt.Errorf("node %s was removed; shard %d: %w: %w", node, i, errForget, halfway(err))
		}
	}
	return nil
}

// finishRemovals removes the nodes that the first shard has removed, and others not yet, and returns
// their names.
func (n *Node) finishRemovals(ctx context.Context) (finished []string, err error) {
	shards := n.Status(ctx)
	for _, name := range removing(shards) {
		err := n.c.Leaders.Change(ctx, 0, CheckMember, Peer{Node: name})
		if err == nil {
			continue // this node did not know of it
		}
		if !errors.Is(err, base.ErrNotMember) {
			return finished, fmt.Errorf("remove node %s: %w", name, err)
		}
		if err = n.remove(ctx, name); err == nil {
			err = n.forget(ctx, name)
		}
		if err != nil {
			return finished, err
		}
		finished = append(finished, name)
	}
	return finished, nil
}

// removing is the nodes that shards still have although the first one does not, as far as the
// leaders are known.
func removing(shards []ShardStatus) (names []string) {
	if shards[0].Leader == "" {
		return nil
	}
	for _, sh := range shards[1:] {
		for _, r := range sh.Replicas {
			if sh.Leader != "" && !shards[0].has(r.Node) && !slices.Contains(names, r.Node) {
				names = append(names, r.Node)
			}
		}
	}
	return names
}

// ErrIsMember: a node is part of the cluster that is to take the place of another one.
var ErrIsMember = errors.New("a member already")

// Replace adds a node and then removes another one, if all shards can do without that one. A node at
// the address of the other one takes its place after the removal. There are as many nodes as before:
// one that votes already is refused.
func (n *Node) Replace(ctx context.Context, old string, p Peer) error {
	lacks := func(sh ShardStatus) bool {
		return sh.Leader == "" || !slices.ContainsFunc(sh.Replicas, func(r ReplicaStatus) bool { return r.Node == p.Node && r.Voter })
	}
	if old == p.Node || !slices.ContainsFunc(n.Status(ctx), lacks) {
		return ErrIsMember
	}
	if slices.ContainsFunc(n.known(), func(m Peer) bool { return m.Node == old && m.Address == p.Address }) {
		if err := n.Remove(ctx, old); err != nil {
			return err
		}
		return n.Add(ctx, p)
	}
	if err := n.check(ctx, CheckReplacement, old); err != nil {
		return err
	}
	if err := n.Add(ctx, p); err != nil {
		return err
	}
	return n.Remove(ctx, old)
}

// check asks the leaders of all shards whether a node, which at least one of them has, can be
// removed.
func (n *Node) check(ctx context.Context, how Change, node string) error {
	var unknown error
	known := false
	for i := range n.groups {
		switch err := n.c.Leaders.Change(ctx, i, how, Peer{Node: node}); {
		case err == nil:
			known = true
		case errors.Is(err, base.ErrNotMember):
			unknown = err
		default:
			return fmt.Errorf("remove node %s: %w", node, err)
		}
	}
	if known {
		return nil
	}
	return unknown
}

// Leave takes this node out of the cluster if that is asked for, and it is part of one. If other
// nodes leave, too, it waits for its turn.
func (n *Node) Leave() error {
	if !n.c.LeaveOnClose || n.Cluster() == "" {
		return nil
	}
	for members := len(n.groups) * len(n.known()); ; {
		left, err := n.tryLeave()
		waits := errors.Is(err, base.ErrNotLeader) || errors.Is(err, base.ErrUncertain)
		if !waits && left == len(n.groups) {
			// This is the last node: others that have just left may have yet to hear of it.
			time.Sleep(2 * n.c.ElectionTimeout)
		}
		if !waits || left >= members {
			return err
		}
		members = left // others have left meanwhile
	}
}

// tryLeave also returns how many members all shards have together. While it removes this node it asks
// the others whether that is done: another node may have finished it, and be about to be closed.
func (n *Node) tryLeave() (left int, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.CallTimeout)
	defer cancel()
	var removed bool
	var asking sync.WaitGroup
	asking.Go(func() {
		n.contain("question for the members", func() {
			_ = n.poll(ctx, func() (bool, error) {
				member, _ := n.membersOf(ctx)
				removed = !member
				return removed, nil
			}) // or the end of ctx
			if removed {
				cancel()
			}
		}, nil)
	})
	err = n.Remove(ctx, n.self.Node)
	cancel()
	asking.Wait()
	if removed || errors.Is(err, base.ErrNotMember) || errors.Is(err, errForget) {
		return 0, nil
	}
	_, left = n.membersOf(n.ctx)
	return left, err
}

// membersOf returns whether this node may be a member of a shard, and how many members all shards
// have together.
func (n *Node) membersOf(ctx context.Context) (member bool, all int) {
	for _, sh := range n.Status(ctx) {
		all += len(sh.Replicas)
		member = member || sh.Leader == "" || sh.has(n.self.Node)
	}
	return member, all
}

// CheckMember returns an error if this node is no member of any shard whose leader is known.
func (n *Node) CheckMember(shards []ShardStatus) error {
	led := slices.DeleteFunc(slices.Clone(shards), func(sh ShardStatus) bool { return sh.Leader == "" })
	if len(led) == 0 || slices.ContainsFunc(led, func(sh ShardStatus) bool { return sh.has(n.self.Node) }) {
		return nil
	}
	return RemovedError(led[0].Shard, n.self.Node)
}

// IsRemoved reports whether the group has a leader elsewhere, and this node is no member any more.
func (g *Group) IsRemoved() bool { return g.removed.Load() }

// learnRemovals asks the others about the groups that have no leader, as far as this node knows: who
// was removed hears nothing of it. It reports whether there are any.
func (n *Node) learnRemovals() bool {
	if !slices.ContainsFunc(n.groups, func(g *Group) bool { return !g.HasLeader() }) {
		return false
	}
	for i, sh := range n.Status(n.ctx) {
		g := n.groups[i]
		g.removed.Store(!g.HasLeader() && sh.Leader != "" && !sh.has(n.self.Node))
	}
	return true
}

// Change is a change of a group, or what must hold before one.
type Change byte

const (
	AddNode          Change = iota // as one that does not vote
	GiveVote                       // to a node that was added
	RemoveNode                     // for good
	MakeLeader                     // of a node; none: it undoes that
	CheckRemoval                   // whether a node can be removed
	CheckReplacement               // whether a node can be removed once another one votes
	CheckMember                    // whether a node is a member
	CheckLeader                    // whether a node can lead
	Readmit                        // a node whose directory had other IDs
	EndOfChanges
)

// ErrLastNode: a node cannot be removed as its group has no other.
var ErrLastNode = errors.New("the last node")

// errReconfigured: the group was changed in the meantime.
var errReconfigured = fmt.Errorf("%w: the members have changed", base.ErrNotLeader)

// configTimeout bounds how long a change of a group waits for the one before.
const configTimeout = 10 * time.Second

// Change changes the group, and tells settle the outcome, on a goroutine for which Close waits. It
// is called on the node that leads the group, before the Leader has ended. former are the IDs that
// the node's directory had.
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

// changeInTurn is change. What adds or removes a node is done one at a time: the addition of a node
// that the first shard has then removed comes before its removal here.
func (g *Group) changeInTurn(ctx context.Context, how Change, p Peer, former []string) error {
	switch how {
	case AddNode, Readmit, RemoveNode:
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
	at := slices.IndexFunc(members, func(m raft.Server) bool { return peerOf(m).Node == p.Node })
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
		return g.reconfigure(func() raft.Future { return g.raft.AddVoter(id, addr, index, configTimeout) })
	case CheckMember, CheckRemoval, CheckReplacement, RemoveNode:
		switch {
		case at < 0 && how != RemoveNode, how == CheckMember && !hasID(members, id):
			return fmt.Errorf("%w: node %q", base.ErrNotMember, p.Node)
		case at < 0 || how == CheckMember:
			return nil
		case g.index == 0:
			if names := removing(g.node.Status(ctx)); len(names) > 0 {
				return fmt.Errorf("%w: shard %d: nodes %q are being removed from other shards", base.ErrNotLeader, g.index, names)
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
		if id == g.node.self.ServerID() && g.handOver() == nil {
			// so that the next leader is asked
			return fmt.Errorf("%w: shard %d", base.ErrNotLeader, g.index)
		} // or else it leads until it has removed itself
		if g.index == 0 {
			if err := g.node.c.Leaders.Forget(ctx, g.index, string(id)); err != nil {
				return err
			}
		}
		err := g.reconfigure(func() raft.Future { return g.raft.RemoveServer(id, index, configTimeout) })
		if err == nil && len(rest) < len(members)-1 {
			return errReconfigured // it is being taken back, and there by another ID as well
		}
		return err
	case Readmit:
		return g.readmit(ctx, members, index, p, former)
	case MakeLeader, CheckLeader:
		switch {
		case p.Node == "":
			g.node.routes.changed() // for balance to look
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
	}
	return ErrMalformedCall
}

// hasID reports whether a directory is that of a member.
func hasID(members []raft.Server, id raft.ServerID) bool {
	return slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id })
}

// checkRemoved returns an error if the first shard has removed a node that is not there, by any of
// the IDs that its directory has had.
func (g *Group) checkRemoved(ctx context.Context, p Peer, former ...string) error {
	if g.index > 0 {
		return g.node.c.Leaders.Change(ctx, 0, CheckMember, p)
	}
	for _, id := range append(former, p.ID) {
		removed, err := g.machine.IsForgotten(string(Peer{Node: p.Node, ID: id}.ServerID()))
		if err != nil {
			return fmt.Errorf("%w: shard %d: %w", base.ErrNotLeader, g.index, err)
		}
		if removed {
			return fmt.Errorf("%w: node %q was removed from the cluster with its directory; it may be added again with an empty one",
				base.ErrNotMember, p.Node)
		}
	}
	return nil
}

// addLearner makes a node a member that does not vote, or lets a member have another address.
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
	if slices.Contains(members, raft.Server{Suffrage: raft.Voter, ID: id, Address: addr}) {
		return nil // it has been added before
	}
	return g.reconfigure(func() raft.Future { return g.raft.AddNonvoter(id, addr, index, configTimeout) })
}

// checkRest makes sure that the members that would be left, and so many newcomers, have a majority
// that answers: without it the group would have no leader any more.
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
				s, err := g.stateAt(ctx, m)
				if err == nil && s.Failed {
					err = errors.New("its replica has failed")
				}
				silent[i] = err
			}, func(err error) { silent[i] = err })
		})
	}
	asking.Wait()
	answers, need := newcomers, (len(voters)+newcomers)/2+1
	var why []string // texts: a node that cannot be asked is no error of the group
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
	return fmt.Errorf("%w: shard %d: %d of the %d that would be left have answered: %s", base.ErrNoMajority, g.index,
		answers, len(voters)+newcomers, strings.Join(why, "; "))
}

// reconfigure returns when Raft has changed the group.
func (g *Group) reconfigure(change func() raft.Future) error {
	if err := g.enter(); err != nil {
		return err
	}
	defer g.asking.leave()
	err := change().Error()
	if err == nil {
		return nil
	}
	if strings.HasPrefix(err.Error(), "configuration changed since") { // Raft has no better word for it
		return fmt.Errorf("%w: %w", errReconfigured, err)
	}
	if err = raftError(err); !errors.Is(err, base.ErrNotLeader) {
		err = fmt.Errorf("%w: %w", base.ErrUncertain, err)
	}
	return err
}

// members is the group of the shard as this node knows it.
func (g *Group) members() ([]raft.Server, error) {
	f := g.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, raftError(err)
	}
	return f.Configuration().Servers, nil
}

// HasMember reports whether a node is a member of the group, as the leader knows it.
// REQUIRES: this node leads the group, and has applied all that its predecessors have decided.
func (g *Group) HasMember(node string) (bool, error) {
	members, err := g.members()
	return slices.ContainsFunc(members, func(m raft.Server) bool { return peerOf(m).Node == node }), err
}

// How much a node may lack when it gets a vote, in entries, or leads, in messages.
const (
	closeBehind   = 256
	closeMessages = 4
)

// awaitCatchUp waits until a new node has nearly caught up with a shard.
func (n *Node) awaitCatchUp(ctx context.Context, shard int, p Peer) error {
	var unknown error // why the state of the new node was, the last time
	err := n.poll(ctx, func() (bool, error) {
		applied, err := n.c.Leaders.Applied(ctx, shard)
		if err != nil {
			return false, err
		}
		var states []replicaState
		states, unknown = n.stateOf(ctx, p)
		return unknown == nil && shard < len(states) && states[shard].Applied+closeBehind > applied, nil
	})
	if ctx.Err() != nil {
		return errors.Join(err, unknown)
	}
	return err
}

// join lets the nodes of the cluster add this one.
func (n *Node) join() error {
	if n.votes() {
		return n.checkCluster()
	}
	ctx, cancel := context.WithTimeout(n.ctx, joinTimeout)
	defer cancel()
	var by []Peer
	for again := n.NewPatience(); ; {
		var err error
		if by, err = n.chooseCluster(ctx); err == nil {
			break
		}
		if !errors.Is(err, errNotBegun) || !again.Wait(ctx, nil) {
			return fmt.Errorf("codeq: join the cluster: %w", err)
		}
	}
	var errs []error
	for _, p := range by {
		if err := n.joinBy(ctx, p, joining{Peer: n.self, Join: true}); err != nil {
			errs = append(errs, fmt.Errorf("node %q: %w", p.Node, err))
			continue
		}
		return n.poll(ctx, func() (bool, error) { return n.votes(), nil }) // until it knows
	}
	return fmt.Errorf("codeq: join the cluster: %w", errors.Join(errs...))
}

// checkCluster refuses a node that is part of a cluster, but not of that of its peers.
func (n *Node) checkCluster() error {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.HeartbeatTimeout/foundingShare)
	defer cancel()
	own, others, other := 0, 0, ""
	for _, a := range n.introduceAll(ctx, n.c.Peers) {
		switch {
		case a.err != nil || a.Cluster == "":
		case a.Cluster == n.Cluster():
			own++
		default:
			others, other = others+1, a.Cluster
		}
	}
	if others > own && 2*others >= len(n.c.Peers) {
		return fmt.Errorf("codeq: join the cluster: %w: node %q is of cluster %s, its peers are of %s",
			base.ErrNotMember, n.self.Node, n.Cluster(), other)
	}
	return nil
}

// errNotBegun: a cluster is about to be founded.
var errNotBegun = fmt.Errorf("%w: the cluster has not begun", base.ErrNotLeader)

// chooseCluster makes the node one of the cluster of its peers, and returns those that have
// answered. Half of them must be of one cluster: one address may be another cluster's by now.
func (n *Node) chooseCluster(ctx context.Context) (by []Peer, err error) {
	var errs []error
	of := make(map[string][]introduction) // by cluster
	peers := slices.DeleteFunc(slices.Clone(n.c.Peers), func(p Peer) bool { return p.Node == n.self.Node })
	for _, a := range n.introduceAll(ctx, peers) {
		switch {
		case a.err != nil:
			errs = append(errs, refusal(a.err))
		case a.Cluster == "":
			errs = append(errs, fmt.Errorf("node %q: %w", a.Node, errNotBegun))
		default:
			of[a.Cluster] = append(of[a.Cluster], a.introduction)
		}
	}
	for cluster, answers := range of {
		if len(answers) < len(peers)-len(answers) || len(of) > 1 && 2*len(answers) == len(peers) {
			continue
		}
		for _, i := range answers {
			if err := namesake(i.Members, n.self); err != nil {
				return nil, err
			}
			at := slices.IndexFunc(peers, func(p Peer) bool { return p.Node == i.Node })
			by = append(by, Peer{Node: i.Node, ID: i.ID, Address: peers[at].Address})
		}
		return by, n.adopt(cluster)
	}
	return nil, errors.Join(append(errs, fmt.Errorf("%w: less than half of its %d peers have answered, and are of one cluster",
		base.ErrNotLeader, len(peers)))...)
}

// joinBy lets a node of the cluster add this one.
func (n *Node) joinBy(ctx context.Context, p Peer, j joining) error {
	to, err := p.target()
	if err != nil {
		return err
	}
	if _, err = n.peer.Call(ctx, to, kindJoin, wire.AppendJSON(nil, j)); err != nil {
		return n.callError(ctx, err)
	}
	return nil
}

// joinTimeout bounds how long a new node waits to be part of a cluster.
const joinTimeout = 5 * time.Minute

// votes reports whether this node is a voter of every shard's group.
func (n *Node) votes() bool {
	for _, s := range n.state() {
		if !slices.Contains(s.Members, memberState{n.self, true}) {
			return false
		}
	}
	return true
}

// serveJoin adds the node that asks for it.
func (n *Node) serveJoin(r *peer.Request) error {
	var j joining
	if err := json.Unmarshal(r.Body, &j); err != nil || j.Node != r.From.Name || j.ID != r.From.ID.String() || j.Address == "" {
		return ErrMalformedCall
	}
	ctx, cancel := context.WithCancel(n.ctx)
	r.OnCancel(cancel)
	n.background.Go(func() {
		defer cancel()
		if err := n.guarded("joining of a node", func() error { return n.admit(ctx, j) }); err != nil {
			r.Fail(n.c.EncodeError(err))
			return
		}
		r.Reply(nil)
	})
	return nil
}
