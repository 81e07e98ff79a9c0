package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// Where a shard is led, as this node knows, how calls get there, and how those who wait hear that it may
// be led elsewhere.

// Changed returns a channel that is closed when any shard may be led by another node, or be ready to be asked.
func (n *Node) Changed() <-chan struct{} { return n.routes.next() }

// Changed returns a channel that is closed when the shard may be led by another node, or be ready to be asked.
func (g *Group) Changed() <-chan struct{} { return g.route.next() }

func (g *Group) changed() {
	g.route.changed()
	g.node.routes.changed()
}

// changes tells those who wait that something has changed. The zero changes is
// ready for use.
type changes struct {
	mu     sync.Mutex // guards change
	change chan struct{}
}

// next returns a channel that is closed at the next change.
func (c *changes) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change == nil {
		c.change = make(chan struct{})
	}
	return c.change
}

func (c *changes) changed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change != nil {
		close(c.change)
		c.change = nil
	}
}

// Applied is the index of the last entry in the store.
func (g *Group) Applied() uint64 { return g.applied.Load() }

// AwaitApplied waits until the store has what the log has at an index. It fails if the group has, or ctx ends.
func (g *Group) AwaitApplied(ctx context.Context, index uint64) error {
	for {
		progress, route := g.progress.next(), g.route.next() // which the failure of a group changes
		if g.Applied() >= index {
			return nil
		}
		if err := g.Failure(); err != nil {
			return err
		}
		select {
		case <-progress:
		case <-route:
		case <-ctx.Done():
			return base.EndOf(ctx)
		}
	}
}

// follow notes which node leads, until the node is closed.
func (g *Group) follow(elections <-chan raft.Observation) {
	for {
		select {
		case <-elections:
			if addr, leader := g.raft.LeaderWithID(); addr != "" {
				g.tenure.begin(leader, g.node.c.ElectionTimeout)
			}
			g.changed()
		case <-g.node.quit:
			return
		}
	}
}

// HasLeader reports whether a node is known to lead the shard.
func (g *Group) HasLeader() bool {
	addr, _ := g.raft.LeaderWithID()
	return addr != ""
}

// tenure is how long calls wait for a leader of the shard on another node.
type tenure struct {
	mu     sync.Mutex // guards what follows
	leader raft.ServerID
	over   chan struct{}
}

// begin notes who leads now.
func (t *tenure) begin(leader raft.ServerID, grace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader == leader {
		return
	}
	if over := t.over; over != nil {
		time.AfterFunc(grace, func() { close(over) })
	}
	t.leader, t.over = leader, make(chan struct{})
}

// of returns a channel that is closed some time after another node than the
// given one is known to lead: what has not been answered by then will not be.
func (t *tenure) of(leader raft.ServerID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader != leader { // not noted yet, or over already
		return nil
	}
	return t.over
}

// CallHeader is how many bytes at the beginning of a call's body are the group's: they hold the number of the shard.
const CallHeader = 2

// OwnKinds is from where on kinds of calls are those of this package. They are of a node, and not of a shard.
const OwnKinds = 56

const (
	kindJoin byte = OwnKinds + iota
	kindState
)

// ErrMalformedCall is the answer to a call of another node that cannot be read.
var ErrMalformedCall = errors.New("codeq: malformed call of another node")

// Call sends a call to the node that leads the shard. The first CallHeader bytes of body are the group's. An
// error that does not match ErrUncertain says that nobody has served the call, or is the answer.
func (g *Group) Call(ctx context.Context, kind byte, body []byte) (reply []byte, err error) {
	n := g.node
	addr, leader := g.raft.LeaderWithID()
	switch {
	case ctx.Err() != nil:
		return nil, base.EndOf(ctx)
	case n.ctx.Err() != nil:
		return nil, base.ErrClosed
	case addr == "":
		if err := g.Failure(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%w: shard %d has no leader", base.ErrNotLeader, g.index)
	case string(leader) == n.self.Node:
		return nil, fmt.Errorf("%w: shard %d is not ready", base.ErrNotLeader, g.index)
	}
	binary.BigEndian.PutUint16(body, uint16(g.index))
	if reply, err = n.peer.CallUntil(ctx, g.tenure.of(leader), string(addr), kind, body); err != nil {
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
	switch r.Kind {
	case kindJoin:
		return n.serveJoin(r)
	case kindState:
		return n.serveState(r)
	}
	if len(r.Body) < CallHeader {
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

// poll asks again and again until the answer is yes, or an error.
func poll(ctx context.Context, ask func() (yes bool, err error)) error {
	for again := (Patience{}); ; {
		if yes, err := ask(); yes || err != nil {
			return err
		}
		if !again.Wait(ctx, nil) {
			return base.EndOf(ctx)
		}
	}
}
