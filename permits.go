package codeq

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/permits"
	"codeq/internal/wire"
)

// In a cluster the shards of a queue are led by several nodes, and a limit for all of them is kept
// by permits (internal/permits). The permit allocator is with the leader of the first shard, in
// memory only. Here is how an owner follows what a Holder and an Allocator decide, and how what
// they say travels.

// permitGate is what a shard has of the permits of a queue. It is the gateway of the queue in a
// cluster. The shard's owner uses it.
type permitGate struct {
	permits.Holder
	shard   *shard
	claims  *queuePermits
	drop    context.CancelFunc // ends the call that is under way; nil: there is none
	asking  []*claimOp         // NoWait: want to know if there are permits
	covered int                // those of them whose question is in the call
}

// permitAllocator is the allocator of a queue. The owner of the first shard uses it.
type permitAllocator struct {
	*permits.Allocator
	claims *queuePermits
	ops    []*permitsOp // by shard: wait for answers
}

// permitTable is what a shard knows of the permits of queues. The shard's owner uses it.
type permitTable struct {
	shard   *shard
	queues  map[*engine.Queue]*queuePermits
	dirty   []*queuePermits // flush looks at them
	flushed []*queuePermits // memory for the next dirty
	reports uint64          // to permit allocators
}

// queuePermits is what a shard knows of the permits of a queue.
type queuePermits struct {
	*dispatch.Queue
	allocator *permitAllocator // nil: another shard has it, or none does
	dirty     bool
}

// of returns what the shard knows of the permits of a queue.
func (t *permitTable) of(q *engine.Queue) *queuePermits {
	c := t.queues[q]
	if c == nil {
		if t.queues == nil {
			t.queues = make(map[*engine.Queue]*queuePermits)
		}
		c = &queuePermits{Queue: t.shard.claims.Of(q)}
		t.queues[q] = c
	}
	return c
}

// needs reports whether the table could not do without a queue.
func (t *permitTable) needs(q *engine.Queue) bool {
	c := t.queues[q]
	return c != nil && (c.allocator != nil || c.dirty)
}

// permits is what the shard has of the queue's permits; nil if it needs none.
func (c *queuePermits) permits() *permitGate {
	p, _ := c.Gateway().(*permitGate)
	return p
}

func limitsOf(set *engine.Settings) permits.Limits {
	return permits.Limits{Concurrency: set.Concurrency, Rate: set.Rate, Burst: set.BurstSize()}
}

// Look reports whether there is a permit. If there is none, one is asked for as
// soon as the group has persisted, if there are still claims then for which it would serve.
func (p *permitGate) Look(*dispatch.Dispatcher, time.Time) (ok bool, wait time.Duration) {
	if p.Unused() == 0 {
		p.shard.permits.markDirty(p.claims)
		return false, 0
	}
	return true, 0
}

// Enter uses a permit.
func (p *permitGate) Enter(*dispatch.Dispatcher, time.Time) (ok bool, wait time.Duration) {
	p.shard.permits.markDirty(p.claims)
	if ok = p.Unused() > 0; ok {
		p.Holder.Enter()
	}
	return ok, 0
}

// Leave is the end of n leases. Their permits stay while nobody leads who could take them back.
func (p *permitGate) Leave(n int) (wake []*dispatch.Dispatcher) {
	s := p.shard
	if p.claims.Settings.Concurrency == 0 {
		return nil
	}
	s.permits.markDirty(p.claims)
	if p.Holder.Leave(n, p.TurnEnds(s.Now) && s.node.queue.replicas[0].group.HasLeader()) {
		s.claims.Throttle(p.claims.Queue, s.Now)
	}
	return nil
}

// limit applies the limits of a queue for all its shards. Fresh is as in engine.Reconfigured.
func (t *permitTable) limit(q *engine.Queue, fresh bool) {
	c := t.of(q)
	t.hold(c)
	if t.shard.index == 0 {
		t.allocate(c, fresh)
	}
}

// hold makes permits what the claims of a queue have to pass, if it has limits.
func (t *permitTable) hold(c *queuePermits) {
	limits, p := limitsOf(c.Settings), c.permits()
	if !limits.Any() {
		if p != nil {
			p.hangUp()
			p.answerAsking()
			t.shard.claims.SetGateway(c.Queue, nil)
		}
		return
	}
	if p == nil {
		t.shard.claims.SetGateway(c.Queue, &permitGate{
			Holder: permits.NewHolder(t.shard.epoch, &t.reports, limits), shard: t.shard, claims: c,
		})
	} else {
		p.hangUp()
		p.Set(limits)
	}
	t.markDirty(c)
}

// markDirty lets flush look at a queue.
func (t *permitTable) markDirty(c *queuePermits) {
	if !c.dirty {
		c.dirty = true
		t.dirty = append(t.dirty, c)
	}
}

// openGates opens the queues whose rates let the next tasks pass.
func (t *permitTable) openGates() {
	for q := t.shard.claims.Opening(); q != nil; q = t.shard.claims.Opening() {
		if c := t.queues[q.Queue]; c != nil && c.allocator != nil {
			c.allocator.allot(t.shard)
		}
	}
}

// flush tells the permit allocator, and as the permit allocator asks the other shards, what there
// is to. REQUIRES: all that was decided has persisted.
func (t *permitTable) flush() {
	if len(t.dirty) == 0 {
		return
	}
	t.dirty, t.flushed = t.flushed[:0], t.dirty
	for i, c := range t.flushed {
		t.flushed[i] = nil
		c.dirty = false
		if c.allocator != nil {
			c.allocator.askShards(t.shard)
		}
		if p := c.permits(); p != nil {
			p.report()
		}
	}
}

