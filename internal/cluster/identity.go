package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/manifest"
	"codeq/internal/peer"
)

// A node is a directory under a name. The ID of the directory is unique, so that a new directory
// under an old name is another node, without votes or acknowledgements; the name is for people. A
// cluster also has a random ID. Each connection names its cluster and the directory that it is
// meant for, and any other node refuses it; so a node never accepts the messages of another
// cluster, or those for the node that had its address before.

// ServerID is Raft's ID of the node: the ID of its directory. The name before it is a label, which
// also orders the members by name.
func (p Peer) ServerID() raft.ServerID { return raft.ServerID(p.Node + idSeparator + p.ID) }

const idSeparator = "/"

// Alias is an address in Raft of a node while another member has its real address. Raft sends
// nothing there, but a leader looks for the node until it has its own address, even if leaders
// change before: the node may know none of the other members.
func Alias(p Peer) raft.ServerAddress { return raft.ServerAddress(p.ID + aliasSeparator + p.Address) }

// isAlias reports whether the address in Raft of a member is an alias.
func isAlias(id raft.ServerID, address raft.ServerAddress) bool {
	return peerOf(raft.Server{ID: id, Address: address}).Address != string(address)
}

const aliasSeparator = "@"

// peerOf is the inverse of ServerID, and of Alias.
func peerOf(m raft.Server) Peer {
	p := Peer{Node: string(m.ID), Address: string(m.Address)}
	if at := strings.LastIndex(p.Node, idSeparator); at >= 0 {
		p.Node, p.ID = p.Node[:at], p.Node[at+len(idSeparator):]
		p.Address = strings.TrimPrefix(p.Address, p.ID+aliasSeparator)
	}
	return p
}

// target is the address of the node for a connection.
func (p Peer) target() (t peer.Target, err error) {
	t = peer.Target{Name: p.Node, Address: p.Address}
	t.ID, err = peer.ParseID(p.ID)
	return t, err
}

// membership is the state of the node in its cluster.
type membership struct {
	writing slowlock.Lock // held while the manifest is changed; mu is not held then
	mu      sync.Mutex    // guards the fields below, and the directory's manifest while the node is open
	waiting error         // why the node has no cluster yet, or is not taken back; nil: not known
	// suspects are the IDs of directories that may have lost acknowledged entries, by former ID.
	suspects  map[string]string
	searching atomic.Bool // a search for a member is under way

	ctx  context.Context // ends when the node is about to be closed
	stop context.CancelFunc
}

// changeManifest durably changes the manifest, unless change reports that there is nothing to do. A
// reader of the manifest meanwhile gets the version on the disk, and does not wait.
func (n *Node) changeManifest(change func(*manifest.Directory) (changed bool, err error)) error {
	return n.changeManifestUntil(context.Background(), change)
}

// changeManifestUntil is changeManifest, but waits for other changes only until ctx ends.
func (n *Node) changeManifestUntil(ctx context.Context, change func(*manifest.Directory) (changed bool, err error)) error {
	m := &n.membership
	if !m.writing.LockUntil(ctx.Done()) {
		return fmt.Errorf("%w: the manifest is being written", peer.ErrEarly)
	}
	defer m.writing.Unlock()
	m.mu.Lock()
	draft := n.c.Directory.Draft()
	m.mu.Unlock()
	if changed, err := change(draft); err != nil || !changed {
		return err
	}
	if err := draft.Write(); err != nil {
		return fmt.Errorf("codeq: write %s: %w", draft.Path, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n.c.Directory.Adopt(draft)
	return nil
}

// wait stores the reason why the node has no cluster yet, or is not taken back.
func (m *membership) wait(what string, why error, log *slog.Logger) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting == nil || m.waiting.Error() != why.Error() {
		log.Warn(what, "err", why)
	}
	m.waiting = why
}

// noLeader is the answer to a call while no leader of the shard is known.
func (g *Group) noLeader() error {
	m := &g.node.membership
	m.mu.Lock()
	d := g.node.c.Directory
	cluster, rejoining, waiting := d.Cluster, len(d.Former) > 0, m.waiting
	m.mu.Unlock()
	switch {
	case cluster != "" && g.removed.Load():
		return g.node.removedError(g.index)
	case cluster != "":
		why := fmt.Errorf("%w: shard %d", base.ErrNotLeader, g.index)
		if err := g.standstill(); err != nil {
			return fmt.Errorf("%w: %w", why, err)
		}
		if g.stalledFor() > 0 {
			return fmt.Errorf("%w: %w", why, g.stallError())
		}
		if rejoining && waiting != nil {
			return fmt.Errorf("%w: %w", why, waiting)
		}
		if members, err := g.members(); err == nil && len(members) == 0 {
			return fmt.Errorf("%w: this node has not heard yet of the shard's members, of cluster %s", why, cluster)
		}
		unreachable, format := g.unreachable()
		if format {
			why = fmt.Errorf("%w: %w", why, base.ErrFormat)
		}
		if unreachable != "" {
			why = fmt.Errorf("%w: %s", why, unreachable)
		}
		return g.explainMove(why)
	case waiting != nil:
		return fmt.Errorf("%w: %w", errNotBegun, waiting)
	}
	return errNotBegun
}

// unreachable lists the members that this node cannot connect to, with the reasons; format: a
// build, theirs or this node's, is too old.
func (g *Group) unreachable() (text string, format bool) {
	members, err := g.members()
	if err != nil {
		return "", false
	}
	var why []string
	for _, m := range members {
		p := peerOf(m)
		if to, err := p.target(); err == nil {
			if err := g.node.peer.Failure(to); err != nil {
				why = append(why, fmt.Sprintf("node %s: %v", p.Node, err))
				format = format || errors.Is(refusal(err), base.ErrFormat)
			}
		}
	}
	return strings.Join(why, "; "), format
}

// Cluster identifies the cluster of the node; "": it has none yet.
func (n *Node) Cluster() string {
	n.membership.mu.Lock()
	defer n.membership.mu.Unlock()
	return n.c.Directory.Cluster
}

// identity is the peer.Identity of this node.
func (n *Node) identity() (peer.Identity, error) {
	d := n.c.Directory
	cluster, err := peer.ParseID(d.Cluster)
	id, idErr := peer.ParseID(d.ID)
	if err = errors.Join(err, idErr); err == nil && id == (peer.ID{}) {
		err = errors.New("the directory has none")
	}
	if err != nil {
		return peer.Identity{}, fmt.Errorf("%w: identity of %s: %w", base.ErrCorrupt, d.Path, err)
	}
	return peer.Identity{Cluster: cluster, ID: id, Name: n.c.Node}, nil
}

// adopt durably makes the node part of a cluster, which it founds if the founders are given.
func (n *Node) adopt(cluster string, founders ...manifest.Founder) error {
	id, err := peer.ParseID(cluster)
	if err != nil || id == (peer.ID{}) {
		return ErrMalformedCall
	}
	adopted := false
	err = n.changeManifest(func(d *manifest.Directory) (bool, error) {
		if d.Cluster != "" && d.Cluster != cluster {
			return false, fmt.Errorf("%w: node %q is of cluster %s, not %s", base.ErrNotMember, n.self.Node, d.Cluster, cluster)
		}
		adopted = d.Cluster == ""
		d.Cluster, d.Founders, d.Creating = cluster, founders, false
		return adopted, nil
	})
	if err != nil || !adopted {
		return err
	}
	n.founding.Store(len(founders) > 0)
	n.peer.SetCluster(id)
	n.log.Info("part of a cluster", "cluster", cluster)
	return nil
}
