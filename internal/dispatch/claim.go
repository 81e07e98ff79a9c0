package dispatch

import (
	"slices"
	"sync/atomic"

	"codeq/internal/engine"
)

// Claim asks for tasks of some queues. A waiting claim has tickets in all shards of its process,
// and the shard that takes it first serves it.
//
// Invariant: only the one that has taken the claim (a shard that serves or refuses it, ClaimLines
// with the answer of another node, or the caller that gives up) writes Grants. It needs no
// reference for that until the claim is settled.
type Claim struct {
	Queues   []string // in memory of the claim, like Weights
	Weights  []int    // none: the order of the queues is strict
	List     *List    // in place of Queues and Weights, if they are many
	Duration uint64   // of the leases, ms
	Max      int      // tasks
	NoWait   bool
	Remote   bool // a claim of another node, or for the claims of this one
	Holder   engine.Holder
	Asked    []string // queues that have answered, by their gateway, that they have no place
	Caller   Caller

	// Stays: the claim is not sent to another shard any more. Visited: it has been in another shard
	// before, and waits there unless NoWait. They are written before the claim is passed to a
	// shard.
	Stays, Visited bool

	Grants []engine.Grant

	bytes int           // of Grants, but for the last
	full  bool          // another task would be more bytes than Config.BatchBytes
	drawn int           // 1 + the index of the queue that was drawn, and is tried first; 0: none
	to    int           // the index of the shard with a more urgent task
	rank  uint64        // of the head of the last queue that was tried, in the shard that tried it
	state atomic.Uint64 // odd: the claim was taken. It grows by 2 when the claim is recycled
}

// Caller is notified when its claim is settled.
type Caller interface {
	// Finish is called when the claim has failed, or with nil when its Grants have persisted.
	Finish(error)
}

// Take gives the claim to the caller, who alone decides it then; false: it was taken before.
// REQUIRES: a reference.
func (c *Claim) Take() bool { return c.Ticket().Take() }

// IsTaken reports whether the claim was taken.
func (c *Claim) IsTaken() bool { return c.state.Load()&1 == 1 }

// Reset prepares the claim for reuse, and keeps the memory of its slices. All its tickets become
// stale.
func (c *Claim) Reset() {
	clear(c.Queues)
	clear(c.Grants)
	c.Queues, c.Weights, c.Grants, c.List, c.Asked = c.Queues[:0], c.Weights[:0], c.Grants[:0], nil, nil
	c.Holder, c.Stays, c.Visited, c.drawn = engine.Holder{}, false, false, 0
	c.bytes, c.full = 0, false
	c.state.Store((c.state.Load() | 1) + 1)
}

// To returns the index of the shard that the claim has to visit next. REQUIRES: Try has returned
// Elsewhere.
func (c *Claim) To() int { return c.to }

// named returns the queues of the claim, and their weights.
func (c *Claim) named() (queues []string, weights []int) {
	if c.List != nil {
		return c.List.names, c.List.weights
	}
	return c.Queues, c.Weights
}

// Tickets returns how many tickets a waiting claim has in each shard.
func (c *Claim) Tickets() int {
	if c.List != nil {
		return 1
	}
	return len(c.Queues)
}

// Ticket is the place of a claim in a wait list. It is no reference to the claim: once the claim is
// taken, the ticket is stale, and its memory may be used by another claim.
type Ticket struct {
	claim *Claim
	state uint64 // state of the claim while the ticket is good
	tasks int    // that the claim wants

	process uint64 // of the holder
}

// Ticket returns a ticket that is good until the claim is taken. REQUIRES: a reference.
func (c *Claim) Ticket() Ticket { return Ticket{c, c.state.Load() &^ 1, c.Max, c.Holder.Process} }

// Good reports whether the claim was not taken yet.
func (t Ticket) Good() bool { return t.claim.state.Load() == t.state }

// Take is Claim.Take; it needs no reference.
func (t Ticket) Take() bool { return t.claim.state.CompareAndSwap(t.state, t.state|1) }

// Claim returns the claim of the ticket. REQUIRES: the caller has taken it.
func (t Ticket) Claim() *Claim { return t.claim }

// Refuse settles a claim that will not be served.
func (t Ticket) Refuse(reason error) {
	if t.Take() {
		t.claim.Caller.Finish(reason)
	}
}

// Departure tells a shard that a claim does not wait there any more: one ticket for each of its
// queues is stale.
type Departure struct {
	queues []string
	list   *List
	remote bool
}

// Departure returns a Departure that shares no memory with the claim. REQUIRES: the caller has
// taken it.
func (c *Claim) Departure() Departure { return Departure{slices.Clone(c.Queues), c.List, c.Remote} }
