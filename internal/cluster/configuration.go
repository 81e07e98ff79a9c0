package cluster

import (
	"slices"
	"sync"

	"github.com/hashicorp/raft"

	"codeq/internal/peer"
)

// configuration is the last configuration of a group that this node knows to be committed: Raft
// returns the latest one, which may not be committed, without its index. A change is decided by the
// committed one, and made only if it is still the same.
type configuration struct {
	mu      sync.Mutex // guards the fields below
	index   uint64
	servers []raft.Server
	ids     map[peer.ID]bool // of the directories of servers
	// covers: no change of the group up to the last entry in the store is missing. It is false from
	// the opening of the store until the log has been read as far.
	covers bool
}

// StoreConfiguration implements raft.ConfigurationStore.
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

// votersOf are the members that vote.
func votersOf(members []raft.Server) []raft.Server {
	return slices.DeleteFunc(slices.Clone(members), func(m raft.Server) bool { return m.Suffrage != raft.Voter })
}

// setCovers sets whether no change up to the last entry in the store is missing.
func (c *configuration) setCovers(covers bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.covers = covers
}

// lacks reports whether it is certain that a node is not a member by any of some IDs, as of the
// last entry in the store, or later.
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

// HasDirectory reports whether a directory is that of a member, or of a node being added.
func (g *Group) HasDirectory(id peer.ID) bool {
	if g.configuration.hasDirectory(id) {
		return true
	}
	members, err := g.members()
	return err == nil && slices.ContainsFunc(members, func(m raft.Server) bool { return peerOf(m).ID == id.String() })
}

// adoptConfiguration sets the configuration of the newest snapshot.
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
