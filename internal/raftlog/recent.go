package raftlog

import (
	"sync/atomic"
	"unsafe"

	"github.com/hashicorp/raft"
)

// recent holds the newest entries of a log, so that replication does not read new entries from
// Pebble. Its entries share Data and Extensions with those that Raft stored, which do not change.
//
// Invariant: the indexes of the entries are consecutive. Group.mu guards all but bytes, which is
// changed with Group.mu held.
type recent struct {
	all     *atomic.Int64 // bytes of all groups
	bytes   atomic.Int64
	head    int        // entries before it were removed, and are zero
	entries []raft.Log // oldest first
}

// trim removes entries until those of all groups fit in Options.CacheBytes: the oldest one of the
// group that holds most, again and again. An entry that is larger is removed as well.
func (s *Store) trim() {
	if s.recent.Load() <= s.cacheBytes {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.recent.Load() > s.cacheBytes {
		var largest *Group
		for _, g := range s.groups {
			if largest == nil || g.recent.bytes.Load() > largest.recent.bytes.Load() {
				largest = g
			}
		}
		largest.mu.Lock()
		if largest.recent.bytes.Load() > 0 { // or else another change has removed it
			largest.recent.dropOldest()
		}
		largest.mu.Unlock()
	}
}

func cost(l *raft.Log) int64 {
	return int64(len(l.Data)+len(l.Extensions)) + int64(unsafe.Sizeof(*l))
}

// get returns the entry with an index, or nil. It is valid while Group.mu is held.
func (r *recent) get(index uint64) *raft.Log {
	held := r.entries[r.head:]
	if len(held) == 0 || index < held[0].Index || index-held[0].Index >= uint64(len(held)) {
		return nil
	}
	return &held[index-held[0].Index]
}

// add appends an entry, which follows the newest. The caller calls Store.trim, without Group.mu.
func (r *recent) add(l *raft.Log) {
	r.entries = append(r.entries, *l)
	r.count(cost(l))
}

func (r *recent) count(bytes int64) {
	r.bytes.Add(bytes)
	r.all.Add(bytes)
}

// dropThrough removes the entries up to an index.
func (r *recent) dropThrough(index uint64) {
	for r.head < len(r.entries) && r.entries[r.head].Index <= index {
		r.dropOldest()
	}
}

// dropFrom removes the entries from an index on.
func (r *recent) dropFrom(index uint64) {
	for n := len(r.entries) - 1; n >= r.head && r.entries[n].Index >= index; n-- {
		r.count(-cost(&r.entries[n]))
		r.entries[n] = raft.Log{}
		r.entries = r.entries[:n]
	}
}

func (r *recent) dropOldest() {
	r.count(-cost(&r.entries[r.head]))
	r.entries[r.head] = raft.Log{}
	r.head++
	// each entry is moved at most once for each removed one
	if 2*r.head >= len(r.entries) {
		n := copy(r.entries, r.entries[r.head:])
		clear(r.entries[n:])
		r.entries, r.head = r.entries[:n], 0
	}
}
