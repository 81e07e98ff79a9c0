package cluster

import (
	"context"
	"slices"

	"github.com/hashicorp/raft"
)

// Raft's followers stand for election when they have had no message of a leader for
// HeartbeatTimeout. Three kinds of nodes do not wait: the founder of a cluster (standFirst), the
// only voter of a group (standAlone), and a removed node when others need its vote (standIn).

// standFirst makes this node the first leader of all groups of the cluster that it founds, as soon
// as a majority of the founders has joined. No other node can lead before: the founders learn the
// members of the groups from this one.
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

// standAlone makes a node lead, when it is opened, the groups without another voter.
func (n *Node) standAlone() {
	for _, g := range n.groups {
		self := raft.Server{Suffrage: raft.Voter, ID: n.self.ServerID(), Address: raft.ServerAddress(n.self.Address)}
		if members, err := g.members(); err == nil && slices.Equal(members, []raft.Server{self}) {
			g.askSelf()
		}
	}
}

// A leader that removes itself, and loses the others before they have the entry of its removal, may
// be the only node that can be elected: the others, which have not got the removal, may need its
// vote, and it refuses them, as their logs are shorter. The algorithm allows such a node to stand
// for election (Ongaro, "Consensus: Bridging Theory and Practice", 4.2.2); Raft's followers do not
// stand. So such a node stands when it has refused a candidate. It has no vote of its own, leads
// until the others have the entry, and steps down then.

// standIn makes this node stand for election if it is not a member as far as it knows, has refused
// a candidate with the given last entry, and can reach a majority of the members, but neither a
// leader of the shard nor a follower of one.
func (g *Group) standIn(term, index uint64) {
	r := g.log.raft.Load()
	if r == nil || r.State() != raft.Follower || !g.outgrew(r, term, index) || !g.standing.CompareAndSwap(false, true) {
		return
	}
	g.node.run("candidacy for others", func() {
		defer g.standing.Store(false)
		if g.node.Status(g.node.membership.ctx)[g.index].lacksLeader(g.node.c.ElectionTimeout) && g.outgrew(r, term, index) {
			g.node.log.Info("stands for election although it is not a member", "shard", g.index)
			g.askSelf()
		}
	}, nil)
}

// outgrew reports whether the log of this node says that the node is not a member, and is ahead of
// a log with the given last entry. A directory that may have lost data proves nothing.
func (g *Group) outgrew(r *raft.Raft, term, index uint64) bool {
	members := r.GetConfiguration().Configuration().Servers
	if len(members) == 0 || hasID(members, g.node.self.ServerID()) || len(g.node.former()) > 0 {
		return false
	}
	var last raft.Log
	if g.log.GetLog(r.LastIndex(), &last) != nil {
		return false // the last entry of a snapshot is committed
	}
	return last.Term > term || last.Term == term && last.Index > index
}

// askSelf makes Raft, if it follows no leader, stand for election at once, without a pre-vote.
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
