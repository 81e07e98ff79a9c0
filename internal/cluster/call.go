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

// CallHeader is how many bytes at the beginning of a call's body are the group's: they hold the
// number of the shard.
const CallHeader = 2

// OwnKinds is from where on kinds of calls are those of this package. They are of a node, and not
// of a shard.
const OwnKinds = 56

const (
	kindJoin byte = OwnKinds + iota
	kindState
	kindWho   // of an introduction
	kindAdopt // of an introduction
	kindHeartbeat
	kindAnyNode // of the host of a node to that of another one
	kindElders  // of an introduction
	kindAddress // at which a node is
)

// ErrMalformedCall is the answer to a call of another node that cannot be read.
var ErrMalformedCall = errors.New("codeq: malformed call of another node")

// Call sends a call to the node that leads the shard. The first CallHeader bytes of body are the
// group's. An urgent call is short, and waits for no other ones. An error that does not match
// ErrUncertain says that nobody has served the call, or is the answer.
func (g *Group) Call(ctx context.Context, kind byte, body []byte, urgent bool) (reply []byte, err error) {
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
		return nil, fmt.Errorf("%w: shard %d is not ready", base.ErrNotLeader, g.index)
	}
	binary.BigEndian.PutUint16(body, uint16(g.index))
	if reply, err = n.peer.CallUntil(ctx, g.tenure.of(id), leader.to, kind, body, urgent); err != nil {
		return nil, n.callError(ctx, err)
	}
	return reply, nil
}

// callError is the outcome of a call that has brought no reply.
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

// Patience is how something is tried again: after ever longer pauses. The zero
// Patience has no end.
type Patience struct {
	until time.Time     // zero: no end
	pause time.Duration // the last one
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 100 * time.Millisecond
)

// NewPatience is that of a call that waits for a leader.
func (n *Node) NewPatience() Patience { return Patience{until: time.Now().Add(n.c.CallTimeout)} }

// Wait returns when it is worth trying again: after a pause, or at once when
// change is closed. It is false when it is not any more.
func (p *Patience) Wait(ctx context.Context, change <-chan struct{}) bool {
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

// Pause returns after the longest pause of a Patience, or when change is closed, or ctx ends.
func Pause(ctx context.Context, change <-chan struct{}) {
	(&Patience{pause: maxPause}).Wait(ctx, change)
}

// poll asks again and again until the answer is yes, or an error, or the node is about to be
// closed.
func (n *Node) poll(ctx context.Context, ask func() (yes bool, err error)) error {
	for again := (Patience{}); ; {
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
