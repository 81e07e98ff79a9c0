package dispatch

import (
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Board is the published heads of the queues of a process. Each shard decides the order of its own
// tasks, and tells the others of its process, by queue, what a claim would get there. So claims go
// where the most urgent task is, and among those of one priority where the oldest is, and a batch ends
// where another shard has something more urgent.
//
// What is published is a hint: it is as old as the last group that changed it, and a shard that has
// nothing any more sends a claim on. Nothing but the order depends on it.
//
// A Board is safe for concurrent use. Its zero value is ready to use; a nil Board has no heads.
type Board struct {
	mu     sync.Mutex // guards adding and removing
	queues sync.Map   // name to *queueHeads
}

// queueHeads is what the shards have ready of one queue.
type queueHeads struct {
	users  int // shards that hold it; guarded by the board's mu
	shards []shardHead
}

// shardHead is what one shard has. Its owner alone writes word.
type shardHead struct {
	word atomic.Uint64 // a head
	left atomic.Int32  // tasks for which claims may come, until the word is written again
}

// head is a task that a claim would get: from the top, its priority and one, how old it is, and the
// tenant. 0 stands for none. Of two heads with one tenant, the larger one goes first.
type head uint64

const (
	headAgeBits    = 44
	headTenantBits = 16
	headAges       = 1<<headAgeBits - 1
	headTenants    = 1<<headTenantBits - 1
)

// manyTenants stands for the tenant if several are ready: they take turns in their shard, and so do
// the shards. By age, one that has few tasks would wait behind those of another one in another shard.
const manyTenants = 0

var tenantSeed = maphash.MakeSeed()

func makeHead(f engine.FirstTask) head {
	h := engine.Rank(f.Priority)<<headAgeBits | (headAges - min(keys.SinceMillis(f.Since), headAges))
	h <<= headTenantBits
	if f.Alone {
		h |= maphash.String(tenantSeed, f.Tenant)%headTenants + 1
	}
	return head(h)
}

// rank is the priority of a head and one, 0 of none.
func (h head) rank() uint64   { return uint64(h) >> (headAgeBits + headTenantBits) }
func (h head) tenant() uint64 { return uint64(h) & headTenants }

// of returns the heads of a queue; nil if no shard has ever had one.
func (b *Board) of(queue string) *queueHeads {
	if b == nil {
		return nil
	}
	v, ok := b.queues.Load(queue)
	if !ok {
		return nil
	}
	return v.(*queueHeads)
}

// Has reports whether a shard has said that it has a task for claims of a queue.
func (b *Board) Has(queue string, shard int) bool {
	h := b.of(queue)
	return h != nil && h.shards[shard].word.Load() != 0
}

// hold returns the heads of a queue for a shard that publishes its own, until it drops them.
func (b *Board) hold(queue string, shards int) *queueHeads {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.of(queue)
	if h == nil {
		h = &queueHeads{shards: make([]shardHead, shards)}
		b.queues.Store(queue, h)
	}
	h.users++
	return h
}

func (b *Board) drop(queue string, h *queueHeads) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.users--; h.users == 0 {
		b.queues.Delete(queue)
	}
}

// headFollowers is how many tasks claims may come for to a shard, of those that are ready, before it
// publishes the next head: more would leave the other shards without work.
const headFollowers = 32

// first returns the shard at which a claim for some tasks is to begin: of those with the highest
// priority, the one whose head is oldest, or any if several tenants are next. It is negative if no
// shard has a task for which no other claim is under way.
func (q *queueHeads) first(tasks int) int {
	top, tenant := uint64(0), uint64(0)
	for i := range q.shards {
		h := head(q.shards[i].word.Load())
		switch {
		case h == 0 || h.rank() < top:
		case h.rank() > top:
			top, tenant = h.rank(), h.tenant()
		case h.tenant() != tenant:
			tenant = manyTenants
		}
	}
	if top == 0 {
		return -1
	}
	best, oldest := -1, head(0)
	begin := rand.IntN(len(q.shards))
	for i := range q.shards {
		at := (begin + i) % len(q.shards)
		h := head(q.shards[at].word.Load())
		if h.rank() == top && h > oldest && q.shards[at].left.Load() > 0 {
			if best, oldest = at, h; tenant == manyTenants {
				break
			}
		}
	}
	if best >= 0 {
		q.shards[best].left.Add(-int32(tasks))
	}
	return best
}

// best returns the shard that has the head of the highest priority, but for one; negative: none of
// them has one.
func (q *queueHeads) best(but int) int {
	best, top := -1, head(0)
	if q == nil {
		return best
	}
	for i := range q.shards {
		if h := head(q.shards[i].word.Load()); i != but && h > top {
			best, top = i, h
		}
	}
	return best
}

