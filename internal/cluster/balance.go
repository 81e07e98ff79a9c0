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

// Leaders are spread over the nodes: the home of a shard is one of its voters, taken in turn in the
// order of their names. A shard that was transferred by hand has its home where it was transferred
// to, until that is undone; the shard stores it. A node that leads a shard with another home hands
// it over when the home node is up, has caught up, is not drained, and has not failed too often.
// Nodes check this some time after the leaders have changed, so that they have settled, and again
// as long as a shard is not at home.
const (
	settleTime   = 2 * time.Second
	balanceEvery = 5 * time.Second
)

// balance hands over the shards that have another home, until quit is closed.
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

// homing hands over the shards that have another home, as far as that is possible now. It reports
// whether some are not at home.
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
		case to.ID == "" || to.ID == n.self.ServerID() || n.crashes.distrusts(to.ID):
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

// looksAtDrained remembers which nodes are drained, by their answers; a node that does not answer
// counts as not drained.
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

// homeNode is the node that should lead a shard; without an ID if there is none. home is false if
// it has this role only while another node is drained.
func homeNode(members []raft.Server, shard int, placement string, drained func(raft.Server) bool) (to raft.Server, home bool) {
	voters := votersOf(members)
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
