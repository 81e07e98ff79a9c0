package call

import (
	"sync"

	"codeq/internal/engine"
	"codeq/internal/manifest"
)

// Session numbers the produces of a node into one shard.
//
// In a cluster a produce whose outcome is unknown, because the leader of its shard was lost, is
// tried again with the next leader, and has its effect once: the node of its caller numbers its
// produces into each shard, and the shard stores what it answered to those whose callers may not
// know yet, in the commit of the tasks. With each produce the node says which ones it knows of, so
// that what is kept is no more than what was under way lately. It says as well in which of its
// lives it was numbered: a shard refuses those of a life that is over.
//
// The idea is that of RIFL (Lee, Park, Kejriwal, Matsushita, Ousterhout, "Implementing
// Linearizability at Large Scale and Low Latency", 2015).
type Session struct {
	mu      sync.Mutex // guards what follows
	life    uint64     // of the node, as the shard is to know it: see manifest.IncarnationAfter
	last    uint64
	low     uint64 // the first call that is under way, or the next one
	pending map[uint64]struct{}
}

// NewSession begins to number in a life of the node.
func NewSession(life uint64) *Session {
	return &Session{life: life, low: 1, pending: make(map[uint64]struct{})}
}

// Begin returns the number of a call, but for the node.
func (c *Session) Begin() engine.CallNumber {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	c.pending[c.last] = struct{}{}
	return engine.CallNumber{Life: c.life, Seq: c.last, Low: c.low}
}

// End is when the caller knows the outcome of a call, or will never ask again.
func (c *Session) End(seq uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, seq)
	for c.low <= c.last {
		if _, ok := c.pending[c.low]; ok {
			return
		}
		c.low++
	}
}

// Outlive begins another life, unless the present one is later than the given one, which the shard
// knows. It nearly always is: it is not if its clock is behind that of a lost directory of its
// name.
func (c *Session) Outlive(latest uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life <= latest {
		c.life = manifest.IncarnationAfter(latest)
	}
}
