package cluster

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// Leaders are spread over the nodes: of the nodes that vote, in the order of
// their names, each has its turn to be at home in a shard. A node that leads a
// shard that is at home elsewhere hands it over when the other one is there and
// has what it takes; that is looked at some time after the leaders have changed,
// for the nodes to have settled, and again as long as it is not so.
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
// possible now. It reports whether some stay.
func (n *Node) homing() (left bool) {
	for _, g := range n.groups {
		if !g.leads() {
			continue
		}
		members, err := g.members()
		if err != nil {
			continue
		}
		home, ok := homeNode(members, g.index)
		if !ok || home.ID == n.self.ServerID() {
			continue
		}
		left = true
		err = g.transfer(home)
		if err != nil && !errors.Is(err, errOffered) && !errors.Is(err, errUnfit) {
			n.log.Info("shard stays", "shard", g.index, "home", home.ID, "err", err)
		}
	}
	return left
}

// homeNode is the node that is to lead a shard.
func homeNode(members []raft.Server, shard int) (home raft.Server, ok bool) {
	voters := slices.DeleteFunc(slices.Clone(members), func(m raft.Server) bool { return m.Suffrage != raft.Voter })
	if len(voters) == 0 {
		return raft.Server{}, false
	}
	slices.SortFunc(voters, func(a, b raft.Server) int { return cmp.Compare(a.ID, b.ID) })
	return voters[shard%len(voters)], true
}
