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
			notify(m.inbox, &internalParks, func(*shard) { g.Answered(&op.Request, op.Answer, err) })
		}
	})
	return drop
}

func (m permitMail) Ask(a *dispatch.PermitAllocator, to int, q *engine.Queue) {
	op := &askPermitsOp{completion: newCompletion(callAskPermits), Question: permits.Question{Queue: q.Name, Settings: q.Value}}
	m.goFor("question for permits", func() {
		change := m.node.queue.replicas[to].group.Changed()
		ctx, drop := m.node.Group(to).WhileLed(m.node.ctx)
		defer drop()
		_, err := m.node.do(ctx, to, op) // no other goroutine has op
		if cluster.Pace(m.node.ctx, change, err) {
			notify(m.inbox, &internal, func(*shard) { a.Answered(to, &op.Report, err) })
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
