package cluster

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// Leaders are spread over the nodes: of the nodes that vote, in the order of
// their names, each has its turn to be at home in a shard. A shard that was transferred by hand is
// at home where it was transferred to, until that is undone; the shard stores it. A node that leads
// a shard that is at home elsewhere hands it over when the other one is there, has what it takes,
// is not drained, and has not failed too often; that is looked at some time after the leaders have
// changed, for the nodes to have settled, and again as long as it is not so.
const (
	settleTime   = 2 * time.Second
	balanceEvery = 5 * time.Second
)

// balance hands over what is at home elsewhere, until quit is closed.
func (n *Node) balance(quit <-chan struct{}) {
	t := time.NewTimer(settleTime)
	defer t.Stop()
	for {
		change := n.routes.next()
		if left, missing := n.homing(), n.learnRemovals(); left || missing {
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
// possible now. It reports whether some are not at home.
func (n *Node) homing() (left bool) {
	looks := looksAtDrained{node: n, seen: map[raft.ServerID]bool{n.self.ServerID(): n.drained()}}
	for _, g := range n.groups {
		if !g.leads() {
			continue
		}
		members, err := g.members()
		if err != nil {
			continue
		}
		to, home := homeNode(members, g.index, *g.placement.Load(), looks.drained)
		left = left || !home || to.ID != n.self.ServerID()
		switch {
		case looks.drained(raft.Server{ID: n.self.ServerID()}):
			err = g.handOver()
		case to.ID == "" || to.ID == n.self.ServerID() || n.failures.distrusts(to.ID):
			continue
		default:
			err = g.transfer(to)
		}
		if err != nil && !errors.Is(err, base.ErrCannotLead) {
			n.log.Info("shard stays", "shard", g.index, "home", to.ID, "err", err)
		}
	}
	return left
}

// looksAtDrained is what nodes have said of whether they are drained; one that does not answer is
// not.
type looksAtDrained struct {
	node *Node
	seen map[raft.ServerID]bool
}

func (l looksAtDrained) drained(m raft.Server) bool {
	is, ok := l.seen[m.ID]
	if !ok {
		ctx, cancel := context.WithTimeout(l.node.ctx, l.node.c.ElectionTimeout)
		defer cancel()
		states, err := l.node.stateOf(ctx, peerOf(m))
		is = err == nil && len(states) > 0 && states[0].Drained
		l.seen[m.ID] = is
	}
	return is
}

// homeNode is the node that is to lead a shard, with an ID if there is any. home: it is not only
// while another node is drained.
func homeNode(members []raft.Server, shard int, placement string, drained func(raft.Server) bool) (to raft.Server, home bool) {
	voters := slices.DeleteFunc(slices.Clone(members), func(m raft.Server) bool { return m.Suffrage != raft.Voter })
	if len(voters) == 0 {
		return raft.Server{}, true
	}
	slices.SortFunc(voters, func(a, b raft.Server) int { return cmp.Compare(a.ID, b.ID) })
	to = voters[shard%len(voters)]
	if at := slices.IndexFunc(voters, func(m raft.Server) bool { return peerOf(m).Node == placement }); at >= 0 {
		to = voters[at]
	}
	if !drained(to) {
		return to, true
	}
	rest := slices.DeleteFunc(voters, drained)
	if len(rest) == 0 {
		return raft.Server{}, false
	}
	return rest[shard%len(rest)], false
}
