package cluster

import (
	"errors"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/snapshot"
)

// groupSnapshots are the snapshots of a group.
type groupSnapshots struct {
	*snapshot.Store
	group *Group
}

// Create implements raft.SnapshotStore. A snapshot of another history is refused.
func (s groupSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, members raft.Configuration, membersIndex uint64, trans raft.Transport,
) (raft.SnapshotSink, error) {
	if err := s.group.applied.get().admits(Position{index, term}); err != nil {
		s.group.Fail(err)
		return nil, err
	}
	return s.Store.Create(version, index, term, members, membersIndex, trans)
}

// The log of a shard is truncated behind a snapshot, which makes the store durable up to its index.
// Snapshots are taken after a number of applied bytes, and leave as many bytes of log as a node
// that was away for a moment may need; one that was away for longer gets the store.
//
// At least as many entries stay as a follower may have without an acknowledgement, which is the
// number that Raft sends before it waits: a leader that asks a follower for an entry from before
// its log goes back by an entry each time, until it comes to its own snapshot, which the follower,
// being ahead of it, refuses.
const (
	SnapshotBytes    = 64 << 20
	trailingMessages = 4 // of entries that stay whatever their size
	maxTrailing      = 1 << 15
)

// logGrowth is the growth of the log since the last snapshot.
type logGrowth struct {
	bytes   atomic.Int64
	entries atomic.Int64
	due     chan struct{} // capacity 1: a snapshot is due
}

// grow counts entries that have been applied.
func (g *Group) grow(bytes, entries int64) {
	g.growth.entries.Add(entries)
	g.growth.bytes.Add(bytes)
	if !g.isDue() {
		return
	}
	select {
	case g.growth.due <- struct{}{}:
	default:
	}
}

// isDue reports whether a snapshot is due. Log that is held for other nodes takes no room that
// callers need.
func (g *Group) isDue() bool {
	bytes, least := g.growth.bytes.Load(), g.node.c.SnapshotBytes
	return bytes >= least && (bytes >= least+int64(g.sender.held.Load()) || g.node.room.reclaim() > 0)
}

// compact takes a snapshot whenever one is due, until quit is closed.
func (g *Group) compact(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		case <-g.growth.due:
		}
		g.sender.turn.Lock()
		if g.isDue() { // or an entry came while the last one was taken
			g.giveUpFiles("the log behind them is longer than they are, or the disk is almost full")
			g.takeSnapshot()
		}
		g.sender.turn.Unlock()
	}
}

// takeSnapshot takes a snapshot, if it can. REQUIRES: the caller holds
// snapshotSender.turn, and there are entries after the last snapshot.
func (g *Group) takeSnapshot() {
	bytes, entries := g.growth.bytes.Load(), g.growth.entries.Load()
	least := g.log.newest(g.raft.LastIndex(), trailingMessages)
	set := g.raft.ReloadableConfig()
	set.TrailingLogs = min(max(uint64(g.node.c.SnapshotBytes/2/(bytes/entries)), least), maxTrailing)
	err := g.raft.ReloadConfig(set)
	if err == nil {
		err = g.raft.Snapshot().Error()
	}
	if err != nil && !errors.Is(err, raft.ErrRaftShutdown) {
		g.node.log.Warn("no snapshot could be taken", "shard", g.index, "err", err)
	}
	g.growth.bytes.Add(-bytes)
	g.growth.entries.Add(-entries)
}
