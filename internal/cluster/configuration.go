package cluster

import (
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// configuration is the last one of a group that this node knows to be committed: Raft gives the
// latest one, which may not be, and no index of it. A change is decided by what is committed, and
// made only if that is still so.
type configuration struct {
	mu      sync.Mutex // guards what follows
	index   uint64
	servers []raft.Server
}

// StoreConfiguration is raft.ConfigurationStore's.
func (m fsm) StoreConfiguration(index uint64, c raft.Configuration) { m.configuration.set(index, c) }

func (c *configuration) set(index uint64, to raft.Configuration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if index >= c.index {
		c.index, c.servers = index, slices.Clone(to.Servers)
	}
}

func (c *configuration) get() (index uint64, servers []raft.Server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.index, slices.Clone(c.servers)
}

// adoptConfiguration takes the configuration of the newest snapshot.
func (g *Group) adoptConfiguration() error {
	list, err := g.snapshots.List()
	if err != nil || len(list) == 0 {
		return err
	}
	g.configuration.set(list[0].ConfigurationIndex, list[0].Configuration)
	return nil
}
