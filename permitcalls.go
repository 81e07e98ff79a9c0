package codeq

import (
	"context"

	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/permits"
)

// In a cluster a limit for all shards of a queue is kept by permits (dispatch.Permits). Here is how
// what shards and allocators say travels between owners.

// permitMail is the Mail of a shard.
type permitMail struct{ *shard }

func (m permitMail) Epoch() uint64 { return m.epoch }

func (m permitMail) IsReachable() bool { return m.node.queue.replicas[0].group.HasLeader() }

func (m permitMail) Report(g *dispatch.PermitGate, queue string, r *permits.Request) context.CancelFunc {
	op := &permitsOp{completion: newCompletion(callPermits), PermitRequest: dispatch.PermitRequest{Queue: queue, Shard: m.index, Request: *r}}
	ctx, drop := context.WithCancel(m.node.ctx)
	m.goFor("report of permits", func() {
		defer drop()
		change := m.node.queue.replicas[0].group.Changed()
		settled, err := m.node.do(ctx, 0, op)
		if !settled {
			op.Gone.Store(true)
		}
		if cluster.Pace(ctx, change, err) {
			_ = m.inbox.Pass(&permitsAnswer{gate: g, op: op, err: err}) // the next leader of the shard reports its permits
		}
	})
	return drop
}

func (m permitMail) Ask(a *dispatch.PermitAllocator, shard int, q *engine.Queue) {
	op := &askPermitsOp{completion: newCompletion(callAskPermits), Question: permits.Question{Queue: q.Name, Settings: q.Value}}
	m.goFor("question for permits", func() {
		change := m.node.queue.replicas[shard].group.Changed()
		ctx, drop := m.node.Group(shard).WhileLed(m.node.ctx)
		defer drop()
		_, err := m.node.do(ctx, shard, op) // no other goroutine has op
		if cluster.Pace(m.node.ctx, change, err) {
			_ = m.inbox.Pass(&askPermitsDone{allocator: a, shard: shard, op: op, err: err}) // the next allocator asks again
		}
	})
}

func (m permitMail) Reply(r *dispatch.PermitRequest) { m.settleAfterCommit(r.Caller.(*permitsOp)) }
func (m permitMail) Refuse(r *dispatch.PermitRequest, reason error) {
	r.Caller.(*permitsOp).settle(reason)
}

func (m permitMail) Retry(c *dispatch.Claim)                     { m.deferOp(c.Caller.(*claimOp)) }
func (m permitMail) RetryNow(c *dispatch.Claim)                  { c.Caller.(*claimOp).resolve(m.shard) }
func (m permitMail) RefuseClaim(c *dispatch.Claim, reason error) { refuse(c.Caller.(*claimOp), reason) }

// permitsOp reports a shard's permits of a queue to the permit allocator, and asks for more.
type permitsOp struct {
	completion
	dispatch.PermitRequest
}

func (op *permitsOp) abandon(*shard) { op.Gone.Store(true) }

func (op *permitsOp) resolve(s *shard) {
	op.Caller = op
	switch {
	case op.Shard >= s.opts.Shards:
		op.err = errMalformedCall
	case !s.permits.Hear(&op.PermitRequest):
		op.err = notLed(op.Shard, ErrNotLeader)
	default:
		return
	}
	s.settleAfterCommit(op)
}

// permitsAnswer is the outcome of a permitsOp.
type permitsAnswer struct {
	parkedNotice
	gate *dispatch.PermitGate
	op   *permitsOp
	err  error
}

func (a *permitsAnswer) resolve(*shard) { a.gate.Answered(&a.op.Request, a.op.Answer, a.err) }

// askPermitsOp asks a shard, for a new permit allocator, for its permits of a queue. The shard
// follows the permit allocator's settings, or newer ones, first.
type askPermitsOp struct {
	completion
	permits.Question
}

func (op *askPermitsOp) resolve(s *shard) {
	s.settleAfterCommit(op)
	if op.err = s.refusal(s.rules.Names.Adopt(op.Queue, op.Settings)); op.err != nil {
		return
	}
	s.follow()
	op.Report = s.permits.ReportNow(s.rules.Names.QueueNamed(op.Queue))
}

// askPermitsDone is the outcome of an askPermitsOp.
type askPermitsDone struct {
	notice
	allocator *dispatch.PermitAllocator
	shard     int
	op        *askPermitsOp
	err       error
}

func (t *askPermitsDone) resolve(*shard) { t.allocator.Answered(t.shard, &t.op.Report, t.err) }
