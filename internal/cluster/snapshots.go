package cluster

import (
	"sync/atomic"

	"github.com/hashicorp/raft"

	"codeq/internal/snapshot"
)

// groupSnapshots are the snapshots of a group.
type groupSnapshots struct {
	*snapshot.Store
	group *Group
}

// Create is raft.SnapshotStore's. A snapshot of another history takes the place of nothing.
func (s groupSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, members raft.Configuration, membersIndex uint64, trans raft.Transport,
) (raft.SnapshotSink, error) {
	if err := s.group.applied.get().admits(Position{index, term}); err != nil {
		s.group.Fail(err)
		return nil, err
	}
	sink, err := s.Store.Create(version, index, term, members, membersIndex, trans)
	if err != nil {
		return nil, err
	}
	return &snapshotSink{sink.(*snapshot.Sink), s.group.node.room}, nil
}

// snapshotSink is a snapshot that is being taken or received.
type snapshotSink struct {
	*snapshot.Sink
	room *logRoom
}

// Write takes the next part of a snapshot that is received.
func (k *snapshotSink) Write(p []byte) (int, error) {
	if k.room.full(len(p)) {
		return 0, errNoRoom
	}
	return k.Sink.Write(p)
}

// The log of a shard is truncated behind a snapshot, which makes the store
// durable up to its index. Snapshots are taken by the bytes that have been
// applied since the last one, and leave as many bytes of log as a node that was
// away for a moment may ask for; one that was away for longer gets the store.
//
// At least as many entries stay as a follower may have that it could not acknowledge, which is what
// Raft sends before it waits: a leader that asks a follower for an entry from before its log goes
// back by an entry each time, and comes to its own snapshot, which the follower, being ahead of it,
// does not take.
const (
	snapshotBytes    = 64 << 20
	trailingBytes    = 32 << 20
	trailingMessages = 4 // of entries that stay whatever their size
	maxTrailing      = 1 << 15
)

// growth is how far the log has grown since the last snapshot.
type growth struct {
	bytes   atomic.Int64
	entries atomic.Int64
	due     chan struct{} // capacity 1: a snapshot is to be taken
}

// grow counts an entry that has been applied.
func (g *Group) grow(bytes int64) {
	g.growth.entries.Add(1)
	if g.growth.bytes.Add(bytes) < snapshotBytes {
		return
	}
	select {
	case g.growth.due <- struct{}{}:
	default:
	}
}

// compact takes a snapshot whenever one is due, until quit is closed.
func (g *Group) compact(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		case <-g.growth.due:
		}
		bytes, entries := g.growth.bytes.Load(), g.growth.entries.Load()
		if bytes < snapshotBytes { // by an entry that came while the last one was taken
			continue
		}
		least := g.log.newest(g.raft.LastIndex(), trailingMessages)
		set := g.raft.ReloadableConfig()
		set.TrailingLogs = min(max(uint64(trailingBytes/(bytes/entries)), least), maxTrailing)
		err := g.raft.ReloadConfig(set)
		if err == nil {
			err = g.raft.Snapshot().Error()
		}
		if err != nil && err != raft.ErrRaftShutdown {
			g.node.log.Warn("no snapshot could be taken", "shard", g.index, "err", err)
		}
		g.growth.bytes.Add(-bytes)
		g.growth.entries.Add(-entries)
	}
}
