package cluster

import (
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"codeq/internal/peer"
)

// configuration is the last one of a group that this node knows to be committed: Raft gives the
// latest one, which may not be, and no index of it. A change is decided by what is committed, and
// made only if that is still so.
type configuration struct {
	mu      sync.Mutex // guards what follows
	index   uint64
	servers []raft.Server
	ids     map[peer.ID]bool // of the directories of servers
	// covers: whatever the store has, no change of the group before that is missing. It is not so
	// from when the store is opened until the log has been read as far.
	covers bool
}

// StoreConfiguration is raft.ConfigurationStore's.
func (m fsm) StoreConfiguration(index uint64, c raft.Configuration) { m.configuration.set(index, c) }

func (c *configuration) set(index uint64, to raft.Configuration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if index >= c.index {
		c.index, c.servers, c.ids = index, slices.Clone(to.Servers), make(map[peer.ID]bool)
		for _, m := range to.Servers {
			if id, err := peer.ParseID(peerOf(m).ID); err == nil {
				c.ids[id] = true
			}
		}
	}
}

func (c *configuration) get() (index uint64, servers []raft.Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.index, slices.Clone(c.servers)
}

// setCovers notes whether no change is missing that is before the last entry in the store.
func (c *configuration) setCovers(covers bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.covers = covers
}

// lacks reports whether it is certain that a node is no member by any of some IDs, as of the last
// entry in the store, or later.
func (c *configuration) lacks(node string, ids []string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.covers && !slices.ContainsFunc(ids, func(id string) bool {
		return hasID(c.servers, Peer{Node: node, ID: id}.ServerID())
	})
}

func (c *configuration) hasDirectory(id peer.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ids[id]
}

// HasDirectory reports whether a directory is that of a member, or about to be.
func (g *Group) HasDirectory(id peer.ID) bool {
	if g.configuration.hasDirectory(id) {
		return true
	}
	members, err := g.members()
	return err == nil && slices.ContainsFunc(members, func(m raft.Server) bool { return peerOf(m).ID == id.String() })
}

// adoptConfiguration takes the configuration of the newest snapshot.
func (g *Group) adoptConfiguration() error {
	list, err := g.snapshots.List()
	if err != nil || len(list) == 0 {
		return err
	}
	g.configuration.set(list[0].ConfigurationIndex, list[0].Configuration)
	if list[0].Index >= g.Applied() {
		g.configuration.setCovers(true)
	}
	return nil
}
