package codeq

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/engine"
	"codeq/internal/permits"
	"codeq/internal/wire"
)

// In a cluster the shards of a queue are led by several nodes, and a limit for all of them is kept
// by permits (internal/permits). The permit allocator is with the leader of the first shard, in
// memory only. Here is how an owner goes by what a Holder and an Allocator decide, and how what
// they say travels.

// permitGate is what a shard has of the permits of a queue. It is the gateway of the queue in a
// cluster. The shard's owner uses it.
type permitGate struct {
	permits.Holder
	shard   *shard
	claims  *queueClaims
	drop    context.CancelFunc // ends the call that is under way; nil: there is none
	asking  []*claimOp         // NoWait: want to know if there are permits
	covered int                // those of them whose question is in the call
}

// permitAllocator is the allocator of a queue. The owner of the first shard uses it.
type permitAllocator struct {
	*permits.Allocator
	claims *queueClaims
	ops    []*permitsOp // by shard: wait for answers
}

// permits is what the shard has of the queue's permits; nil if it needs none.
func (c *queueClaims) permits() *permitGate {
	p, _ := c.gate.(*permitGate)
	return p
}

func limitsOf(set *engine.Settings) permits.Limits {
	return permits.Limits{Concurrency: set.Concurrency, Rate: set.Rate, Burst: burstOf(set)}
}

// look reports whether there is a permit. If there is none, one is asked for as
// soon as the group has persisted, if there are still claims then for which it would serve.
func (p *permitGate) look(*shard, time.Time) (ok bool, wait time.Duration) {
	if p.Unused() == 0 {
		p.shard.markDirty(p.claims)
		return false, 0
	}
	return true, 0
}

// enter uses a permit.
func (p *permitGate) enter(*shard, time.Time) (ok bool, wait time.Duration) {
	p.shard.markDirty(p.claims)
	if ok = p.Unused() > 0; ok {
		p.Enter()
	}
	return ok, 0
}

// leave is the end of n leases. Their permits stay while nobody leads who could take them back.
func (p *permitGate) leave(n int) (wake []*shard) {
	s := p.shard
	if p.claims.queue.Settings.Concurrency == 0 {
		return nil
	}
	s.markDirty(p.claims)
	if p.Leave(n, p.TurnEnds(s.Now) && s.node.queue.replicas[0].hasLeader()) {
		s.throttle(p.claims, s.Now)
	}
	return nil
}

// permit makes a shard go by the limits of a queue for all its shards.
func (s *shard) permit(c *queueClaims) {
	limits, p := limitsOf(c.queue.Settings), c.permits()
	if !limits.Any() {
		if p != nil {
			p.hangUp()
			s.answerAsking(p)
			c.gate = nil
		}
		return
	}
	if p == nil {
		c.gate = &permitGate{Holder: permits.NewHolder(s.epoch, &s.reports, limits), shard: s, claims: c}
	} else {
		p.hangUp()
		p.Set(limits)
	}
	s.markDirty(c)
}

// markDirty has flushReports look after a queue.
func (s *shard) markDirty(c *queueClaims) {
	if !c.dirty {
		c.dirty = true
		s.dirty = append(s.dirty, c)
	}
}

// flushReports tells the permit allocator, and as the permit allocator asks the other shards, what
// there is to. REQUIRES: all that was decided has persisted.
func (s *shard) flushReports() {
	if len(s.dirty) == 0 {
		return
	}
	s.dirty, s.dirtyBefore = s.dirtyBefore[:0], s.dirty
	for i, c := range s.dirtyBefore {
		s.dirtyBefore[i] = nil
		c.dirty = false
		if c.allocator != nil {
			s.askShards(c.allocator)
		}
		if p := c.permits(); p != nil {
			s.report(p)
		}
	}
}

// report tells the permit allocator what it is to know.
func (s *shard) report(p *permitGate) {
	q := p.claims.queue
	r, tell := p.Report(int(q.Counts.Leased), p.need(), len(p.asking) > 0, s.Now)
	if p.Unused() > 0 {
		s.markDirty(p.claims) // until they are used: who wants them may change his mind
	}
	if r.Want == 0 {
		s.answerAsking(p)
	}
	if !tell {
		return
	}
	p.hangUp()
	op := &permitsOp{completion: newCompletion(), queue: q.Name, shard: s.index, Request: r}
	ctx, drop := context.WithCancel(s.node.ctx)
	p.drop, p.covered = drop, len(p.asking)
	s.goFor("report of permits", func() {
		defer drop()
		change := s.node.queue.replicas[0].route.next()
		settled, err := s.node.do(ctx, 0, op)
		if !settled {
			op.gone.Store(true)
		}
		if pace(ctx, change, err) {
			_ = s.inbox.pass(&permitsAnswer{permits: p, op: op, err: err}) // whoever leads the shard next tells what it has
		}
	})
}

