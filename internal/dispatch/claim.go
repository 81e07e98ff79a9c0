package dispatch

import (
	"slices"
	"sync/atomic"

	"codeq/internal/engine"
)

// Claim asks for tasks of some queues. A claim that waits does so in all shards of its process, by
// tickets, and whoever takes it first serves it.
//
// Invariant: only who has taken the claim (a shard that serves or refuses it, or the caller that gives
// up) writes Grants. It may do so without a reference until the claim is settled.
type Claim struct {
	Queues   []string // memory of the claim, as is that of Weights
	Weights  []int    // none: the order of the queues is strict
	List     *List    // in place of Queues and Weights, if they are many
	Duration uint64   // of the leases, ms
	Max      int      // tasks
	NoWait   bool
	Remote   bool // a claim of another node, or for the claims of this one
	Holder   engine.Holder
	Asked    []string // queues whose gateway has said that it has no place for the claim
	Caller   Caller

	// Stays: the claim is not sent to another shard any more. Visited: it has been in another shard
	// before, and waits there unless NoWait. Who hands the claim to a shard writes them.
	Stays, Visited bool

	Grants []engine.Grant

	drawn int           // the queue of the list that is drawn, plus 1, until a refill; 0: none is
	to    int           // the index of the shard that has something more urgent
	rank  uint64        // of the head of the queue that was looked at last, in the shard that looked
	state atomic.Uint64 // odd: somebody has taken it. It grows by 2 when the claim is recycled
}

// Caller is who made a claim.
type Caller interface {
	// Settle tells the caller that the claim has failed, or with nil that its Grants have persisted.
	Settle(error)
}

// Take makes the caller of Take the one who decides the claim. REQUIRES: a reference.
func (c *Claim) Take() bool { return c.Ticket().Take() }

// IsTaken reports whether somebody has taken the claim.
func (c *Claim) IsTaken() bool { return c.state.Load()&1 == 1 }

// Reset makes the claim ready to be another one, which keeps the memory of its slices. All tickets
// are void.
func (c *Claim) Reset() {
	clear(c.Queues)
	clear(c.Grants)
	c.Queues, c.Weights, c.Grants, c.List, c.Asked = c.Queues[:0], c.Weights[:0], c.Grants[:0], nil, nil
	c.Holder, c.Stays, c.Visited, c.drawn = engine.Holder{}, false, false, 0
	c.state.Store((c.state.Load() | 1) + 1)
}

// To is the index of the shard to which the claim is to go: Try has returned Elsewhere.
func (c *Claim) To() int { return c.to }

// Named is the queues that the claim names, and their weights.
func (c *Claim) Named() (queues []string, weights []int) {
	if c.List != nil {
		return c.List.names, c.List.weights
	}
	return c.Queues, c.Weights
}

// Tickets is how many tickets the claim has in a shard in which it waits.
func (c *Claim) Tickets() int {
	if c.List != nil {
		return 1
	}
	return len(c.Queues)
}

// Ticket is the place of a claim in a wait list. It is no reference to the claim: once somebody has
// taken the claim, the ticket is void, and the memory may be another claim's.
type Ticket struct {
	claim *Claim
	state uint64 // of the claim, as long as the ticket is good
	tasks int    // that the claim wants
}

// Ticket returns one that is good while nobody has taken the claim. REQUIRES: a reference.
func (c *Claim) Ticket() Ticket { return Ticket{c, c.state.Load() &^ 1, c.Max} }

// Good reports whether nobody has taken the claim.
func (t Ticket) Good() bool { return t.claim.state.Load() == t.state }

// Take makes the caller of Take the one who decides the claim.
func (t Ticket) Take() bool { return t.claim.state.CompareAndSwap(t.state, t.state|1) }

// Claim is the claim of the ticket. REQUIRES: the caller has taken it.
func (t Ticket) Claim() *Claim { return t.claim }

// Refuse settles a claim that nobody is going to serve.
func (t Ticket) Refuse(reason error) {
	if t.Take() {
		t.claim.Caller.Settle(reason)
	}
}

// Departure is what a shard is told of a claim that waits there no more: a ticket for each of its
// queues is void.
type Departure struct {
	queues []string
	list   *List
	remote bool
}

// Departure returns one that shares no memory with the claim. REQUIRES: the caller has taken it.
func (c *Claim) Departure() Departure { return Departure{slices.Clone(c.Queues), c.List, c.Remote} }
