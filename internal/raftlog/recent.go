package raftlog

import (
	"unsafe"

	"github.com/hashicorp/raft"
)

// recent holds the newest entries of a log, so that replication does not read from Pebble what was
// just stored. Its entries share Data and Extensions with those that Raft stored: nobody changes
// these.
//
// Invariant: the indexes of the entries are consecutive, and bytes <= limit. Group.mu guards it.
type recent struct {
	limit   int64
	bytes   int64
	head    int        // entries before it were removed, and are zero
	entries []raft.Log // oldest first
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

// add appends an entry, which follows the newest, and removes old ones. An entry that is larger
// than the limit is removed as well.
func (r *recent) add(l *raft.Log) {
	r.entries = append(r.entries, *l)
	r.bytes += cost(l)
	for r.bytes > r.limit {
		r.dropOldest()
	}
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
		r.bytes -= cost(&r.entries[n])
		r.entries[n] = raft.Log{}
		r.entries = r.entries[:n]
	}
}

func (r *recent) dropOldest() {
	r.bytes -= cost(&r.entries[r.head])
	r.entries[r.head] = raft.Log{}
	r.head++
	// each entry is moved at most once for each removed one
	if 2*r.head >= len(r.entries) {
		n := copy(r.entries, r.entries[r.head:])
		clear(r.entries[n:])
		r.entries, r.head = r.entries[:n], 0
	}
}
