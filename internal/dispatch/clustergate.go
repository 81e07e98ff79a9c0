package dispatch

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/engine"
	"codeq/internal/permits"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Permits limits the queues of a shard in a cluster, where several nodes lead the shards and share
// the limits. It follows what Holders and Allocators decide (internal/permits). The allocators are
// with the leader of the first shard, in memory only. The shard's owner uses a Permits.
type Permits struct {
	claims  *Dispatcher
	mail    Mail
	dirty   []*Queue // Flush looks at them
	flushed []*Queue // memory for the next dirty
	reports uint64   // to allocators
}

// Mail carries messages between shards and allocators. Its methods do not wait.
type Mail interface {
	// Epoch is the epoch of the shard's leader.
	Epoch() uint64
	// IsReachable reports whether the first shard has a leader, which can take permits back.
	IsReachable() bool
	// Report sends a request of the shard to the allocator of a queue. The owner calls
	// PermitGate.Answered, unless drop is called before.
	Report(g *PermitGate, queue string, r *permits.Request) (drop context.CancelFunc)
	// Ask asks a shard for its report on the permits of a queue. The owner calls
	// PermitAllocator.Answered.
	Ask(a *PermitAllocator, shard int, q *engine.Queue)
	// Reply answers a request of a shard when the group has persisted.
	Reply(r *PermitRequest)
	// Refuse ends a request without an answer.
	Refuse(r *PermitRequest, reason error)
	// Retry resolves a claim in the next group; RetryNow resolves it at once.
	Retry(c *Claim)
	RetryNow(c *Claim)
	// RefuseClaim ends a claim that waits for permits.
	RefuseClaim(c *Claim, reason error)
}

// NewPermits returns the Permits of a Dispatcher without gates.
func NewPermits(claims *Dispatcher, mail Mail) *Permits {
	return &Permits{claims: claims, mail: mail}
}

// PermitGate holds a shard's permits of a queue. It is the gateway of the queue in a cluster.
type PermitGate struct {
	permits.Holder
	permits *Permits
	queue   *Queue
	drop    context.CancelFunc // ends the call that is under way; nil: there is none
	asking  []*Claim           // NoWait: want to know if there are permits
	covered int                // how many of them the call asks for
}

// PermitAllocator is the allocator of a queue.
type PermitAllocator struct {
	*permits.Allocator
	permits  *Permits
	queue    *Queue
	requests []*PermitRequest // by shard: wait for answers
}

// PermitRequest tells an allocator of a shard's permits of a queue, and asks for more.
type PermitRequest struct {
	Queue string
	Shard int // that asks
	permits.Request
	permits.Answer
	Caller any         // of Mail
	Gone   atomic.Bool // the shard waits no more
}

// Append appends the request, for Read.
func (r *PermitRequest) Append(dst []byte) []byte {
	return r.Request.Append(wire.AppendUint(wire.AppendBytes(dst, r.Queue), uint64(r.Shard)))
}

// Read reads a request, whose Shard may be the number of none.
func (r *PermitRequest) Read(from *wire.Reader) {
	r.Queue, r.Shard = from.String(), int(from.Uint())
	r.Request = permits.ReadRequest(from)
	if r.Shard < 0 {
		from.Fail()
	}
}

// AppendReply appends the answer, for ReadReply.
func (r *PermitRequest) AppendReply(dst []byte) []byte { return r.Answer.Append(dst) }

// ReadReply reads the answer.
func (r *PermitRequest) ReadReply(from *wire.Reader) {
	if r.Answer = permits.ReadAnswer(from); r.Granted > r.Want {
		from.Fail()
	}
}

// Again renumbers the request for another try: the earlier message may still arrive.
func (r *PermitRequest) Again() { r.Try, r.Answer = r.Try+1, permits.Answer{} }

// permits returns the shard's permits of the queue; nil if it needs none.
func (q *Queue) permits() *PermitGate {
	p, _ := q.gate.(*PermitGate)
	return p
}

func limitsOf(set *record.Settings) permits.Limits {
	return permits.Limits{Concurrency: set.Concurrency, Rate: set.Rate, Burst: set.BurstSize()}
}

// Reports returns how many reports the shard has sent to allocators.
func (t *Permits) Reports() uint64 { return t.reports }

// Limit applies the new settings of a queue to its claims: by a gate if the process has all shards,
// otherwise by permits.
func (t *Permits) Limit(r engine.Reconfigured) {
	q := t.claims.Of(r.Queue)
	if t.claims.gates != nil {
		t.claims.limit(q, r.AfterOpen)
	} else if t.hold(q); t.claims.index == 0 {
		t.allocate(q, r.AfterOpen)
	}
	t.claims.Open(q)
}

