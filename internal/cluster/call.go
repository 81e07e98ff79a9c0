package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// CallHeader is the number of bytes at the beginning of a call's body that belong to the group:
// they hold the number of the shard.
const CallHeader = 2

// OwnKinds is the first kind of calls of this package. They address a node, not a shard.
const OwnKinds = 56

const (
	kindJoin byte = OwnKinds + iota
	kindState
	kindWho   // asks for an introduction
	kindAdopt // of a node to a cluster
	kindHeartbeat
	kindAnyNode // from the host of a node to that of another
	kindElders  // search for an earlier process; see elderQuestion
	kindAddress // the address of the sender
)

// ErrMalformedCall is the answer to a call of another node that cannot be decoded.
var ErrMalformedCall = errors.New("codeq: malformed call of another node")

// Call sends a call to the node that leads the shard, and waits for its reply until ctx ends or
// limit is over. The first CallHeader bytes of body belong to the group. An urgent call is short,
// and does not wait behind other calls. An error that does not match ErrUncertain is the answer, or
// says that no node has served the call.
func (g *Group) Call(ctx context.Context, limit *base.Limit, kind byte, body []byte, urgent bool) (reply []byte, err error) {
	n := g.node
	addr, id := g.leaderNow()
	switch {
	case ctx.Err() != nil:
		return nil, base.EndOf(ctx)
	case n.ctx.Err() != nil:
		return nil, base.ErrClosed
	case addr == "":
		if err := g.Failure(); err != nil {
			return nil, err
		}
		return nil, g.noLeader()
	}
	leader, err := g.calleeOf(id, addr)
	switch {
	case err != nil:
		return nil, err
	case leader.here && g.stalledFor() > 0:
		return nil, fmt.Errorf("%w: shard %d: %w", base.ErrNotLeader, g.index, g.stallError())
	case leader.here:
		return nil, g.NotLed()
	}
	binary.BigEndian.PutUint16(body, uint16(g.index))
	if reply, err = n.peer.CallUntil(ctx, g.termOwner.of(id), limit, leader.to, kind, body, urgent); err != nil {
		return nil, n.callError(ctx, err)
	}
	return reply, nil
}

// callError is the outcome of a call that got no reply.
func (n *Node) callError(ctx context.Context, err error) error {
	var remote *peer.RemoteError
	switch {
	case errors.As(err, &remote):
		return n.c.DecodeError(remote.Code, remote.Text)
	case errors.Is(err, peer.ErrNotSent):
		return fmt.Errorf("%w: %w", base.ErrNotLeader, err)
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", base.ErrUncertain, base.EndOf(ctx))
	}
	return fmt.Errorf("%w: %w", base.ErrUncertain, err)
}

// serve answers a call of another node.
func (n *Node) serve(r *peer.Request) {
	if err := n.accept(r); err != nil {
		r.Fail(n.c.EncodeError(err))
	}
}

// answer answers a call on a goroutine that Close waits for.
func (n *Node) answer(r *peer.Request, what string, serve func() (reply []byte, err error)) {
	n.background.Go(func() {
		err := n.guarded(what, func() error {
			reply, err := serve()
			if err == nil {
				r.Reply(reply)
			}
			return err
		})
		if err != nil {
			r.Fail(n.c.EncodeError(err))
		}
	})
}

func (n *Node) accept(r *peer.Request) error {
	if !n.ready.Load() {
		return fmt.Errorf("%w: the node is being opened", base.ErrNotLeader)
	}
	if r.Introduction {
		return n.serveIntroduction(r)
	}
	switch r.Kind {
	case kindJoin:
		return n.serveJoin(r)
	case kindState:
		return n.serveState(r)
	case kindHeartbeat:
		return n.serveHeartbeat(r)
	case kindAnyNode:
		return n.serveAnyNode(r)
	case kindAddress:
		return n.serveAddress(r)
	}
	if r.Kind >= OwnKinds || len(r.Body) < CallHeader {
		return ErrMalformedCall
	}
	shard := int(binary.BigEndian.Uint16(r.Body))
	if shard >= len(n.groups) {
		return ErrMalformedCall
	}
	r.Body = r.Body[CallHeader:]
	return n.c.Serve(shard, r)
}

// NewPatience is the Patience of a call that waits for a leader.
func (n *Node) NewPatience() base.Patience {
	return base.NewPatience(time.Now().Add(n.c.CallTimeout), false)
}

// PatienceOf is the Patience of a call with a limit. A read without a limit waits in a shard on
// purpose, and so also waits for leaders as long as its ctx.
func (n *Node) PatienceOf(limit *base.Limit, reads bool) base.Patience {
	switch {
	case limit != nil:
		return base.NewPatience(limit.End(), true)
	case reads:
		return base.Patience{}
	}
	return n.NewPatience()
}

// sleep returns after a time, or when ctx ends: then it is false.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Insist repeats a call until it finds a leader or ctx ends. REQUIRES: the call can be repeated.
func (n *Node) Insist(ctx context.Context, call func() error) error {
	for {
		change := n.Changed()
		err := call()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return base.EndOf(ctx)
		case IsRemoval(err), !errors.Is(err, base.ErrNotLeader) && !errors.Is(err, base.ErrUncertain):
			return err
		}
		base.Pause(ctx, change)
	}
}

// AwaitLeader repeats a question to the leader of the shard until it is answered. If ctx ends
// before, the error says why the leader cannot be asked.
func (g *Group) AwaitLeader(ctx context.Context, ask func() error) error {
	for why := error(nil); ; { // there was none, the last time
		err := ask()
		if ctx.Err() != nil && err != nil && why != nil && !errors.Is(err, base.ErrNotLeader) {
			return fmt.Errorf("%w: %w", err, why)
		}
		if ctx.Err() != nil || g.removed.Load() || IsRemoval(err) || !errors.Is(err, base.ErrNotLeader) && !errors.Is(err, base.ErrUncertain) {
			return err
		}
		why = err
	}
}

// wasResolved reports whether err, if it is not uncertain, is the decision of an owner. A refusal
// for lack of room is no decision.
func wasResolved(err error) bool {
	return !errors.Is(err, base.ErrNotLeader) && !errors.Is(err, base.ErrClosed) && !errors.Is(err, base.ErrFailed) &&
		!errors.Is(err, base.ErrNotMember) && !errors.Is(err, base.ErrDiskFull)
}

// Pace returns when the outcome of a call may be passed to an owner, which calls again after an
// error. Some errors come at once, such as that of a replica that has failed: they wait for a
// while, or until change is closed. It is false when ctx has ended: then the owner must not call
// again.
func Pace(ctx context.Context, change <-chan struct{}, err error) bool {
	if err != nil {
		base.Pause(ctx, change)
	}
	return ctx.Err() == nil
}

// poll repeats a question until the answer is yes, or an error, or the node is about to be closed.
func (n *Node) poll(ctx context.Context, ask func() (yes bool, err error)) error {
	for again := (base.Patience{}); ; {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		if n.membership.ctx.Err() != nil {
			return base.ErrClosed
		}
		if !again.Wait(ctx, n.membership.ctx.Done()) {
			return base.EndOf(ctx)
		}
	}
}
