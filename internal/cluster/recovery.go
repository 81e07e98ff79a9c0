package cluster

import (
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"

	"codeq/internal/manifest"
)

// Recover lets a node that is not open go on without a majority of its cluster: it becomes the only
// member of a new one. Nobody else may use the node.
func (n *Node) Recover() error {
	err := n.openStores()
	if err == nil {
		// Nodes that were lost, and come back, are of another cluster from now on.
		n.c.Directory.Cluster, n.c.Directory.Founders = manifest.NewID(), nil
		err = n.c.Directory.Write()
	}
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
	logger := newRaftLogger(g.node.log)
	self := g.node.founders()
	self = slices.DeleteFunc(self, func(p Peer) bool { return p.Node != g.node.self.Node })
	members := configurationOf(foundersOf(self))
	_, trans := raft.NewInmemTransport(raft.ServerAddress(g.node.self.Address)) // talks to nobody
	err = raft.RecoverCluster(g.node.raftConfig(logger), fsm{g}, logs, votes, g.snapshots, trans, members)
	if failure := g.Failure(); failure != nil {
		err = failure // of which the error of Raft has the text only
	}
	return errors.Join(err, trans.Close())
}
