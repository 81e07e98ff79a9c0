package codeq

import (
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// The log of a shard is truncated behind a snapshot, which makes the store
// durable up to its index. Snapshots are taken by the bytes that have been
// applied since the last one, and leave as many bytes of log as a node that was
// away for a moment may ask for; one that was away for longer gets the store.
//
// At least as many entries stay as a follower may have that it could not acknowledge, which is what Raft sends
// before it waits: a leader that asks a follower for an entry from before its log goes back by an
// entry each time, and comes to its own snapshot, which the follower, being ahead of it, does not take.
const (
	snapshotBytes = 64 << 20
	trailingBytes = 32 << 20
	minTrailing   = 4 * maxAppend // entries that stay whatever their size
	maxTrailing   = 1 << 15
)

// growth is how far the log has grown since the last snapshot.
type growth struct {
	bytes   atomic.Int64
	entries atomic.Int64
	due     chan struct{} // capacity 1: a snapshot is to be taken
}

// grow counts an entry that has been applied.
func (r *replica) grow(bytes int64) {
	r.growth.entries.Add(1)
	if r.growth.bytes.Add(bytes) < snapshotBytes {
		return
	}
	select {
	case r.growth.due <- struct{}{}:
	default:
	}
}

// compact takes a snapshot whenever one is due, until quit is closed.
func (r *replica) compact(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		case <-r.growth.due:
		}
		bytes, entries := r.growth.bytes.Load(), r.growth.entries.Load()
		if bytes < snapshotBytes { // by an entry that came while the last one was taken
			continue
		}
		set := r.raft.ReloadableConfig()
		set.TrailingLogs = uint64(min(max(trailingBytes/(bytes/entries), minTrailing), maxTrailing))
		err := r.raft.ReloadConfig(set)
		if err == nil {
			err = r.raft.Snapshot().Error()
		}
		if err != nil && err != raft.ErrRaftShutdown {
			r.node.log.Warn("no snapshot could be taken", "shard", r.index, "err", err)
		}
		r.growth.bytes.Add(-bytes)
		r.growth.entries.Add(-entries)
	}
}
