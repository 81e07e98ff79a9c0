package codeq

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/peer"
)

// A verb may be called on any node: the operation that it makes is resolved by
// the shard's owner if this node leads the shard, and is otherwise sent to the
// node that does, whose owner resolves it in its place. A shard that is between
// two leaders is waited for. What has certainly not been applied is tried
// again; what may have been is tried again only if it makes no difference.

// do has a shard resolve an operation, wherever it is led.
func (n *node) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	r := n.queue.replicas[shard]
	patience := n.newPatience()
	var doubt error // of an earlier try, which may have been applied
	for {
		change := r.route.next()
		if s := r.lead.Load(); s != nil {
			if settled, err = s.do(ctx, op, op.base()); !settled {
				return false, err
			}
		} else {
			err = n.ask(ctx, r, op)
		}
		if errors.Is(err, ErrUncertain) && op.verb().is(readsOnly) && n.ctx.Err() != nil {
			return true, ErrClosed
		} else if errors.Is(err, ErrUncertain) {
			doubt = err
		} else if doubt != nil && (!wasResolved(err) || ctx.Err() != nil && errors.Is(err, ctx.Err())) {
			err = doubt // this try was not applied, which says nothing of the one before
		} else if doubt != nil && errors.Is(err, ErrLeaseLost) && op.verb().is(endsLease) {
			err = doubt // by the one before, perhaps
		}
		again := errors.Is(err, ErrNotLeader) || errors.Is(err, ErrUncertain) && op.verb().repeatable(op)
		if !again || ctx.Err() != nil || !patience.wait(ctx, change) {
			return true, err
		}
		op.again()
	}
}

// wasResolved reports whether err, if it is not uncertain, is what an owner has decided.
func wasResolved(err error) bool {
	return !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrFailed)
}

// ask sends an operation to the node that leads a shard.
func (n *node) ask(ctx context.Context, r *replica, op request) error {
	addr, leader := r.raft.LeaderWithID()
	switch {
	case ctx.Err() != nil:
		return base.EndOf(ctx)
	case n.ctx.Err() != nil:
		return ErrClosed
	case addr == "":
		if err := r.failure(); err != nil {
			return err
		}
		return fmt.Errorf("%w: shard %d has no leader", ErrNotLeader, r.index)
	case string(leader) == n.self.Node:
		return fmt.Errorf("%w: shard %d is not ready", ErrNotLeader, r.index)
	}
	kind, body := op.encode(binary.BigEndian.AppendUint16(make([]byte, 0, 256), uint16(r.index)))
	reply, err := n.peer.CallUntil(ctx, r.tenure.of(leader), string(addr), byte(kind), body)
	if err != nil {
		return callError(ctx, err)
	}
	if err := parse(reply, op.decodeReply); err != nil {
		return fmt.Errorf("%w: reply of node %s: %w", ErrUncertain, leader, err)
	}
	return op.base().err
}

// patience is how something is tried again: after ever longer pauses. The zero
// patience has no end.
type patience struct {
	until time.Time     // zero: no end
	pause time.Duration // the last one
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 100 * time.Millisecond
)

// poll asks again and again until the answer is yes, or an error.
func poll(ctx context.Context, ask func() (yes bool, err error)) error {
	for again := (patience{}); ; {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		if !again.wait(ctx, nil) {
			return base.EndOf(ctx)
		}
	}
}

// newPatience is that of a call that waits for a leader.
func (n *node) newPatience() patience {
	return patience{until: time.Now().Add(n.opts.CallTimeout)}
}

// wait returns when it is worth trying again: after a pause, or at once when
// change is closed. It is false when it is not any more.
func (p *patience) wait(ctx context.Context, change <-chan struct{}) bool {
	p.pause = min(max(2*p.pause, minPause), maxPause)
	pause := p.pause
	if !p.until.IsZero() {
		left := time.Until(p.until)
		if left <= 0 {
			return false
		}
		pause = min(pause, left)
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-change:
	case <-t.C:
	case <-ctx.Done():
		return false
	}
	return true
}

// pace returns when an owner may hear of the outcome of a call, upon which it calls
// again if that is an error. Some errors come at once, such as that of a replica that
// has failed: they wait for a while, or until change is closed. It is false when
// ctx has ended: then nobody is to call again.
func pace(ctx context.Context, change <-chan struct{}, err error) bool {
	if err != nil {
		(&patience{pause: maxPause}).wait(ctx, change)
	}
	return ctx.Err() == nil
}

var errMalformedCall = errors.New("codeq: malformed call of another node")

// serve has an operation of another node resolved here.
func (n *node) serve(r *peer.Request) {
	if err := n.accept(r); err != nil {
		r.Fail(encodeError(err))
	}
}

func (n *node) accept(r *peer.Request) error {
	if !n.ready.Load() {
		return fmt.Errorf("%w: the node is being opened", ErrNotLeader)
	}
	switch callKind(r.Kind) {
	case callJoin:
		return n.serveJoin(r)
	case callState:
		return n.serveState(r)
	}
	if len(r.Body) < 2 {
		return errMalformedCall
	}
	index, body := int(binary.BigEndian.Uint16(r.Body)), r.Body[2:]
	if index >= len(n.queue.replicas) {
		return errMalformedCall
	}
	op, err := n.requestOf(r.Kind, r.From, index, body)
	if err != nil {
		return err
	}
	s := n.queue.replicas[index].lead.Load()
	if s == nil {
		return notLed(index, ErrNotLeader)
	}
	if waits, ok := op.(abandoned); ok {
		r.OnCancel(func() { waits.abandon(s) })
	}
	op.base().reply = func(err error) {
		if err != nil {
			r.Fail(encodeError(err))
			return
		}
		r.Reply(op.encodeReply(nil))
	}
	return s.inbox.pass(op)
}

// requestOf is the operation of a call of another node for a shard.
func (n *node) requestOf(kind byte, from string, shard int, body []byte) (request, error) {
	if kind >= byte(endOfRequests) || verbs[kind].new == nil {
		return nil, errMalformedCall
	}
	op := verbs[kind].new(from)
	if err := parse(body, op.decode); err != nil {
		return nil, errMalformedCall
	}
	if slices.ContainsFunc(verbs[kind].tasks(op), func(t engine.NewTask) bool { return t.IsScattered(shard, len(n.queue.replicas)) }) {
		return nil, errMalformedCall
	}
	return op, nil
}
