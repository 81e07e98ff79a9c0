package cluster

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// crashLog counts the failures of leaders that this node has taken over from: by an election, not
// at their request; and the terms that this node has forfeited. Balance gives a shard back to a
// node at once after its first failure, after firstDistrust if it fails again within failureMemory,
// and after twice as long each time, up to lastDistrust. Each node measures that with its own
// clock, and forgets it when it is closed. The zero value is ready for use.
type crashLog struct {
	mu sync.Mutex // guards of
	of map[raft.ServerID]failure
}

type failure struct {
	count int
	last  time.Time
}

const (
	failureMemory = time.Hour
	firstDistrust = time.Minute
	lastDistrust  = 30 * time.Minute
	failureSpan   = 10 * time.Second // counts as one failure: a node leads several shards
)

// note counts a failure.
func (f *crashLog) note(id raft.ServerID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, is := time.Now(), f.of[id]
	switch since := now.Sub(is.last); {
	case is.count > 0 && since < failureSpan:
		return
	case since >= failureMemory:
		is.count = 0
	}
	put(&f.of, id, failure{is.count + 1, now})
}

// distrusts reports whether it is too early for a node to lead again.
func (f *crashLog) distrusts(id raft.ServerID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.of[id]
	if is.count < 2 {
		return false
	}
	wait := lastDistrust
	if doublings := is.count - 2; doublings < 8 {
		wait = min(firstDistrust<<doublings, lastDistrust)
	}
	return time.Since(is.last) < wait
}
