package codeq

import (
	"codeq/internal/engine"
	"context"
	"math"
	"time"
)

// permitAllocator grants the permits of a queue with a limit for all its shards, in a
// cluster. It is with the leader of the first shard, in memory only: a new one
// asks all shards what they have, and grants nothing before all have answered.
// The owner of the first shard uses it.
type permitAllocator struct {
	claims  *queuePermits
	shards  []shardGrant
	unknown int    // shards that have not answered
	places  uint64 // in the line, given out so far
	tokens  tokenBucket
}

// shardGrant is what the permit allocator knows of a shard.
type shardGrant struct {
	known  bool // it has answered
	asked  bool // it is being asked
	report      // the last that it has told, and what it was granted since
	place  uint64
	op     *permitsOp // waits; nil: none
}

// tokenBucket is a token bucket. A permit takes a token along, for which there is
// no room in the bucket until the shard has told that it has used it: so the
// claims keep to the rate, however long permits and reports are on their way.
//
// Invariant: level + out <= burst, or level is 0.
type tokenBucket struct {
	rate  float64 // tokens a second; 0: no limit
	burst int
	level float64
	out   int // tokens of unused permits
	at    time.Time
}

func (b *tokenBucket) advance(now time.Time) {
	b.level += b.rate * now.Sub(b.at).Seconds()
	b.at = now
	b.clip()
}

func (b *tokenBucket) clip() { b.level = max(0, min(b.level, float64(b.burst-b.out))) }

// count is how many there are.
func (b *tokenBucket) count(now time.Time) int {
	if b.rate == 0 {
		return math.MaxInt
	}
	b.advance(now)
	return int(b.level + 1e-9)
}

// take has n tokens taken along.
func (b *tokenBucket) take(n int) {
	b.level -= float64(n)
	b.out += n
	b.clip()
}

// delay is how long until there is a token, in ms; 0 if that is for a report to tell.
func (b *tokenBucket) delay() uint64 {
	if b.out >= b.burst {
		return 0
	}
	return uint64(math.Ceil(max(1-b.level, 0) / b.rate * 1e3))
}

// set has the bucket go by settings. It is full if there was no rate before, unless
// it is not known what was spent then.
func (b *tokenBucket) set(set *engine.Settings, fresh bool, now time.Time) {
	b.advance(now)
	if b.rate == 0 {
		b.level = 0
		if fresh {
			b.level = float64(set.BurstSize())
		}
	}
	b.rate, b.burst = set.Rate, set.BurstSize()
	b.clip()
}

// allocate has the first shard's owner be the permit allocator of a queue, if need be. Fresh is as for gate.set.
func (s *shard) allocate(c *queuePermits, fresh bool) {
	w, set := c.allocator, c.Settings
	switch {
	case set.Concurrency > 0 || set.Rate > 0:
		if w == nil {
			w = &permitAllocator{claims: c, shards: make([]shardGrant, s.opts.Shards), unknown: s.opts.Shards}
			c.allocator = w
			s.markDirty(c)
		}
		w.tokens.set(set, fresh, time.Now())
		s.allot(w)
	case w != nil:
		c.allocator = nil
		for i := range w.shards {
			if op := w.shards[i].op; op != nil {
				op.granted = op.want
				s.settle(op)
			}
		}
	}
}

// askShards has the shards that the permit allocator does not know tell it what they have.
func (s *shard) askShards(claims *queuePermits) {
	w, q := claims.allocator, claims
	for i := range w.shards {
		if c := &w.shards[i]; !c.known && !c.asked {
			c.asked = true
			op := &askPermitsOp{completion: newCompletion(), queue: q.Name, value: q.Value}
			s.goFor("question for permits", func() {
				change := s.node.queue.replicas[i].route.next()
				err := s.node.doHere(i, op)
				if pace(s.node.ctx, change, err) {
					_ = s.inbox.pass(&permitsTold{allocator: w, shard: i, op: op, err: err}) // the next permit allocator asks again
				}
			})
		}
	}
}

// permitsTold is what a shard has answered.
type permitsTold struct {
	allocator *permitAllocator
	shard     int
	op        *askPermitsOp
	err       error
}