// hold makes the claims of a queue pass its permits, if it has limits.
func (t *Permits) hold(q *Queue) {
	limits, p := limitsOf(q.Settings), q.permits()
	if !limits.Any() {
		if p != nil {
			p.cancelCall()
			p.answerAsking()
			t.claims.SetGateway(q, nil)
		}
		return
	}
	if p == nil {
		t.claims.SetGateway(q, &PermitGate{
			Holder: permits.NewHolder(t.mail.Epoch(), &t.reports, limits), permits: t, queue: q,
		})
	} else {
		p.cancelCall()
		p.Set(limits)
	}
	t.markDirty(q)
}

// markDirty puts a queue on the list of the next Flush.
func (t *Permits) markDirty(q *Queue) {
	if !q.isDirty {
		q.isDirty = true
		t.dirty = append(t.dirty, q)
	}
}

// openGates opens the queues that have a new token of their rate.
func (t *Permits) openGates() {
	for q := t.claims.opening(); q != nil; q = t.claims.opening() {
		if q.allocator != nil {
			q.allocator.allot()
		}
	}
}

// Flush sends reports to the allocators. For queues that the shard allocates, it sends questions to
// the other shards. REQUIRES: all that was decided has persisted.
func (t *Permits) Flush() {
	if len(t.dirty) == 0 {
		return
	}
	t.dirty, t.flushed = t.flushed[:0], t.dirty
	for i, q := range t.flushed {
		t.flushed[i] = nil
		q.isDirty = false
		if q.allocator != nil {
			q.allocator.askShards()
		}
		if p := q.permits(); p != nil {
			p.report()
		}
	}
}

// Close ends the calls that are under way. REQUIRES: the owner is about to end.
func (t *Permits) Close(reason error) {
	for _, q := range t.claims.queues.All() {
		if q == nil {
			continue
		}
		if p := q.permits(); p != nil {
			p.cancelCall()
			for _, c := range p.asking {
				t.mail.RefuseClaim(c, reason)
			}
		}
		if a := q.allocator; a != nil {
			for _, r := range a.requests {
				if r != nil {
					t.mail.Refuse(r, reason)
				}
			}
		}
	}
}

// Hear takes the request of a shard for the permits of a queue, which is answered by Mail.Reply. It
// returns false if the request is outdated. REQUIRES: the shard exists.
func (t *Permits) Hear(r *PermitRequest) bool {
	q := t.claims.known(r.Queue)
	if q == nil || q.allocator == nil {
		r.Granted = r.Want
		t.mail.Reply(r)
		return true
	}
	a := q.allocator
	if !a.Hear(r.Shard, &r.Request, t.claims.now()) {
		return false
	}
	a.dismiss(r.Shard) // its earlier request is over
	a.requests[r.Shard] = r
	a.allot()
	return true
}

// ReportNow reports the shard's permits of a queue to a new allocator.
func (t *Permits) ReportNow(q *engine.Queue) permits.Report {
	c := t.claims.Of(q)
	p, leased := c.permits(), c.atWork()
	if p == nil { // it needs none, by newer settings
		t.reports++
		return permits.Report{Epoch: t.mail.Epoch(), Seq: t.reports, Held: leased}
	}
	p.cancelCall()
	t.markDirty(c)
	r := p.Holder.ReportNow(leased, t.claims.rules.Now)
	r.Idle = t.claims.sinceGrant(c)
	return r
}

// Look reports whether there is a permit. If there is none, the shard asks for one when the group
// has persisted, if claims still wait then.
func (p *PermitGate) Look(*Dispatcher, time.Time) (ok bool, wait time.Duration) {
	if p.Unused() == 0 {
		p.permits.markDirty(p.queue)
		return false, 0
	}
	return true, 0
}

// Enter uses a permit.
func (p *PermitGate) Enter(*Dispatcher, time.Time) (ok bool, wait time.Duration) {
	p.permits.markDirty(p.queue)
	if ok = p.Unused() > 0; ok {
		p.Holder.Enter()
	}
	return ok, 0
}

// Leave is the end of n leases. Their permits stay while no leader can take them back.
func (p *PermitGate) Leave(n int) (wake []*Dispatcher) {
	d := p.permits.claims
	if p.queue.Settings.Concurrency == 0 {
		return nil
	}
	p.permits.markDirty(p.queue)
	if p.Holder.Leave(n, p.TurnEnds(d.rules.Now) && p.permits.mail.IsReachable()) {
		d.throttle(p.queue, d.rules.Now)
	}
	return nil
}

// Ask keeps a claim that does not wait, and that lacks permits only, until the allocator has
// answered. Then the claim is resolved again, or refused.
func (p *PermitGate) Ask(c *Claim) bool {
	q := p.queue
	if p.Unused() > 0 || q.Counts.Ready == 0 || q.Settings.Paused || slices.Contains(c.Asked, q.Name) {
		return false
	}
	p.asking = append(p.asking, c)
	return true
}

