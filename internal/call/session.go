package call

import (
	"sync"

	"codeq/internal/keys"
	"codeq/internal/manifest"
)

// Session numbers the produces of a node into one shard.
//
// When the leader of a shard is lost in a cluster, the outcome of a produce may be unknown. It is
// then tried again with the next leader, and has its effect once: the node of its caller numbers
// its produces into each shard, and the shard stores its answers in the commits of the tasks. With
// each produce the node says which answers it has, so that the shard keeps only those of recent
// produces. The node also sends the incarnation that numbered the produce: a shard refuses those of
// an earlier one.
//
// The idea is that of RIFL (Lee, Park, Kejriwal, Matsushita, Ousterhout, "Implementing
// Linearizability at Large Scale and Low Latency", 2015).
type Session struct {
	mu sync.Mutex // guards the fields below
	// incarnation is that of the node, for the shard: see manifest.IncarnationAfter
	incarnation uint64
	last        uint64
	low         uint64 // the first call that is under way, or the next one
	pending     map[uint64]struct{}
}

// NewSession begins to number in an incarnation of the node.
func NewSession(incarnation uint64) *Session {
	return &Session{incarnation: incarnation, low: 1, pending: make(map[uint64]struct{})}
}

// Begin returns the number of a call, but for the node.
func (c *Session) Begin() keys.CallNumber {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	c.pending[c.last] = struct{}{}
	return keys.CallNumber{Incarnation: c.incarnation, Seq: c.last, Low: c.low}
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

// Outlive begins another incarnation, unless the present one is later than the given one, which the
// shard knows. It nearly always is: it is not if its clock is behind that of a lost directory of
// its name.
func (c *Session) Outlive(latest uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.incarnation <= latest {
		c.incarnation = manifest.IncarnationAfter(latest)
	}
}
