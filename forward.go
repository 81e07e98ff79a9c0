package codeq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// How operations and their outcomes travel between nodes. Most operations embed the call that nodes
// send, which is in internal/call.

// request is an operation with a caller that waits for its outcome, perhaps on another node.
type request interface {
	operation
	base() *completion
	call.Wire
}

func tryAgain(op request) {
	op.base().err = nil
	op.Again()
}

// abandoned is a request that may wait for long: its caller may give up.
type abandoned interface{ abandon(*shard) }

func parse(message []byte, read func(*wire.Reader)) error {
	r := wire.NewReader(message)
	read(r)
	return r.Done()
}

// A verb may be called on any node: the operation that it makes is resolved by the shard's owner if
// this node leads the shard, and is otherwise sent to the node that does, and resolved by the owner
// there. A shard that is between two leaders is waited for (cluster.Tries).

func (n *node) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	r, verb := n.queue.replicas[shard], op.verb()
	var limit *base.Limit // nil: the operation waits on purpose
	if w, ok := op.(roomWaiter); !verb.is(waitsRoom|waits) && !(ok && w.WaitsForRoom()) {
		limit = r.group.Limit(ctx)
		defer limit.Free()
	}
	reads := verb.is(readsOnly)
	tries := cluster.Tries{Group: r.group, Reads: reads, EndsLease: verb.is(endsLease), Patience: n.PatienceOf(limit, reads)}
	for {
		change := r.group.Changed()
		if s := r.lead.Load(); s != nil {
			settled, err = s.do(ctx, op, op.base(), limit)
		} else {
			settled, err = true, n.forward(ctx, r, op, limit)
		}
		switch {
		case !settled:
			return false, r.group.Late(err, reads)
		case err == nil:
			if b, ok := op.(*leaseOps); ok {
				b.weigh(&tries)
			}
			return true, nil
		}
		again, err := tries.Failed(ctx, err, verb.repeatable(op), change)
		if !again {
			return true, err
		}
		tryAgain(op)
	}
}

func (n *node) forward(ctx context.Context, r *replica, op request, limit *base.Limit) error {
	body := op.Append(make([]byte, cluster.CallHeader, 256))
	reply, err := r.group.Call(ctx, limit, byte(op.base().kind), body, op.verb().is(urgent))
	if err != nil {
		return err
	}
	if err := parse(reply, op.ReadReply); err != nil {
		return fmt.Errorf("%w: reply for shard %d: %w", ErrUncertain, r.index, err)
	}
	return op.base().err
}

var errMalformedCall = cluster.ErrMalformedCall

// requestOf is the operation of a call for a shard, of another node or program.
func (q *Queue) requestOf(kind byte, from string, body []byte) (request, error) {
	if kind >= byte(endOfRequests) || verbs[kind].new == nil {
		return nil, errMalformedCall
	}
	op := verbs[kind].new(from)
	if err := parse(body, op.Read); err != nil {
		return nil, errMalformedCall
	}
	return op, nil
}

// produce is do for a produce, which gets a number (session), so that its tries have one effect. If
// the node's incarnation is refused, no try was applied, and another one gives a new number.
func (n *node) produce(ctx context.Context, shard int, op *produceOp) (settled bool, err error) {
	calls := n.queue.replicas[shard].producing
	begun := time.Now()
	for patience := (base.Patience{}); ; tryAgain(op) {
		if settled, err = n.doNumbered(ctx, shard, calls, op); err == nil || !settled {
			return settled, err
		}
		var over *keys.IncarnationOverError
		if !errors.As(err, &over) {
			return true, err
		}
		calls.Outlive(over.Latest)
		if patience == (base.Patience{}) {
			ctx = n.BeginAt(ctx, begun)
			patience = n.NewPatience()
		}
		if !patience.Wait(ctx, nil) {
			return true, err
		}
	}
}

func (n *node) doNumbered(ctx context.Context, shard int, calls *call.Session, op *produceOp) (bool, error) {
	op.Call = calls.Begin()
	op.Call.Node = n.Self().Node
	defer calls.End(op.Call.Seq)
	if op.hears != nil {
		n.queue.replicas[shard].awaits.Expect(op.Call.Incarnation, op.Call.Seq, op.hears)
	}
	return n.do(ctx, shard, op)
}