// report tells the permit allocator what it is to know.
func (p *permitGate) report() {
	s, q := p.shard, p.claims
	r, tell := p.Report(int(q.Counts.Leased), p.need(), len(p.asking) > 0, s.Now)
	if p.Unused() > 0 {
		s.permits.markDirty(p.claims) // until they are used: who wants them may change his mind
	}
	if r.Want == 0 {
		p.answerAsking()
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
		change := s.node.queue.replicas[0].group.Changed()
		settled, err := s.node.do(ctx, 0, op)
		if !settled {
			op.gone.Store(true)
		}
		if pace(ctx, change, err) {
			_ = s.inbox.Pass(&permitsAnswer{permits: p, op: op, err: err}) // whoever leads the shard next tells what it has
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
	q := p.claims
	if q.Settings.Paused {
		return 0
	}
	n, ready := 0, int(q.Counts.Ready)
	for _, op := range p.asking {
		if !op.IsTaken() {
			n += op.Max
		}
	}
	return min(n+p.shard.claims.Wants(q.Queue, ready-n), ready)
}

// Ask keeps a claim that does not wait until it is known whether the permit allocator has permits,
// if they are what it lacks. It is resolved again, or refused, when that is known.
func (p *permitGate) Ask(c *dispatch.Claim) bool {
	q := p.claims
	if p.Unused() > 0 || q.Counts.Ready == 0 || q.Settings.Paused || slices.Contains(c.Asked, q.Name) {
		return false
	}
	p.asking = append(p.asking, c.Caller.(*claimOp))
	return true
}

// MayAsk is always true: the permit allocator may have permits.
func (p *permitGate) MayAsk() bool { return true }

// answerAsking resolves the claims again that want to know if there are permits.
func (p *permitGate) answerAsking() {
	for _, op := range p.asking {
		p.shard.postponeOp(op)
	}
	clear(p.asking)
	p.asking, p.covered = p.asking[:0], 0
}

// close ends the calls that are under way. REQUIRES: the owner is about to end.
func (t *permitTable) close(reason error) {
	for _, c := range t.queues {
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
// as in engine.Reconfigured.
func (t *permitTable) allocate(c *queuePermits, fresh bool) {
	s, limits, w := t.shard, limitsOf(c.Settings), c.allocator
	if limits.Any() {
		if w == nil {
			n := s.opts.Shards
			w = &permitAllocator{permits.NewAllocator(n), c, make([]*permitsOp, n)}
			c.allocator = w
			t.markDirty(c)
		}
		w.Set(limits, fresh, time.Now())
		w.allot(s)
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
func (w *permitAllocator) askShards(s *shard) {
	q := w.claims
	for i := range w.ops {
		if !w.Ask(i) {
			continue
		}
		op := &askPermitsOp{completion: newCompletion(), queue: q.Name, value: q.Value}
		s.goFor("question for permits", func() {
			change := s.node.queue.replicas[i].group.Changed()
			err := s.node.doHere(i, op)
			if pace(s.node.ctx, change, err) {
				_ = s.inbox.Pass(&permitsTold{allocator: w, shard: i, op: op, err: err}) // the next permit allocator asks again
			}
		})
	}
}

// allot answers what the permit allocator can decide.
func (w *permitAllocator) allot(s *shard) {
	for i, op := range w.ops {
		if op != nil && op.gone.Load() {
			w.Withdraw(i)
			w.ops[i] = nil
		}
	}
	answers, wait := w.Allot(time.Now())
	for _, a := range answers {
		w.ops[a.Shard].Answer = a.Answer
		w.dismiss(s, a.Shard)
	}
	if wait > 0 {
		s.claims.Throttle(w.claims.Queue, s.Now+uint64((wait+time.Millisecond-1)/time.Millisecond))
	}
}

// dismiss answers the request of a shard, if there is one.
func (w *permitAllocator) dismiss(s *shard, shard int) {
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
	claims := s.permits.queues[s.Queues[op.queue]]
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
		w.dismiss(s, op.shard) // which waits no more for what it has asked before
		w.ops[op.shard] = op
		w.allot(s)
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
	s.permits.markDirty(p.claims)
	if a.err == nil {
		s.claims.Open(p.claims.Queue) // before those who asked look at the sets that have it
	}
	for _, op := range asked {
		if a.err != nil {
			refuse(op, a.err)
			continue
		}
		op.Asked = append(op.Asked, p.claims.Name)
		op.resolve(s)
	}
}

func (a *permitsAnswer) settle(error) {}

// askPermitsOp asks a shard, for a new permit allocator, what it has of the permits of a queue. The
// shard follows the permit allocator's settings, or newer ones, first.
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
	c := s.permits.of(s.QueueNamed(op.queue))
	p, leased := c.permits(), int(c.Counts.Leased)
	if p == nil { // it needs none, by newer settings
		s.permits.reports++
		op.Report = permits.Report{Epoch: s.epoch, Seq: s.permits.reports, Held: leased}
		return
	}
	p.hangUp()
	op.Report = p.Tell(leased, s.Now)
	s.permits.markDirty(c)
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
		s.permits.markDirty(w.claims)
		return
	}
	if w.Told(t.shard, &t.op.Report, time.Now()) {
		w.dismiss(s, t.shard)
	}
	w.allot(s)
}

func (t *permitsTold) settle(error) {}
