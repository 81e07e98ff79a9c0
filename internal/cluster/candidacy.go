package cluster

import (
	"context"
	"slices"

	"github.com/hashicorp/raft"
)

// Raft's followers stand for election when they have heard of no leader for HeartbeatTimeout. Here
// is who need not wait: the founder of a cluster (standFirst), a node that is the only one that
// votes (standAlone), and one that others need although it is no member (standIn).

// standFirst lets this node lead all groups of the cluster that it founds as soon as a majority of
// the founders is part of it. Nobody else can: they hear from it of which members the groups are.
func (n *Node) standFirst() {
	ctx, cancel := context.WithTimeout(n.membership.ctx, n.c.HeartbeatTimeout/2) // followers wait longer
	defer cancel()
	founders := n.founders()
	if n.poll(ctx, func() (bool, error) {
		adopted := 1
		for _, a := range n.introduceAll(ctx, founders) {
			if a.err == nil && a.Cluster == n.Cluster() {
				adopted++
			}
		}
		return adopted > len(founders)/2, nil
	}) != nil {
		return
	}
	for _, g := range n.groups {
		g.askSelf()
	}
}

// standAlone lets a node that is opened lead the groups in which nobody else votes.
func (n *Node) standAlone() {
	for _, g := range n.groups {
		self := raft.Server{Suffrage: raft.Voter, ID: n.self.ServerID(), Address: raft.ServerAddress(n.self.Address)}
		if members, err := g.members(); err == nil && slices.Equal(members, []raft.Server{self}) {
			g.askSelf()
		}
	}
}

// A leader that removes itself, and loses the others before they have the entry that says so, may
// be the only one that can be elected: if the others, who know nothing of the removal, need its
// vote, they do not get it, as their logs are shorter. The algorithm lets such a node stand
// (Ongaro, "Consensus: Bridging Theory and Practice", 4.2.2), Raft's followers do not. So it stands
// in if another one asks in vain for its vote. It has no vote of its own, leads until the others
// have the entry, and ends with that.

// standIn lets this node stand for election if it is no member as far as it knows, refuses a
// candidate whose last entry is given, and can reach a majority of the members, but nobody that
// leads the shard, or follows who does.
func (g *Group) standIn(term, index uint64) {
	r := g.log.raft.Load()
	if r == nil || r.State() != raft.Follower || !g.outgrew(r, term, index) || !g.standing.CompareAndSwap(false, true) {
		return
	}
	g.node.background.Go(func() {
		g.node.contain("candidacy for others", func() {
			defer g.standing.Store(false)
			if g.node.Status(g.node.membership.ctx)[g.index].lacksLeader(g.node.c.ElectionTimeout) && g.outgrew(r, term, index) {
				g.node.log.Info("stands for election although it is not a member", "shard", g.index)
				g.askSelf()
			}
		}, nil)
	})
}

// outgrew reports whether the log of this node says that it is no member, and is ahead of one whose
// last entry is given. Of what a directory has that may have lost something, nothing follows.
func (g *Group) outgrew(r *raft.Raft, term, index uint64) bool {
	members := r.GetConfiguration().Configuration().Servers
	if len(members) == 0 || hasID(members, g.node.self.ServerID()) || len(g.node.former()) > 0 {
		return false
	}
	var last raft.Log
	if g.log.GetLog(r.LastIndex(), &last) != nil {
		return false // what a snapshot ends with is committed
	}
	return last.Term > term || last.Term == term && last.Index > index
}

// askSelf lets Raft, if it follows nobody, stand for election at once, without the question of
// whether it would be elected.
func (g *Group) askSelf() {
	if g.raft.State() != raft.Follower || g.HasLeader() {
		return
	}
	ctx, cancel := context.WithTimeout(g.node.ctx, g.node.c.ElectionTimeout)
	defer cancel()
	answer := make(chan raft.RPCResponse, 1)
	g.Receive(raft.RPC{Command: &raft.TimeoutNowRequest{RPCHeader: g.transport.header()}, RespChan: answer})
	select {
	case <-answer:
	case <-ctx.Done():
	}
}