// MayAsk is always true: the allocator may have permits.
func (p *PermitGate) MayAsk() bool { return true }

// IsBusy reports whether a call is under way, or claims wait for one.
func (p *PermitGate) IsBusy() bool { return p.drop != nil || len(p.asking) > 0 }

// report sends a report to the allocator, if something has changed.
func (p *PermitGate) report() {
	q, t := p.queue, p.permits
	r, send := p.Report(q.atWork(), p.need(), len(p.asking) > 0, t.claims.rules.Now)
	if p.Unused() > 0 {
		t.markDirty(q) // until they are used: who wants them may change his mind
	}
	if r.Want == 0 {
		p.answerAsking()
	}
	if !send {
		return
	}
	if first, ok := t.claims.rules.Names.First(q.Queue); ok {
		r.Rank, r.Share = engine.Rank(first.Priority), first.Share
	}
	p.cancelCall()
	p.drop, p.covered = t.mail.Report(p, q.Name, &r), len(p.asking)
}

// cancelCall cancels the call under way: its answer would be outdated.
func (p *PermitGate) cancelCall() {
	if p.drop != nil {
		p.drop()
		p.drop, p.covered = nil, 0
	}
}

// need is how many tasks could be leased at once, if there were permits.
func (p *PermitGate) need() int {
	q := p.queue
	if q.Settings.Paused {
		return 0
	}
	n, ready := 0, int(q.Counts.Ready)
	for _, c := range p.asking {
		if !c.IsTaken() {
			n += c.Max
		}
	}
	return min(n+p.permits.claims.wants(q, ready-n), ready)
}

// answerAsking resolves the claims again that want to know if there are permits.
func (p *PermitGate) answerAsking() {
	for _, c := range p.asking {
		p.permits.mail.Retry(c)
	}
	clear(p.asking)
	p.asking, p.covered = p.asking[:0], 0
}

// Answered takes the answer to a report, or the error that ended it.
func (p *PermitGate) Answered(r *permits.Request, a permits.Answer, err error) {
	q, t := p.queue, p.permits
	if q.permits() != p || err != nil && !p.Unanswered(r) || err == nil && !p.Holder.Answered(r, a) {
		return
	}
	asked := slices.Clone(p.asking[:p.covered])
	p.asking = slices.Delete(p.asking, 0, p.covered)
	p.cancelCall()
	t.markDirty(q)
	if err == nil {
		t.claims.Open(q) // before the claims that asked look at the sets that have it
	}
	for _, c := range asked {
		if err != nil {
			t.mail.RefuseClaim(c, err)
			continue
		}
		c.Asked = append(c.Asked, q.Name)
		t.mail.RetryNow(c)
	}
}

// allocate makes the first shard's owner the allocator of a queue that has limits. afterOpen is as
// in engine.Reconfigured.
func (t *Permits) allocate(q *Queue, afterOpen bool) {
	limits, a := limitsOf(q.Settings), q.allocator
	if limits.Any() {
		if a == nil {
			n := t.claims.shards
			a = &PermitAllocator{permits.NewAllocator(n), t, q, make([]*PermitRequest, n)}
			q.allocator = a
			t.markDirty(q)
		}
		a.Set(limits, afterOpen, t.claims.now())
		a.allot()
		return
	}
	q.allocator = nil
	if a != nil {
		for _, r := range a.requests {
			if r != nil {
				r.Granted = r.Want
				t.mail.Reply(r)
			}
		}
	}
}

// askShards asks the shards that the allocator does not know.
func (a *PermitAllocator) askShards() {
	for i := range a.requests {
		if a.Ask(i) {
			a.permits.mail.Ask(a, i, a.queue.Queue)
		}
	}
}

// Answered takes a shard's answer to Ask, or the error that ended the question.
func (a *PermitAllocator) Answered(shard int, r *permits.Report, err error) {
	if a.queue.allocator != a {
		return
	}
	if err != nil {
		a.NotReported(shard)
		a.permits.markDirty(a.queue)
		return
	}
	if a.Reported(shard, r, a.permits.claims.now()) {
		a.dismiss(shard)
	}
	a.allot()
}

// allot answers the requests that the allocator can decide.
func (a *PermitAllocator) allot() {
	for i, r := range a.requests {
		if r != nil && r.Gone.Load() {
			a.Withdraw(i)
			a.requests[i] = nil
		}
	}
	decisions, wait := a.Allot(a.permits.claims.now())
	for _, d := range decisions {
		a.requests[d.Shard].Answer = d.Answer
		a.dismiss(d.Shard)
	}
	if wait > 0 {
		a.permits.claims.throttleFor(a.queue, wait)
	}
}

// dismiss answers the request of a shard, if there is one.
func (a *PermitAllocator) dismiss(shard int) {
	if r := a.requests[shard]; r != nil {
		a.requests[shard] = nil
		a.permits.mail.Reply(r)
	}
}