// hangUp ends the call whose answer is void.
func (p *permitGate) hangUp() {
	if p.drop != nil {
		p.drop()
		p.drop, p.covered = nil, 0
	}
}

// need is how many tasks could be leased at once, if there were permits.
func (p *permitGate) need() int {
	q := p.claims.queue
	if q.Settings.Paused {
		return 0
	}
	n, ready := 0, int(q.Counts.Ready)
	for _, op := range p.asking {
		if !op.isTaken() {
			n += op.max
		}
	}
	n += p.claims.claimLines.wants(ready - n)
	for _, e := range p.claims.sets {
		n += e.set.wants(ready - n)
	}
	return min(n, ready)
}

// asks keeps a claim that does not wait until it is known whether the permit allocator has permits,
// if they are what it lacks. It is resolved again, or refused, when that is known.
func (s *shard) asks(c *queueClaims, op *claimOp) bool {
	p, q := c.permits(), c.queue
	if p == nil || p.Unused() > 0 || q.Counts.Ready == 0 || q.Settings.Paused || slices.Contains(op.asked, q.Name) {
		return false
	}
	p.asking = append(p.asking, op)
	return true
}

// answerAsking resolves the claims again that want to know if there are permits.
func (s *shard) answerAsking(p *permitGate) {
	for _, op := range p.asking {
		s.postponeOp(op)
	}
	clear(p.asking)
	p.asking, p.covered = p.asking[:0], 0
}

// closePermits ends the calls that are under way. REQUIRES: the owner is about to end.
func (s *shard) closePermits(reason error) {
	for _, c := range s.claims.All() {
		if c == nil {
			continue
		}
		if p := c.permits(); p != nil {
			p.hangUp()
			for _, op := range p.asking {
				refuse(op, reason)
			}
		}
		if w := c.allocator; w != nil {
			for _, op := range w.ops {
				if op != nil {
					op.settle(reason)
				}
			}
		}
	}
}

// allocate makes the first shard's owner the permit allocator of a queue that has limits. Fresh is
// as for gate.set.
func (s *shard) allocate(c *queueClaims, fresh bool) {
	limits, w := limitsOf(c.queue.Settings), c.allocator
	if limits.Any() {
		if w == nil {
			n := s.opts.Shards
			w = &permitAllocator{permits.NewAllocator(n), c, make([]*permitsOp, n)}
			c.allocator = w
			s.markDirty(c)
		}
		w.Set(limits, fresh, time.Now())
		s.allot(w)
		return
	}
	c.allocator = nil
	if w != nil {
		for _, op := range w.ops {
			if op != nil {
				op.Granted = op.Want
				s.settle(op)
			}
		}
	}
}

