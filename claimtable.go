package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
)

// claimTable takes the claims of this node that wait, in a cluster, to the shards of all nodes.
type claimTable struct {
	*dispatch.ClaimLines
	node *node
}

func newClaimTable(n *node) *claimTable {
	t := &claimTable{node: n}
	t.ClaimLines = dispatch.NewClaimLines(dispatch.LinesConfig{
		Shards: len(n.queue.replicas), Batch: min(fetchCap, n.queue.opts.Limits.Batch),
		Context: n.ctx, Background: &n.background, Log: n.log, PanicError: panicError, Now: n.queue.opts.private.Mono,
	}, (*claimHost)(n))
	return t
}

func (t *claimTable) claim(ctx context.Context, req *ClaimRequest, r *runner) (*claimOp, error) {
	var patience base.Patience
	var limit *base.Limit
	if req.NoWait {
		limit = t.node.Limit(ctx)
		defer limit.Free()
		patience = t.node.PatienceOf(limit, true)
	}
	for {
		change := t.node.Changed()
		op, err := t.try(ctx, req, r, limit)
		if err == nil || cluster.IsRemoval(err) || !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain) {
			return op, err
		}
		// A lease that may have been granted ends by itself.
		again := patience.Wait(ctx, change)
		if ctx.Err() != nil {
			return nil, base.EndOf(ctx)
		}
		if !again {
			return nil, err
		}
	}
}

// try asks the shards that are led here. Then the claim waits, or the others are asked.
func (t *claimTable) try(ctx context.Context, req *ClaimRequest, r *runner, limit *base.Limit) (*claimOp, error) {
	q := t.node.queue
	led := q.led()
	if len(led) == 0 && req.NoWait {
		return t.askAll(ctx, req, r, led, limit)
	}
	op := q.newClaim(req, r)
	op.table = t
	if len(led) == 0 {
		t.add(op)
	} else {
		op.shards, op.begin = led, q.claimShardOf(op, led)
		switch err := led[op.begin].inbox.Push(ctx, op, limit); {
		case err == nil:
		case !req.NoWait && errors.Is(err, ErrNotLeader):
			t.add(op)
		default:
			op.unref()
			op.unref()
			return nil, err
		}
	}
	op, err := q.wait(ctx, op, limit)
	if err != nil && req.NoWait && errors.Is(err, ErrEmpty) {
		return t.askAll(ctx, req, r, led, limit)
	}
	return op, err
}

// askAll asks the shards of other nodes, without waiting. This node has asked those that it led.
func (t *claimTable) askAll(ctx context.Context, req *ClaimRequest, r *runner, led []*shard, limit *base.Limit) (*claimOp, error) {
	n := t.node
	var unreached error
	first := rand.IntN(len(n.queue.replicas))
	for i := range n.queue.replicas {
		shard := n.queue.replicas[(first+i)%len(n.queue.replicas)]
		if s := shard.lead.Load(); s != nil {
			if !slices.Contains(led, s) {
				unreached = fmt.Errorf("%w: shard %d has come to this node meanwhile", ErrNotLeader, s.index)
			}
			continue
		}
		op := n.queue.newClaim(req, r)
		err := n.forward(ctx, shard, op, limit)
		op.unref() // no other goroutine has it
		if err == nil {
			return op, nil
		}
		op.unref()
		if !errors.Is(err, ErrEmpty) {
			unreached = err
		}
	}
	return nil, cmp.Or(unreached, ErrEmpty)
}

// add lists a claim that waits, unless it is listed. It takes over the caller's reference. The
// claim comes to wait in the shards that this node leads by now and that it has not visited: their
// leadership is new, or that of one before them has ended.
func (t *claimTable) add(op *claimOp) {
	defer op.unref()
	queues, list, added := t.Add(&op.Claim, &op.place)
	if !added {
		return
	}
	led := t.node.queue.led()
	if op.visited >= len(op.shards) && slices.Equal(led, op.shards) { // as ever
		return
	}
	for _, s := range led {
		if !op.hasVisited(s) {
			s.admit(op.Ticket(), queues, list)
		}
	}
}

func (s *shard) admit(ticket dispatch.Ticket, queues []string, list *dispatch.List) {
	op := &notice{of: &internalParks}
	op.do = func(s *shard) {
		switch {
		case !ticket.Good():
		case list != nil && !s.claims.Build(list):
			s.deferOp(op)
		default:
			s.claims.WaitBy(ticket, queues, list, false)
		}
	}
	_ = s.inbox.Pass(op) // or else the claim waits elsewhere
}

type claimHost node

func (h *claimHost) Watch(shard int) (elsewhere bool, change <-chan struct{}) {
	r := h.queue.replicas[shard]
	change = r.group.Changed()
	return r.lead.Load() == nil && r.group.HasLeader(), change
}

func (h *claimHost) Claim(ctx context.Context, shard int, r dispatch.LineRequest) ([]engine.Grant, error) {
	op := &claimOp{completion: newCompletion(callClaim), Claim: dispatch.Claim{
		Queues: r.Queues, Weights: r.Weights, List: r.List, Duration: r.Duration,
		Holder: engine.Holder{Local: r.Local, Handled: r.Handled, Worker: r.Worker, Process: h.queue.slow.Process()}, Max: r.Max, Remote: true,
	}}
	err := (*node)(h).forward(ctx, h.queue.replicas[shard], op, nil)
	return op.Grants, err
}

func (h *claimHost) Renew(ctx context.Context, shard int, leases []engine.Receipt, duration uint64) ([]engine.Receipt, error) {
	b := &call.Renew{Receipts: leases, Duration: duration}
	_, err := (*node)(h).do(ctx, shard, rule(callRenew, b))
	return b.Lost, err
}

func (h *claimHost) GiveBack(ctx context.Context, lease engine.Receipt) {
	op := call.Fail{How: engine.FailReturn, RoomWait: call.RoomWait{Gone: ctx.Done()}}
	_ = h.queue.failed(ctx, receiptOf(lease), op, nil) // or it comes back when its lease has expired
}

func (h *claimHost) Served(c *dispatch.Claim) {
	op := c.Caller.(*claimOp)
	for _, s := range op.shards {
		s.claims.CountStale(op.Tickets())
	}
	op.completion.settle(nil)
}
