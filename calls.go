package codeq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/wire"
)

// How operations and their outcomes travel between nodes. Each operation encodes and decodes its
// own arguments beside its definition; this file has the common parts.

// request is an operation with a caller that waits for its outcome, perhaps on another node.
type request interface {
	operation
	base() *completion
	// encode appends the arguments, for decode.
	encode(dst []byte) []byte
	decode(r *wire.Reader)
	// encodeReply appends the decision of resolve, if it was not an error, for decodeReply.
	encodeReply(dst []byte) []byte
	decodeReply(r *wire.Reader)
	// again prepares the operation for another try.
	again()
}

// The defaults: an operation without results.

func (c *completion) encodeReply(dst []byte) []byte { return dst }
func (c *completion) decodeReply(*wire.Reader)      {}
func (c *completion) again()                        { c.err = nil }

// abandoned is a request that may wait for long: its caller may give up.
type abandoned interface{ abandon(*shard) }

// parse takes all of a message apart by read.
func parse(message []byte, read func(*wire.Reader)) error {
	r := wire.NewReader(message)
	read(r)
	return r.Done()
}

func appendReceipt(dst []byte, r Receipt) []byte { return call.AppendReceipt(dst, r.inner()) }
func readReceipt(r *wire.Reader) Receipt         { return receiptOf(call.ReadReceipt(r)) }

// A verb may be called on any node: the operation that it makes is resolved by the shard's owner if
// this node leads the shard, and is otherwise sent to the node that does, and resolved by the owner
// there. A shard that is between two leaders is waited for. An operation that was certainly not
// applied is tried again; one that may have been applied is tried again only if it is repeatable.

// do makes a shard resolve an operation, on whichever node leads it.
func (n *node) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	r := n.queue.replicas[shard]
	var limit *base.Limit // of a call that waits for nothing but the shard
	if w, ok := op.(roomWaiter); !op.verb().is(waitsRoom|waits) && !(ok && w.WaitsForRoom()) {
		limit = r.group.Limit(ctx)
		defer limit.Free()
	}
	patience := n.PatienceOf(limit, op.verb().is(readsOnly))
	var doubt, last error // of an earlier try, which may have been applied; of the try before
	for {
		change := r.group.Changed()
		if s := r.lead.Load(); s != nil {
			if settled, err = s.do(ctx, op, op.base(), limit); !settled {
				return false, r.group.Late(err, op.verb().is(readsOnly))
			}
		} else {
			err = n.ask(ctx, r, op, limit)
		}
		removed := cluster.IsRemoval(err)
		if errors.Is(err, ErrUncertain) && op.verb().is(readsOnly) && n.ctx.Err() != nil {
			return true, ErrClosed
		} else if errors.Is(err, ErrUncertain) {
			doubt = err
		} else if doubt != nil && (!cluster.WasResolved(err) || ctx.Err() != nil && errors.Is(err, ctx.Err())) {
			err = doubt // this try was not applied, which says nothing of the one before
		} else if doubt != nil && errors.Is(err, ErrLeaseLost) && op.verb().is(endsLease) {
			err = doubt // by the one before, perhaps
		}
		again := errors.Is(err, ErrNotLeader) || errors.Is(err, ErrUncertain) && op.verb().repeatable(op)
		if again && !removed && ctx.Err() == nil && n.ctx.Err() == nil && patience.Wait(ctx, change) {
			last = err
			op.again()
			continue
		}
		err = r.group.Late(err, op.verb().is(readsOnly))
		switch ended := ctx.Err(); {
		case last != nil && errors.Is(err, base.ErrLate) && errors.Is(err, ErrNotLeader):
			err = last
		case ended == nil:
		case again && !errors.Is(err, ended):
			err = fmt.Errorf("%w: %w", err, base.EndOf(ctx))
		case last != nil && errors.Is(err, ended) && !errors.Is(err, ErrUncertain):
			err = fmt.Errorf("%w: %w", last, err)
		}
		return true, err
	}
}

// ask sends an operation to the node that leads a shard.
func (n *node) ask(ctx context.Context, r *replica, op request, limit *base.Limit) error {
	body := op.encode(make([]byte, cluster.CallHeader, 256))
	reply, err := r.group.Call(ctx, limit, byte(op.base().kind), body, op.verb().is(urgent))
	if err != nil {
		return err
	}
	if err := parse(reply, op.decodeReply); err != nil {
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
	if err := parse(body, op.decode); err != nil {
		return nil, errMalformedCall
	}
	return op, nil
}

// Errors travel between nodes as a code and a text (call.EncodeError).

func encodeError(err error) (code byte, text string) {
	var duplicate *DuplicateError
	var invalid *InvalidError
	switch {
	case errors.As(err, &duplicate):
		return call.CodeDuplicate, string(wire.AppendJSON(nil, duplicate))
	case errors.As(err, &invalid):
		sent := *invalid
		sent.Value = fmt.Sprint(sent.Value)
		return call.CodeInvalid, string(wire.AppendJSON(nil, &sent))
	}
	return call.EncodeError(err)
}

// encodeOwnError is encodeError for a program that calls this process and no other.
func encodeOwnError(err error) (code byte, text string) {
	if !errors.Is(err, ErrInvalid) {
		if code, text = call.EncodeOwnError(err); code != 0 {
			return code, text
		}
	}
	return encodeError(err)
}

func decodeError(code byte, text string) error {
	switch code {
	case call.CodeDuplicate:
		return call.DecodeDetails(text, new(DuplicateError))
	case call.CodeInvalid:
		return call.DecodeDetails(text, new(InvalidError))
	}
	return call.DecodeError(code, text)
}

// produce is do for a produce, which gets a number (session), so that it has its effect once,
// however often it is tried. One that is refused with the node's life gets a number of another
// life: no try of it has been applied, or do would say that its outcome is unknown.
func (n *node) produce(ctx context.Context, shard int, op *produceOp) (settled bool, err error) {
	calls := n.queue.replicas[shard].producing
	begun := time.Now()
	for patience := (cluster.Patience{}); ; op.again() {
		if settled, err = n.doNumbered(ctx, shard, calls, op); err == nil || !settled {
			return settled, err
		}
		var over *engine.LifeOverError
		if !errors.As(err, &over) {
			return true, err
		}
		calls.Outlive(over.Latest)
		if patience == (cluster.Patience{}) {
			ctx = n.BeginAt(ctx, begun)
			patience = n.NewPatience()
		}
		if !patience.Wait(ctx, nil) {
			return true, err
		}
	}
}

func (n *node) doNumbered(ctx context.Context, shard int, calls *call.Session, op *produceOp) (bool, error) {
	op.call = calls.Begin()
	op.call.Node = n.Self().Node
	defer calls.End(op.call.Seq)
	return n.do(ctx, shard, op)
}
