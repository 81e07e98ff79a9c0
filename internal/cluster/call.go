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

// Call sends a call to the node that leads the shard, and waits for its reply until ctx ends, or
// limit is over. The first CallHeader bytes of body are the group's. An urgent call is short, and
// waits for no other ones. An error that does not match ErrUncertain says that nobody has served
// the call, or is the answer.
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
	if reply, err = n.peer.CallUntil(ctx, g.tenure.of(id), limit, leader.to, kind, body, urgent); err != nil {
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
	until  time.Time     // zero: no end
	pause  time.Duration // the last one
	strict bool          // nothing is tried at the end, when there is no time left for an answer
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 100 * time.Millisecond
)

// NewPatience is that of a call that waits for a leader.
func (n *Node) NewPatience() Patience { return Patience{until: time.Now().Add(n.c.CallTimeout)} }

// PatienceOf is that of a call with a limit. One without that reads waits in a shard on purpose,
// and so for leaders, too, as long as its ctx.
func (n *Node) PatienceOf(limit *base.Limit, reads bool) Patience {
	switch {
	case limit != nil:
		return Patience{until: limit.End(), strict: true}
	case reads:
		return Patience{}
	}
	return n.NewPatience()
}

// Wait returns when it is worth trying again: after a pause, or at once when
// change is closed. It is false when it is not any more.
func (p *Patience) Wait(ctx context.Context, change <-chan struct{}) bool {
	p.pause = min(max(2*p.pause, minPause), maxPause)
	pause, last := p.pause, false
	if !p.until.IsZero() {
		left := time.Until(p.until)
		if left <= 0 {
			return false
		}
		last = p.strict && left <= pause
		pause = min(pause, left)
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-change:
	case <-t.C:
		return !last
	case <-ctx.Done():
		return false
	}
	return true
}

// Pause returns after the longest pause of a Patience, or when change is closed, or ctx ends.
func Pause(ctx context.Context, change <-chan struct{}) {
	(&Patience{pause: maxPause}).Wait(ctx, change)
}

// Insist calls again, until ctx ends, what can be repeated and finds no leader.
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
		Pause(ctx, change)
	}
}

// WasResolved reports whether err, if it is not uncertain, is the decision of an owner. It decides
// nothing if it refuses for want of room.
func WasResolved(err error) bool {
	return !errors.Is(err, base.ErrNotLeader) && !errors.Is(err, base.ErrClosed) && !errors.Is(err, base.ErrFailed) &&
		!errors.Is(err, base.ErrNotMember) && !errors.Is(err, base.ErrDiskFull)
}

// Pace returns when an owner may be told the outcome of a call. If that is an error, it calls
// again. Some errors come at once, such as that of a replica that has failed: they wait for a
// while, or until change is closed. It is false when ctx has ended: then nobody is to call again.
func Pace(ctx context.Context, change <-chan struct{}, err error) bool {
	if err != nil {
		Pause(ctx, change)
	}
	return ctx.Err() == nil
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
