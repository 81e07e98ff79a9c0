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

// tryAgain prepares an operation for another try.
func tryAgain(op request) {
	op.base().err = nil
	op.Again()
}

// abandoned is a request that may wait for long: its caller may give up.
type abandoned interface{ abandon(*shard) }

// parse takes all of a message apart by read.
func parse(message []byte, read func(*wire.Reader)) error {
	r := wire.NewReader(message)
	read(r)
	return r.Done()
}

// A verb may be called on any node: the operation that it makes is resolved by the shard's owner if
// this node leads the shard, and is otherwise sent to the node that does, and resolved by the owner
// there. A shard that is between two leaders is waited for. An operation that was certainly not
// applied is tried again; one that may have been applied is tried again only if it is repeatable.

// forwarding is an operation on its way to the leader of its shard, in one try or more.
type forwarding struct {
	node    *node
	replica *replica // of the shard
	op      request
	limit   *base.Limit // nil: the operation waits on purpose
	doubt   error       // of an earlier try, which may have been applied; nil: none may
	last    error       // of the try before; nil: this is the first
}

// do makes a shard resolve an operation, on whichever node leads it.
func (n *node) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	f := forwarding{node: n, replica: n.queue.replicas[shard], op: op}
	if w, ok := op.(roomWaiter); !op.verb().is(waitsRoom|waits) && !(ok && w.WaitsForRoom()) {
		f.limit = f.replica.group.Limit(ctx)
		defer f.limit.Free()
	}
	patience := n.PatienceOf(f.limit, f.reads())
	for {
		change := f.replica.group.Changed()
		settled, err := f.try(ctx)
		switch {
		case !settled:
			return false, f.replica.group.Late(err, f.reads())
		case err == nil:
			return true, nil
		}
		removed := cluster.IsRemoval(err)
		err = f.weigh(ctx, err)
		if !f.repeats(err) || removed || ctx.Err() != nil || n.ctx.Err() != nil || !patience.Wait(ctx, change) {
			return true, f.explain(ctx, err)
		}
		f.last = err
		tryAgain(op)
	}
}

func (f *forwarding) reads() bool { return f.op.verb().is(readsOnly) }

// try gives the operation to the leader, here or elsewhere.
func (f *forwarding) try(ctx context.Context) (settled bool, err error) {
	if s := f.replica.lead.Load(); s != nil {
		return s.do(ctx, f.op, f.op.base(), f.limit)
	}
	return true, f.node.forward(ctx, f.replica, f.op, f.limit)
}

// weigh returns the meaning of the error of a try, together with the tries before.
func (f *forwarding) weigh(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, ErrUncertain) && f.reads() && f.node.ctx.Err() != nil:
		return ErrClosed
	case errors.Is(err, ErrUncertain):
		f.doubt = err
	case f.doubt == nil:
	case !cluster.WasResolved(err) || ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return f.doubt // this try was not applied, which says nothing of the one before
	case errors.Is(err, ErrLeaseLost) && f.op.verb().is(endsLease):
		return f.doubt // by the one before, perhaps
	}
	return err
}

// repeats reports whether the operation may be tried again after an error.
func (f *forwarding) repeats(err error) bool {
	return errors.Is(err, ErrNotLeader) || errors.Is(err, ErrUncertain) && f.op.verb().repeatable(f.op)
}

// explain returns the error for the caller, after the last try.
func (f *forwarding) explain(ctx context.Context, err error) error {
	repeats, ended := f.repeats(err), ctx.Err()
	err = f.replica.group.Late(err, f.reads())
	switch {
	case f.last != nil && errors.Is(err, base.ErrLate) && errors.Is(err, ErrNotLeader):
		return f.last
	case ended == nil:
	case repeats && !errors.Is(err, ended):
		return fmt.Errorf("%w: %w", err, base.EndOf(ctx))
	case f.last != nil && errors.Is(err, ended) && !errors.Is(err, ErrUncertain):
		return fmt.Errorf("%w: %w", f.last, err)
	}
	return err
}

// forward sends an operation to the node that leads a shard.
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

// produce is do for a produce, which gets a number (session), so that its tries have one effect.
// If the node's incarnation is refused, no try was applied, and another one gives a new number.
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
	return n.do(ctx, shard, op)
}
