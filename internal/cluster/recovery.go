package cluster

import (
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// Recover makes a node that is not open go on alone, without a majority of its cluster: it becomes
// the only member of a new one. No other goroutine may use the node. If it fails, or the process
// ends meanwhile, it can be called again.
func (n *Node) Recover() error {
	err := n.openStores()
	var all []keptBy
	if err == nil {
		all, err = n.kept()
	}
	if err == nil {
		// Lost nodes that come back belong to another cluster from now on.
		d := n.c.Directory
		d.Cluster, d.Founders, d.Former, d.Seen = manifest.NewID(), nil, nil, nil
		err = d.Write()
	}
	ends := make([]Position, len(n.groups))
	err = n.eachUntil(err, func(i int, g *Group) (err error) {
		ends[i], err = g.replay(all[i].logs)
		return err
	})
	if err == nil {
		err = n.c.Reconcile(true) // each shard may have lost other entries
	}
	err = n.eachUntil(err, func(i int, g *Group) error { return g.recover(ends[i], all[i].logs, all[i].votes) })
	n.cancel()
	n.background.Wait()
	return errors.Join(err, n.closeLogs())
}

// eachUntil calls do, a step of the recovery, for one group after the other until there is an
// error.
func (n *Node) eachUntil(err error, do func(i int, g *Group) error) error {
	for i, g := range n.groups {
		if err != nil {
			break
		}
		if err = do(i, g); err != nil {
			err = fmt.Errorf("codeq: recover shard %d of %s: %w", g.index, n.c.Directory.Path, damageOf(err))
		}
	}
	return err
}

// keptBy is the Raft storage of a group.
type keptBy struct {
	logs  *groupLog
	votes *groupVotes
}

// kept opens the Raft storage of the groups. It fails if all of them are empty.
func (n *Node) kept() (all []keptBy, err error) {
	blank := true
	for _, g := range n.groups {
		var k keptBy
		if k.logs, k.votes, err = g.stores(); err != nil {
			return nil, err
		}
		last, err := k.logs.LastIndex()
		if err != nil {
			return nil, err
		}
		blank = blank && last == 0 && g.Applied() == 0 && k.logs.snapshot == (Position{})
		all = append(all, k)
	}
	if blank {
		return nil, fmt.Errorf("%w: recover %s: nothing was ever stored in it", base.ErrNotMember, n.c.Directory.Path)
	}
	return all, nil
}

// recover makes a snapshot of the store with the new configuration; the log begins anew from it.
// All later proposals have an index and term after end, the last position that the node has stored.
func (g *Group) recover(end Position, logs *groupLog, votes *groupVotes) error {
	if end == (Position{}) {
		return errors.New("nothing of it was ever stored here")
	}
	if err := g.beginAt(end, votes); err != nil {
		return err
	}
	first, last, err := logs.bounds()
	if err != nil {
		return err
	}
	return logs.LogStore.DeleteRange(first, last)
}

// beginAt makes a snapshot of the store, the begin of a cluster of this node alone.
func (g *Group) beginAt(end Position, votes *groupVotes) error {
	if term, err := votes.GetUint64([]byte(keyCurrentTerm)); err != nil {
		return err
	} else if term < end.Term {
		if err := votes.SetUint64([]byte(keyCurrentTerm), end.Term); err != nil {
			return err
		}
	}
	sink, err := g.snapshots.Create(raft.SnapshotVersionMax, end.Index, end.Term, g.node.alone(), end.Index, nil)
	if err != nil {
		return err
	}
	state, err := fsm{g}.Snapshot()
	if err == nil {
		err = state.Persist(sink)
	}
	if err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}

// replay applies the log entries after the store. The applied index decides: log entries that do
// not follow it are dropped. No index or term that the node has stored is after the returned
// position.
func (g *Group) replay(logs *groupLog) (end Position, err error) {
	end = g.applied.get()
	if logs.snapshot.Index > end.Index {
		end = logs.snapshot // the entries in between have changed nothing
	}
	first, last, err := logs.bounds()
	if err != nil || last == 0 {
		return end, err
	}
	at, err := logs.position(end.Index)
	if err != nil {
		return end, err
	}
	if at == end || first == end.Index+1 {
		g.replayed = last
		for index := end.Index + 1; index <= last; index++ {
			var l raft.Log
			if err := logs.LogStore.GetLog(index, &l); err != nil {
				return end, err
			}
			if l.Type == raft.LogCommand {
				fsm{g}.Apply(&l)
			}
			if err := g.Failure(); err != nil {
				return end, err
			}
		}
	} else if last > end.Index {
		g.node.log.Warn("log dropped", "shard", g.index, "first", first, "last", last, "store", end)
	}
	if at, err = logs.position(last); err != nil {
		return end, err
	}
	return Position{max(end.Index, at.Index), max(end.Term, at.Term)}, nil
}

// alone is the configuration of a cluster of this node alone.
func (n *Node) alone() raft.Configuration {
	others := func(p Peer) bool { return p.Node != n.self.Node }
	return configurationOf(foundersOf(slices.DeleteFunc(n.founders(), others)))
}
