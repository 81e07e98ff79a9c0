package cluster

import (
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
)

// A standalone queue becomes the first node of a cluster when it is opened as one: its stores get a
// position in logs that begin later, and the first snapshot of each group is the store, which other
// nodes get when they join. The only node of a cluster becomes a standalone queue when its stores
// have applied all of its logs.

// reconcile makes the stores of a standalone queue agree before a cluster begins from them: a power
// loss may have come since the queue was last open.
func (n *Node) reconcile() error {
	for _, g := range n.groups {
		if begins, err := g.beginsFromStore(); err != nil || !begins {
			return err
		}
	}
	if err := n.c.Reconcile(false); err != nil {
		return err
	}
	return n.c.Directory.Agree()
}

// beginFromStore begins the group when a standalone queue becomes a cluster.
func (g *Group) beginFromStore(votes *groupVotes) error {
	if begins, err := g.beginsFromStore(); err != nil || !begins {
		return err
	}
	g.log.snapshot = g.applied.get()
	return g.beginAt(g.log.snapshot, votes)
}

// beginsFromStore reports whether the group has yet to begin, from the store of a standalone queue.
func (g *Group) beginsFromStore() (bool, error) {
	last, err := g.log.LastIndex()
	return last == 0 && len(g.node.c.Directory.Founders) == 1 && g.Applied() > 0 && g.log.snapshot == (Position{}), err
}

// Dissolve makes a node that is not open a standalone queue, if it is the only member of its
// cluster. No other goroutine may use the node. If it fails, or the process ends meanwhile, it can
// be called again.
func (n *Node) Dissolve() error {
	err := n.openReplicas()
	for _, g := range n.groups {
		if err != nil {
			break
		}
		if err = g.dissolve(); err != nil {
			err = fmt.Errorf("shard %d: %w", g.index, damageOf(err))
		}
	}
	if err == nil {
		err = n.c.Directory.Leave()
	}
	n.cancel()
	n.background.Wait()
	return errors.Join(err, n.closeLogs())
}

// dissolve makes the store durable, with all entries of the log.
func (g *Group) dissolve() error {
	if begins, err := g.beginsFromStore(); err != nil {
		return err
	} else if begins { // there is no log yet
		return g.machine.Live().Flush()
	}
	members, err := g.latestMembers()
	if err != nil {
		return err
	}
	if len(members) == 1 && slices.Contains(g.node.c.Directory.Former, peerOf(members[0]).ID) {
		return fmt.Errorf("%w: node %q may lack that there are others; RecoverCluster lets it go on alone", base.ErrPowerLost, g.node.self.Node)
	}
	if len(members) != 1 || members[0].ID != g.node.self.ServerID() {
		return fmt.Errorf("%w: it is of node %q, which is not the only one of a cluster", base.ErrNotMember, g.node.self.Node)
	}
	if err := g.log.compare(); err != nil {
		return err
	}
	if _, err := g.replay(g.log); err != nil {
		return err
	}
	return g.machine.Live().Flush()
}

// latestMembers is the members by the last configuration that the node has stored. If that is this
// node alone, the configuration is in force: a leader that decided it needed this node for a
// majority of it, so no other node has to be asked.
func (g *Group) latestMembers() ([]raft.Server, error) {
	first, last, err := g.log.bounds()
	if err != nil {
		return nil, err
	}
	for index := last; index >= max(first, 1); index-- {
		var l raft.Log
		if _, err := g.log.GetHead(index, &l); err != nil {
			return nil, err
		}
		if l.Type != raft.LogConfiguration {
			continue
		}
		if err := g.log.LogStore.GetLog(index, &l); err != nil {
			return nil, err
		}
		return raft.DecodeConfiguration(l.Data).Servers, nil
	}
	snapshots, err := g.snapshots.List()
	if err != nil || len(snapshots) == 0 {
		return nil, err
	}
	return snapshots[0].Configuration.Servers, nil
}