func (t *permitsTold) resolve(s *shard) {
	w := t.allocator
	if w.claims.allocator != w {
		return
	}
	c := &w.shards[t.shard]
	c.asked = false
	if t.err != nil {
		s.markDirty(w.claims)
		return
	}
	w.hear(s, c, &t.op.report)
	c.known = true
	w.unknown--
	s.allot(w)
}

func (t *permitsTold) settle(error) {}

// hear notes what a shard tells; false if that is over.
func (w *permitAllocator) hear(s *shard, c *shardGrant, r *report) bool {
	if !r.after(&c.report) {
		return false
	}
	if c.op != nil {
		s.settle(c.op) // the shard does not wait for it any more
		c.op = nil
	}
	b := &w.tokens
	b.advance(time.Now())
	b.out += r.unused - c.unused
	if r.epoch == c.epoch && r.spent >= c.spent { // what was neither used nor is there comes back
		b.level += float64(max(0, c.unused-r.unused-int(r.spent-c.spent)))
	}
	b.clip()
	c.report = *r
	return true
}

// resolve has the permit allocator know what a shard has, and grants it what there is.
func (op *permitsOp) resolve(s *shard) {
	claims := s.permits.queues[s.Queues[op.queue]]
	if claims == nil || claims.allocator == nil {
		op.granted = op.want
		s.settle(op)
		return
	}
	w := claims.allocator
	if op.shard >= len(w.shards) {
		op.err = errMalformedCall
		s.settle(op)
		return
	}
	c := &w.shards[op.shard]
	if !w.hear(s, c, &op.report) {
		op.err = notLed(op.shard, ErrNotLeader)
		s.settle(op)
		return
	}
	if op.want == 0 {
		c.place = 0
		op.over = w.room() < 0
		s.settle(op)
	} else {
		if c.place == 0 {
			w.places++
			c.place = w.places
		}
		c.op = op
	}
	s.allot(w)
}

// room is how many further leases there may be.
func (w *permitAllocator) room() int {
	limit := w.claims.Settings.Concurrency
	if w.unknown > 0 {
		return -1
	}
	if limit == 0 {
		return math.MaxInt
	}
	for i := range w.shards {
		limit -= w.shards[i].held
	}
	return limit
}

// allot grants what there is, first come, first served.
func (s *shard) allot(w *permitAllocator) {
	if w.unknown > 0 {
		return
	}
	room, tokens := w.room(), w.tokens.count(time.Now())
	for room > 0 && tokens > 0 {
		c := w.first()
		if c == nil {
			break
		}
		n := min(c.op.want, room, tokens)
		c.held += n
		c.unused += n
		w.tokens.take(n)
		tokens -= n
		room = w.room()
		c.place = 0
		c.answer(s, n, false)
	}
	for i := range w.shards {
		if c := &w.shards[i]; c.op != nil && !c.op.wait {
			c.answer(s, 0, room < 0)
		}
	}
	if room > 0 && w.first() != nil {
		if d := w.tokens.delay(); d > 0 {
			s.claims.Throttle(w.claims.Queue, s.Now+d)
		}
	}
}

// first is the first shard in the line that waits now.
func (w *permitAllocator) first() (first *shardGrant) {
	for i := range w.shards {
		c := &w.shards[i]
		if c.op != nil && c.op.gone.Load() {
			c.op = nil
		}
		if c.op != nil && (first == nil || c.place < first.place) {
			first = c
		}
	}
	return first
}

func (c *shardGrant) answer(s *shard, granted int, over bool) {
	c.op.granted, c.op.over = granted, over
	s.settle(c.op)
	c.op = nil
}

// doHere is do without a ctx, for an operation that nobody else has. It does not
// wait for the answer of a node that leads the shard no more.
func (n *node) doHere(shard int, op request) error {
	change := n.queue.replicas[shard].route.next()
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	n.background.Go(func() {
		contain(n.log, "watch of a leader", func() {
			select {
			case <-change:
				cancel()
			case <-ctx.Done():
			}
		}, func(error) { cancel() })
	})
	_, err := n.do(ctx, shard, op)
	return err
}
