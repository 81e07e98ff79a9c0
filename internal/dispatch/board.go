package dispatch

import (
	"hash/maphash"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Board holds the published heads of the queues of a process. Each shard decides the order of its
// own tasks, and publishes, by queue, which task a claim would get there. So claims go to the shard
// with the most urgent task, and among tasks of one priority to that with the oldest, and a batch
// ends when another shard has a more urgent task.
//
// A published head is a hint: it is as old as the last group that changed it, and a shard that has
// no task any more sends a claim to the next one. Only the order depends on it.
//
// A Board is safe for concurrent use. Its zero value is ready to use; a nil Board has no heads.
type Board struct {
	mu     sync.Mutex // guards adding and removing
	queues sync.Map   // name to *queueHeads
	lists  sync.Map   // digest to *listHeads
}

// queueHeads are the heads of one queue in all shards.
type queueHeads struct {
	users   int // number of shards and lists that use it; guarded by the board's mu
	shards  []shardHead
	gate    atomic.Pointer[gate] // that all shards share; nil: none
	tenants tenantCounts
	lists   queueLists
}

// shardHead is the head of one shard. Only its owner writes to it, except for left.
type shardHead struct {
	word  atomic.Uint64 // a head
	share atomic.Uint64 // of its tenants: see engine.FirstTask
	left  atomic.Int32  // number of tasks that more claims may come for, until word is written again
	more  atomic.Int32  // the same beyond those, if several tenants have tasks
}

// shareAt returns the share of the tenants if the head has a rank, and more claims may come; or 0.
func (s *shardHead) shareAt(rank uint64) uint64 {
	if head(s.word.Load()).rank() != rank || s.left.Load()+s.more.Load() <= 0 {
		return 0
	}
	return s.share.Load()
}

// head describes the task that a claim would get. From the highest bit: its priority plus one, its
// age, and its tenant. 0: none. Of two heads with one tenant, the larger one goes first.
type head uint64

const (
	headAgeBits    = 44
	headTenantBits = 16
	headAges       = 1<<headAgeBits - 1
	headTenants    = 1<<headTenantBits - 1
)

// manyTenants stands for the tenant if tasks of several are ready: they take turns in their shard,
// and the shard is drawn. If age decided, a tenant with few tasks would wait behind the tasks of
// another tenant in another shard.
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

// rank returns the priority of a head plus one, 0 for none.
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

// Has reports whether a shard has published a task that a claim of a queue may get.
func (b *Board) Has(queue string, shard int) bool {
	h := b.of(queue)
	return h != nil && !h.isClosed() && h.shards[shard].word.Load() != 0
}

// isClosed reports whether no claim of the queue gets a task in any shard.
func (q *queueHeads) isClosed() bool {
	g := q.gate.Load()
	return g != nil && g.isClosed()
}

// hold returns the heads of a queue for a shard that publishes its own, or a list, until drop.
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

// headFollowers is how many ready tasks of a shard claims may come for before it publishes the next
// head: more claims would leave the other shards without work.
const headFollowers = 32

// first returns the shard at which a claim for some tasks should begin: among those with the
// highest priority, the one with the oldest head or, if several tenants are next, one drawn by the
// shares of its tenants. It is negative if claims are under way for the tasks of all shards, or the
// gate of the queue is closed.
func (q *queueHeads) first(tasks int) int {
	if q.isClosed() {
		return -1
	}
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
	if tenant == manyTenants {
		best = q.drawShard(top)
	} else {
		begin := rand.IntN(len(q.shards))
		for i := range q.shards {
			at := (begin + i) % len(q.shards)
			h := head(q.shards[at].word.Load())
			if h.rank() == top && h > oldest && q.shards[at].left.Load() > 0 {
				best, oldest = at, h
			}
		}
	}
	if best >= 0 {
		q.shards[best].left.Add(-int32(tasks))
	}
	return best
}

// drawShard draws one of the shards that have tasks of a rank, in proportion to the shares of their
// tenants; negative: claims are under way for all of them. So the tenants have their shares,
// however their tasks lie in the shards.
func (q *queueHeads) drawShard(rank uint64) int {
	total := uint64(0)
	for i := range q.shards {
		total += q.shards[i].shareAt(rank)
	}
	if total == 0 {
		return -1
	}
	drawn, lot := -1, rand.Uint64N(total)
	for i := range q.shards {
		share := q.shards[i].shareAt(rank)
		if share == 0 {
			continue
		}
		if drawn = i; lot < share {
			break // or, if they have less than a moment ago, the last one is drawn
		}
		lot -= share
	}
	return drawn
}

// best returns the shard, other than but, that has the head with the highest priority; negative:
// none of them has a head.
func (q *queueHeads) best(but int) int {
	best, top := -1, head(0)
	if q == nil || q.isClosed() {
		return best
	}
	for i := range q.shards {
		if h := head(q.shards[i].word.Load()); i != but && h > top {
			best, top = i, h
		}
	}
	return best
}

// headLooks is how many of its queues a claim with a strict order checks at the most to find the
// shard with the first ready task: to find where it begins and, with a long list, where to send it.
const headLooks = 16

// Begin returns the index of the shard that has the most urgent task for a claim, as far as the
// order of its queues is known; negative: any.
func (b *Board) Begin(c *Claim) int {
	queues, weights := c.named()
	switch {
	case b == nil:
		return -1
	case len(weights) > 0:
		return b.draw(c, queues, weights)
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

// draw draws one of the queues of a claim that have tasks, in proportion to their weights, and
// returns a shard that has some; negative: none was found. So the shares of the queues do not
// depend on how their tasks lie in the shards. Those of a long list are known once a shard has
// built its set.
func (b *Board) draw(c *Claim, queues []string, weights []int) int {
	if c.List != nil {
		if l, ok := b.lists.Load(c.List.Digest); ok {
			if at, h := l.(*listHeads).draw(); h != nil {
				return h.visit(c, at)
			}
		}
		return -1
	}
	var found [ShortList]*queueHeads
	total := 0
	for at, name := range queues {
		h := b.of(name)
		if h.best(-1) < 0 {
			continue
		}
		found[at] = h
		total += weights[at]
	}
	if total == 0 {
		return -1
	}
	lot := rand.IntN(total)
	for at, h := range found {
		if h == nil {
			continue
		}
		if lot -= weights[at]; lot < 0 {
			return h.visit(c, at)
		}
	}
	return -1
}

// visit returns the next shard of a claim: one with tasks of the queue that was drawn for it.
func (q *queueHeads) visit(c *Claim, at int) int {
	c.drawn = at + 1
	if i := q.first(c.Max); i >= 0 {
		return i
	}
	return q.best(-1)
}

// rankOf returns the rank of the head of a queue in this shard, as far as it is in memory. It is 0
// if claims get no task.
func (d *Dispatcher) rankOf(q *Queue) uint64 {
	if g := q.sharedGate(); g != nil && g.isClosed() || q.Gated && q.shut {
		return 0
	}
	f, ok := d.rules.Names.First(q.Queue)
	if !ok {
		return 0
	}
	return engine.Rank(f.Priority)
}

// headAndShare returns what claims would get but for a gate that all shards share: the head, and
// the share of the tenants that have tasks of its priority.
func (d *Dispatcher) headAndShare(q *Queue) (h head, share uint64) {
	if q.Gated && q.shut {
		return 0, 0
	}
	f, ok := d.rules.Names.First(q.Queue)
	if !ok {
		return 0, 0
	}
	return makeHead(f), f.Share
}

// Publish publishes the head of a queue to the other shards.
func (d *Dispatcher) Publish(of *engine.Queue) {
	if d.board == nil {
		return
	}
	q := d.Of(of)
	h, share := d.headAndShare(q)
	if q.heads == nil {
		if h == 0 {
			return
		}
		q.heads = d.board.hold(q.Name, d.shards)
	}
	if g := q.sharedGate(); q.heads.gate.Load() != g {
		q.heads.gate.Store(g)
	}
	own := &q.heads.shards[d.index]
	if q.Shared = q.heads.tenants.named.Load() > 0; q.Shared {
		own.more.Store(int32(min(max(q.Counts.Ready, headFollowers)-headFollowers, math.MaxInt32-headFollowers)))
	}
	if h != 0 && own.share.Load() != share {
		own.share.Store(share)
	}
	if left := int32(min(q.Counts.Ready, headFollowers)); own.left.Load() != left {
		own.left.Store(left)
	}
	q.heads.setHead(d.index, h)
}

// PublishAll is Publish for the queues that the group has changed.
func (d *Dispatcher) PublishAll() {
	d.groups++
	d.endTurns()
	if d.slow.offered.Load() > 0 {
		for _, q := range d.rules.Group.Touched {
			d.offer(d.Of(q))
		}
	}
	if d.board == nil {
		return
	}
	for _, q := range d.rules.Group.Touched {
		d.Publish(q)
	}
}

// unpublish withdraws the head of a queue. The shard will publish no other head of it.
func (d *Dispatcher) unpublish(q *Queue) {
	if q.heads != nil {
		q.heads.setHead(d.index, 0)
		d.board.drop(q.Name, q.heads)
		q.heads = nil
	}
}

// highestElsewhere returns the rank of the most urgent task of a queue in other shards.
func (d *Dispatcher) highestElsewhere(q *Queue) uint64 {
	if d.board == nil {
		return 0
	}
	if i := q.heads.best(d.index); i >= 0 {
		return head(q.heads.shards[i].word.Load()).rank()
	}
	return 0
}

// isElsewhere reports whether a claim should be sent to another shard, which has the most urgent
// task of a queue. This happens before the claim visits the shards in turn, and a few times at the
// most, so that the claim visits each of them. Any task of the queue is more urgent than none,
// unless the order of the claim is random and another queue was drawn. It stores the rank of this
// shard's head in c.rank, for isPassedOver; 0 if no other shard has tasks of the queue.
func (d *Dispatcher) isElsewhere(c *Claim, queue string, q *Queue) bool {
	c.rank = 0
	if d.board == nil || c.Stays {
		return false
	}
	heads, rank := (*queueHeads)(nil), uint64(0)
	if q != nil {
		if heads = q.heads; heads != nil && heads.best(d.index) < 0 {
			return false
		}
		rank = d.rankOf(q)
	}
	c.rank = rank
	if rank == 0 {
		if _, weights := c.named(); len(weights) > 0 && (c.drawn == 0 || c.Queues[c.drawn-1] != queue) {
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

// isPassedOver repeats isElsewhere after next has found l for the claim, or nothing, if it has
// parked more urgent tasks. If true, the claim gets nothing of l.
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

// isElsewhereBefore is isElsewhere for the queues of a strict list before the one at an index,
// which is the first one with a task here.
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
