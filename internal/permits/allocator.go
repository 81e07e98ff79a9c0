package permits

import (
	"cmp"
	"math"
	"time"
)

// Allocator grants the permits of a queue to waiting shards: to those with the highest priority,
// and among these in proportion to the shares of their tenants.
//
// This is fair queueing by virtual time (stride scheduling: C. A. Waldspurger, W. E. Weihl, 1995):
// a shard's next permit has a due time, which each permit moves by one divided by the share.
type Allocator struct {
	time      float64 // virtual due time of the last granted permits
	limits    Limits
	shards    []shardGrant
	unknown   int       // shards that have not answered
	last      time.Time // time of the last lease under the rate, as far as shards have answered
	places    uint64    // number of places in the line assigned so far
	tokens    tokenBucket
	decisions []Decision // memory for the next Allot
}

// shardGrant is the state of a shard in the allocator.
type shardGrant struct {
	known   bool    // it has answered
	asked   bool    // it is being asked
	pending bool    // request has not been answered
	request Request // its last request, plus the permits granted since
	place   uint64  // in the line; 0: none
	due     float64 // virtual time
}

// Decision is the answer to the last request of a shard.
type Decision struct {
	Shard int
	Answer
}

// NewAllocator returns an Allocator without reports of the shards.
func NewAllocator(shards int) *Allocator {
	return &Allocator{shards: make([]shardGrant, shards), unknown: shards}
}

// Set changes the limits. noRateBefore: there was certainly no rate for the leases granted before.
// REQUIRES: l.Any().
func (a *Allocator) Set(l Limits, noRateBefore bool, now time.Time) {
	a.limits = l
	a.tokens.set(&l, noRateBefore, now)
}

// Ask reports whether the caller has to ask a shard for its permits: Reported or NotReported
// follows.
func (a *Allocator) Ask(shard int) bool {
	c := &a.shards[shard]
	if c.known || c.asked {
		return false
	}
	c.asked = true
	return true
}

// Reported takes a shard's answer to Ask; false if it is outdated. After it, as after Hear, earlier
// requests of the shard are invalid.
func (a *Allocator) Reported(shard int, r *Report, now time.Time) bool {
	c := &a.shards[shard]
	c.asked, c.known = false, true
	heard := a.hear(c, &Request{Report: *r}, now)
	if at := now.Add(-r.Idle); at.After(a.last) {
		a.last = at
	}
	if a.unknown--; a.unknown == 0 {
		a.tokens.start(a.last)
	}
	return heard
}

// NotReported records that a shard has not answered: Ask it again.
func (a *Allocator) NotReported(shard int) { a.shards[shard].asked = false }

// Hear takes a request of a shard; false if it is outdated.
func (a *Allocator) Hear(shard int, r *Request, now time.Time) bool {
	c := &a.shards[shard]
	if !a.hear(c, r, now) {
		return false
	}
	c.pending = true
	switch {
	case r.Want == 0:
		c.place = 0
	case c.place == 0:
		a.places++
		c.place = a.places
		c.due = max(c.due, a.time)
	}
	return true
}

func (a *Allocator) hear(c *shardGrant, r *Request, now time.Time) bool {
	last := &c.request
	if !r.after(&last.Report) {
		return false
	}
	b := &a.tokens
	b.advance(now)
	b.out += r.Unused - last.Unused
	if r.Epoch == last.Epoch && r.Spent >= last.Spent { // lost unused permits come back
		b.level += float64(max(0, last.Unused-r.Unused-int(r.Spent-last.Spent)))
	}
	b.clip()
	c.request, c.pending = *r, false
	return true
}

// Withdraw records that a shard no longer waits for an answer.
func (a *Allocator) Withdraw(shard int) { a.shards[shard].pending = false }

// Allot decides requests. The answers are valid until the next call; if wait is not 0, call it
// again after that time.
func (a *Allocator) Allot(now time.Time) (answers []Decision, wait time.Duration) {
	a.decisions = a.decisions[:0]
	room, tokens := a.room(), a.tokens.count(now)
	for room > 0 && tokens > 0 {
		shard := a.first()
		if shard < 0 {
			break
		}
		c := &a.shards[shard]
		n := min(c.request.Want, room, tokens)
		c.request.Held += n
		c.request.Unused += n
		c.place = 0
		a.time = max(a.time, c.due)
		c.due += float64(n) / float64(max(c.request.Share, 1))
		a.tokens.take(n)
		tokens -= n
		room = a.room()
		a.decide(shard, Answer{Granted: n})
	}
	for shard := range a.shards {
		c := &a.shards[shard]
		if c.pending && (c.request.Want == 0 || a.unknown == 0 && !c.request.Wait) {
			a.decide(shard, Answer{Over: room < 0})
		}
	}
	if room > 0 && a.first() >= 0 {
		wait = a.tokens.wait()
	}
	return a.decisions, wait
}

func (a *Allocator) decide(shard int, answer Answer) {
	a.shards[shard].pending = false
	a.decisions = append(a.decisions, Decision{shard, answer})
}

// room returns the number of further leases within the limits.
func (a *Allocator) room() int {
	if a.unknown > 0 {
		return -1
	}
	if a.limits.Concurrency == 0 {
		return math.MaxInt
	}
	room := a.limits.Concurrency
	for i := range a.shards {
		room -= a.shards[i].request.Held
	}
	return room
}

// first returns the waiting shard that gets the next permits; -1: none waits.
func (a *Allocator) first() int {
	first := -1
	for i := range a.shards {
		c := &a.shards[i]
		if c.pending && c.request.Want > 0 && (first < 0 || c.before(&a.shards[first])) {
			first = i
		}
	}
	return first
}

func (c *shardGrant) before(other *shardGrant) bool {
	return cmp.Or(cmp.Compare(other.request.Rank, c.request.Rank), cmp.Compare(c.due, other.due), cmp.Compare(c.place, other.place)) < 0
}
