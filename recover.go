package codeq

import (
	"errors"
	"fmt"

	"github.com/hashicorp/raft"

	"codeq/internal/manifest"
)

// RecoverCluster has a node go on without a majority of its cluster, which is
// lost for good: in its directory, which must be closed, the nodes in
// opts.Cluster.Peers become the members of every shard; this one must be among
// them, or is added. Then the node is opened as ever. If several nodes are left,
// recover each of them with the same Peers, or recover the one that is furthest
// (ClusterStatus shows LastIndex) alone, and have the others join it under new
// names with empty directories.
//
// It is the last resort. What was acknowledged is in the logs of a majority; if
// the nodes that are left lack some of it, it is gone, and what they have in
// their logs without a majority's knowing becomes so.
func RecoverCluster(dir string, opts *Options) (err error) {
	defer public(&err)
	o, err := opts.withDefaults()
	if err != nil {
		return err
	}
	if o.Cluster == nil {
		return ErrNoCluster
	}
	d, err := manifest.Open(o.fs, dir, manifest.Want{NewShards: shardsForThisMachine(), Node: o.Cluster.Node})
	if err != nil {
		return err
	}
	if d.Creating {
		return errors.Join(fmt.Errorf("%w: %s is empty", ErrNotQueue, dir), d.Close())
	}
	if err := d.Take(o.AcceptCopy); err != nil {
		return errors.Join(fmt.Errorf("codeq: open %s: %w", dir, err), d.Close())
	}
	o.Shards = d.Shards
	q := newQueue(o, d)
	n := q.newNode()
	if err = n.openReplicas(); err == nil {
		for _, r := range q.replicas {
			if err = n.recover(r); err != nil {
				err = fmt.Errorf("codeq: recover shard %d of %s: %w", r.index, dir, err)
				break
			}
		}
	}
	return errors.Join(err, n.closeLogs(), q.closeFiles())
}

func (n *node) recover(r *replica) error {
	logs, votes, err := n.stores(r)
	if err != nil {
		return err
	}
	logger := raftLogger(n.log)
	_, trans := raft.NewInmemTransport(raft.ServerAddress(n.self.Address)) // talks to nobody
	return errors.Join(raft.RecoverCluster(
		n.raftConfig(logger), &stateMachine{replica: r}, logs, votes, r.snapshots, trans, n.founders(),
	), trans.Close())
}