// headLooks is at how many of its queues a claim looks to find the shard that has the first of a
// strict order: where it begins and, of a long list, what it is sent on for.
const headLooks = 16

// Begin is the index of the shard that has the most urgent task for a claim, as far as the order of
// its queues is known; negative: any.
func (b *Board) Begin(c *Claim) int {
	queues, weights := c.Named()
	if b == nil || len(weights) > 0 {
		return -1
	}
	for _, name := range queues[:min(len(queues), headLooks)] {
		if h := b.of(name); h != nil {
			if i := h.first(c.Max); i >= 0 {
				return i
			}
		}
	}
	return -1
}

// headOf is what a claim of a queue would get in this shard, as far as memory shows.
func (d *Dispatcher) headOf(q *Queue) head {
	if q.Gated && q.shut {
		return 0
	}
	f, ok := d.rules.First(q.Queue)
	if !ok {
		return 0
	}
	return makeHead(f)
}

// Publish tells the other shards what this one has ready of a queue.
func (d *Dispatcher) Publish(of *engine.Queue) {
	if d.board == nil {
		return
	}
	q := d.Of(of)
	h := d.headOf(q)
	if q.heads == nil {
		if h == 0 {
			return
		}
		q.heads = d.board.hold(q.Name, d.shards)
	}
	own := &q.heads.shards[d.index]
	if left := int32(min(q.Counts.Ready, headFollowers)); own.left.Load() != left {
		own.left.Store(left)
	}
	if head(own.word.Load()) != h {
		own.word.Store(uint64(h))
	}
}

// PublishAll is Publish for the queues that the group has changed.
func (d *Dispatcher) PublishAll() {
	if d.board == nil {
		return
	}
	for _, q := range d.rules.Group.Touched {
		d.Publish(q)
	}
}

// unpublish takes back what the shard has said of a queue, and will say no more.
func (d *Dispatcher) unpublish(q *Queue) {
	if q.heads != nil {
		q.heads.shards[d.index].word.Store(0)
		d.board.drop(q.Name, q.heads)
		q.heads = nil
	}
}

// highestElsewhere is the rank of the most urgent task that other shards have of a queue.
func (d *Dispatcher) highestElsewhere(q *Queue) uint64 {
	if d.board == nil {
		return 0
	}
	if i := q.heads.best(d.index); i >= 0 {
		return head(q.heads.shards[i].word.Load()).rank()
	}
	return 0
}

// isElsewhere reports whether a claim is better sent to another shard for the tasks of a queue: the
// most urgent is there. That comes before the claim visits the shards in turn, so that it visits each
// of them, and a few times at the most. Any task of the queue is more urgent than none, unless the
// claim draws lots for the next queue. It notes in c.rank what this shard has, for isPassedOver.
func (d *Dispatcher) isElsewhere(c *Claim, queue string, q *Queue) bool {
	c.rank = 0
	if d.board == nil || c.Stays {
		return false
	}
	heads, rank := (*queueHeads)(nil), uint64(0)
	if q != nil {
		heads, rank = q.heads, d.headOf(q).rank()
	}
	c.rank = rank
	if rank == 0 {
		if _, weights := c.Named(); len(weights) > 0 {
			return false
		}
		if heads == nil {
			heads = d.board.of(queue)
		}
	}
	if c.to = heads.best(d.index); c.to < 0 {
		return false
	}
	return head(heads.shards[c.to].word.Load()).rank() > rank
}

// isPassedOver is isElsewhere once more, after next has found l for the claim, or nothing, if it has
// parked what was more urgent. The claim then gets nothing of l.
func (d *Dispatcher) isPassedOver(c *Claim, queue string, q *Queue, l *engine.Lane) bool {
	rank := uint64(0)
	if l != nil {
		rank = engine.Rank(l.Priority)
	}
	if rank >= c.rank || !d.isElsewhere(c, queue, q) {
		return false
	}
	if l != nil {
		d.leaveGate(q)
	}
	return true
}

// isElsewhereBefore is isElsewhere for the first queues of a strict list, before the one at an index,
// which is the first that has something here.
func (d *Dispatcher) isElsewhereBefore(c *Claim, s *set, at int) bool {
	if d.board == nil || len(s.list.weights) > 0 {
		return false
	}
	for i := range min(at, headLooks) {
		q := d.Of(s.queues.At(i))
		if d.isElsewhere(c, q.Name, q) {
			return true
		}
	}
	return false
}