// askShards asks the shards that the permit allocator does not know.
func (s *shard) askShards(w *permitAllocator) {
	q := w.claims.queue
	for i := range w.ops {
		if !w.Ask(i) {
			continue
		}
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

// allot answers what the permit allocator can decide.
func (s *shard) allot(w *permitAllocator) {
	for i, op := range w.ops {
		if op != nil && op.gone.Load() {
			w.Withdraw(i)
			w.ops[i] = nil
		}
	}
	answers, wait := w.Allot(time.Now())
	for _, a := range answers {
		w.ops[a.Shard].Answer = a.Answer
		s.dismissOp(w, a.Shard)
	}
	if wait > 0 {
		s.throttle(w.claims, s.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
	}
}

// dismissOp answers the request of a shard, if there is one.
func (s *shard) dismissOp(w *permitAllocator, shard int) {
	if op := w.ops[shard]; op != nil {
		w.ops[shard] = nil
		s.settle(op)
	}
}

// permitsOp tells the permit allocator of a shard's permits of a queue, and asks for more.
type permitsOp struct {
	completion
	queue string
	shard int
	permits.Request
	gone atomic.Bool // the shard waits no more

	permits.Answer
}

func (op *permitsOp) abandon(*shard) { op.gone.Store(true) }

// again makes what follows of what was told before, which may arrive yet.
func (op *permitsOp) again() {
	op.Try++
	op.Answer, op.err = permits.Answer{}, nil
}

func (op *permitsOp) resolve(s *shard) {
	claims := s.knownClaims(op.queue)
	if claims == nil || claims.allocator == nil {
		op.Granted = op.Want
		s.settle(op)
		return
	}
	w := claims.allocator
	switch {
	case op.shard >= len(w.ops):
		op.err = errMalformedCall
	case !w.Hear(op.shard, &op.Request, time.Now()):
		op.err = notLed(op.shard, ErrNotLeader)
	default:
		s.dismissOp(w, op.shard) // which waits no more for what it has asked before
		w.ops[op.shard] = op
		s.allot(w)
		return
	}
	s.settle(op)
}

func (op *permitsOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(wire.AppendBytes(dst, op.queue), uint64(op.shard))
	return callPermits, op.Request.Append(dst)
}

func (op *permitsOp) decode(r *wire.Reader) {
	op.queue, op.shard = r.String(), int(r.Uint())
	op.Request = permits.ReadRequest(r)
	if op.shard < 0 {
		r.Fail()
	}
}

func (op *permitsOp) encodeReply(dst []byte) []byte { return op.Answer.Append(dst) }

func (op *permitsOp) decodeReply(r *wire.Reader) {
	if op.Answer = permits.ReadAnswer(r); op.Granted > op.Want {
		r.Fail()
	}
}

// permitsAnswer is what has become of a permitsOp.
type permitsAnswer struct {
	permits *permitGate
	op      *permitsOp
	err     error
}

func (a *permitsAnswer) resolve(s *shard) {
	p := a.permits
	if p.claims.permits() != p || a.err != nil && !p.Unanswered(&a.op.Request) || a.err == nil && !p.Answered(&a.op.Request, a.op.Answer) {
		return
	}
	asked := slices.Clone(p.asking[:p.covered])
	p.asking = slices.Delete(p.asking, 0, p.covered)
	p.hangUp()
	s.markDirty(p.claims)
	if a.err == nil {
		s.open(p.claims) // before those who asked look at the sets that have it
	}
	for _, op := range asked {
		if a.err != nil {
			refuse(op, a.err)
			continue
		}
		op.asked = append(op.asked, p.claims.queue.Name)
		op.resolve(s)
	}
}

func (a *permitsAnswer) settle(error) {}

// askPermitsOp asks a shard, for a new permit allocator, what it has of the permits of a queue. The
// shard goes by the permit allocator's settings, or newer ones, first.
type askPermitsOp struct {
	completion
	queue string
	value []byte // the settings
	permits.Report
}

func (op *askPermitsOp) resolve(s *shard) {
	s.settle(op)
	if op.err = s.refusal(s.Adopt(op.queue, op.value)); op.err != nil {
		return
	}
	s.follow()
	c := s.claimsOf(s.QueueNamed(op.queue))
	p, leased := c.permits(), int(c.queue.Counts.Leased)
	if p == nil { // it needs none, by newer settings
		s.reports++
		op.Report = permits.Report{Epoch: s.epoch, Seq: s.reports, Held: leased}
		return
	}
	p.hangUp()
	op.Report = p.Tell(leased, s.Now)
	s.markDirty(c)
}

func (op *askPermitsOp) encode(dst []byte) (callKind, []byte) {
	return callAskPermits, wire.AppendBytes(wire.AppendBytes(dst, op.queue), op.value)
}

func (op *askPermitsOp) decode(r *wire.Reader) { op.queue, op.value = r.String(), r.Bytes() }

func (op *askPermitsOp) encodeReply(dst []byte) []byte { return op.Report.Append(dst) }

func (op *askPermitsOp) decodeReply(r *wire.Reader) { op.Report = permits.ReadReport(r) }

// permitsTold is what has become of an askPermitsOp.
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
	if t.err != nil {
		w.Untold(t.shard)
		s.markDirty(w.claims)
		return
	}
	if w.Told(t.shard, &t.op.Report, time.Now()) {
		s.dismissOp(w, t.shard)
	}
	s.allot(w)
}

func (t *permitsTold) settle(error) {}

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
