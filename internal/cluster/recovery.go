package cluster

import (
	"errors"
	"fmt"

	"github.com/hashicorp/raft"
)

// Recover lets a node that is not open go on without a majority of its cluster: Config.Peers, and
// this node, become the members of every group. Nobody else may use the node.
func (n *Node) Recover() error {
	err := n.openStores()
	for _, g := range n.groups {
		if err != nil {
			break
		}
		if err = g.recover(); err != nil {
			err = fmt.Errorf("codeq: recover shard %d of %s: %w", g.index, n.c.Directory.Path, err)
		}
	}
	n.cancel()
	n.background.Wait()
	return errors.Join(err, n.closeLogs())
}

func (g *Group) recover() error {
	logs, votes, err := g.stores()
	if err != nil {
		return err
	}
	logger := raftLogger(g.node.log)
	_, trans := raft.NewInmemTransport(raft.ServerAddress(g.node.self.Address)) // talks to nobody
	err = raft.RecoverCluster(g.node.raftConfig(logger), fsm{g}, logs, votes, g.snapshots, trans, g.node.founders())
	if failure := g.Failure(); failure != nil {
		err = failure // of which the error of Raft has the text only
	}
	return errors.Join(err, trans.Close())
}
