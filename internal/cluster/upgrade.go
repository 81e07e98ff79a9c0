package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// A cluster is upgraded node by node, so its nodes run different builds meanwhile, which know
// different formats (manifest.Format). Each shard has a format, which is stored in its store and
// thus replicated, and all of its nodes write entries, keys and snapshots in it. The leader of a
// shard raises it, by an entry, when every member of the group runs a build that knows the next
// one. Members that are away count with the last format that they reported, since the entries that
// they will get are in the log by now.
//
// The manifest of a node has the latest format that the node may have stored, so that an older
// build refuses the directory, and this node requires the others to know it (peer.Formats). It also
// selects Pebble's format when a store, or the log, is opened.
//
// Invariant: no data of a format is sent to a node, nor stored by it, before its manifest has that
// format. A node that raises a shard requires the format before it applies the entry, which ends
// the connections over which Raft sends to others; a node that accepts the next one writes its
// manifest first.

// upgradeEvery is how often the leader of a shard that could rise asks the members for their
// formats.
const upgradeEvery = time.Second

// Format is the latest format that the node may have stored.
func (n *Node) Format() int {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	return n.c.Directory.Format
}

// AdoptFormat must be called before a store with a format is used, or an entry that raises it is
// applied. After an error neither may be done.
func (g *Group) AdoptFormat(format int) error {
	if err := g.node.adoptFormat(format); err != nil {
		return err
	}
	g.format.Store(int32(format))
	return nil
}

// Format is the format of the shard, 0 if it has none yet. Later proposals may use it.
func (g *Group) Format() int { return int(g.format.Load()) }

// AwaitFormat is AdoptFormat for an entry that is being applied: on a full disk it waits for room,
// as the store does, until the group fails or the node is about to be closed.
func (g *Group) AwaitFormat(format int) error {
	return g.node.awaitRoom(func() error {
		if err := g.Failure(); err != nil {
			return err
		}
		return g.AdoptFormat(format)
	})
}

// awaitRoom writes the manifest, again and again while the disk has no room for it, until the node
// is about to be closed. A node that is not open, but recovered, does not wait.
func (n *Node) awaitRoom(write func() error) error {
	var full error
	err := n.poll(n.membership.ctx, func() (bool, error) {
		err := write()
		if !failstop.IsNoSpace(err) || n.peer == nil {
			return true, err
		}
		if full == nil {
			n.log.Warn("the manifest waits for room on the disk", "err", err)
		}
		full = err
		return false, nil
	})
	if errors.Is(err, base.ErrClosed) || errors.Is(err, context.Canceled) {
		return cmp.Or(full, err)
	}
	return err
}

// adoptFormat durably notes that the node may have stored data of a format, and requires the others
// to know it.
func (n *Node) adoptFormat(format int) error {
	if err := n.announceFormat(format); err != nil {
		return err
	}
	if n.peer != nil { // or else it begins with the format of the manifest
		n.peer.Require(format)
	}
	return nil
}

// announceFormat durably gives the manifest a format, unless it has a later one.
func (n *Node) announceFormat(format int) error {
	if format > n.c.Newest {
		return fmt.Errorf("%w: %d, this version knows %d", base.ErrFormat, format, n.c.Newest)
	}
	if format <= n.Format() {
		return nil // no wait for other changes
	}
	before := 0
	err := n.changeManifest(func(d *manifest.Directory) (bool, error) {
		raises := format > d.Format
		if raises {
			before, d.Format = d.Format, format
		}
		return raises, nil
	})
	if err == nil && before > 0 {
		n.log.Info("format raised", "from", before, "to", format)
	}
	return err
}

// upgrade raises the shards that this node leads to the newest format of its build, until all have
// it, or quit is closed.
func (n *Node) upgrade(quit <-chan struct{}) {
	t := time.NewTicker(upgradeEvery)
	defer t.Stop()
	var waiting string                      // for these nodes
	failed := make([]string, len(n.groups)) // last errors of the shards
	for slices.ContainsFunc(n.groups, (*Group).outdated) {
		select {
		case <-quit:
			return
		case <-t.C:
		}
		var behind []string
		for _, g := range n.groups {
			if !g.outdated() || !g.leads() {
				continue
			}
			term := g.raft.CurrentTerm()
			nodes, err := g.behind()
			if err == nil && len(nodes) == 0 {
				err = g.raise(term, n.c.Newest)
			}
			if err != nil && err.Error() != failed[g.index] {
				failed[g.index] = err.Error()
				n.log.Info("format not raised", "shard", g.index, "err", err)
			}
			behind = append(behind, nodes...)
		}
		slices.Sort(behind)
		if now := strings.Join(slices.Compact(behind), ", "); now != waiting {
			waiting = now
			n.log.Info("format rises when these nodes have been upgraded", "format", n.c.Newest, "nodes", waiting)
		}
	}
}

// raise raises the shard, which this node has led in a term. The manifest comes first: otherwise
// the shard would wait for room while it applies the entry. After that the format never goes back,
// so raise needs the lead, as far as this node knows, and a full disk is found before there is an
// entry.
func (g *Group) raise(term uint64, format int) error {
	if err := g.isIn(term); err != nil {
		return err
	}
	if !g.leads() {
		return base.ErrNotLeader
	}
	if err := g.node.adoptFormat(format); err != nil {
		return err
	}
	return g.machine.Raise(term, format)
}

// outdated reports whether the shard can still rise.
func (g *Group) outdated() bool { return int(g.format.Load()) < g.node.c.Newest && g.Failure() == nil }

// behind are the members of the group that run an older build than this node, as far as is known.
func (g *Group) behind() (nodes []string, err error) {
	ctx, cancel := context.WithTimeout(g.node.membership.ctx, statusTimeout)
	defer cancel()
	members, err := g.members()
	for _, m := range members {
		if g.node.newestOf(ctx, m) < g.node.c.Newest {
			nodes = append(nodes, peerOf(m).Node)
		}
	}
	return nodes, err
}

// newestOf is the newest format that a member knows, or knew in its last report.
func (n *Node) newestOf(ctx context.Context, m raft.Server) int {
	p := peerOf(m)
	states, err := n.stateOf(ctx, p)
	if err == nil && len(states) > 0 {
		return states[0].Newest
	}
	to, err := p.target()
	if err != nil {
		return 0
	}
	return n.peer.NewestOf(to.ID)
}

// formatOfFounders is the first format of a cluster: the newest that all founders know, as far as
// this one can tell.
func (n *Node) formatOfFounders(founders []manifest.Founder) int {
	format := n.c.Newest
	for _, f := range founders {
		if id, err := peer.ParseID(f.ID); err == nil && f.ID != n.self.ID {
			format = min(format, n.peer.NewestOf(id))
		}
	}
	return max(format, manifest.OldestOfNodes)
}
