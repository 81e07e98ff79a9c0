package peer

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"codeq/internal/base"
)

// lane is one of the connections of calls to a target.
type lane struct {
	to Target
	of traffic
}

// traffic is the use of a lane. Frames of one lane follow each other, so that a small one waits for
// those before it.
type traffic byte

const (
	trafficCalls  traffic = iota
	trafficUrgent         // heartbeats and renewals: none is large, and they wait for nothing else
	trafficLarge          // requests of largeBody and more
)

// largeBody is the least size, in bytes, of requests in a lane of their own: other ones pass them.
const largeBody = 256 << 10

// link is the state of a lane that was used. Guarded by Node.mu.
type link struct {
	client  *client  // nil if there is no connection
	attempt *attempt // running, or nil
	failure error    // of the last attempt, or nil
	backoff time.Duration
	retry   time.Time // no attempt before then
}

// attempt is a running dial. client and err are set before done is closed.
type attempt struct {
	done   chan struct{}
	client *client
	err    error
}

// Call sends a request to a node of the cluster and returns the body of its Handler's Reply. Errors
// are an ErrNotSent, an ErrLost or a *RemoteError. If ctx ends, the error wraps its cause, and the
// other side calls the function of Request.OnCancel. Call does not keep body, which has at most
// MaxBody bytes.
//
// The first call opens the connection to the node; requests of largeBody and more have another one.
// After a failed attempt, calls fail for a short time, 50 ms at first and up to 250 ms. Calls wait
// while much is queued for the connection.
func (n *Node) Call(ctx context.Context, to Target, kind byte, body []byte) ([]byte, error) {
	return n.CallUntil(ctx, nil, nil, to, kind, body, false)
}

// CallUntil is Call that also gives up when until is closed, or limit is over. An urgent call is
// short, and so is its reply: it has a connection with such calls only, and does not wait behind
// other messages to the node.
func (n *Node) CallUntil(
	ctx context.Context, until <-chan struct{}, limit *base.Limit, to Target, kind byte, body []byte, urgent bool,
) ([]byte, error) {
	if len(body) > MaxBody {
		return nil, fmt.Errorf("%w: body of %d bytes, more than %d", ErrNotSent, len(body), MaxBody)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotSent, base.EndOf(ctx))
	}
	on := lane{to, trafficCalls}
	switch {
	case urgent:
		on.of = trafficUrgent
	case len(body) >= largeBody:
		on.of = trafficLarge
	}
	p := patience{ctx, until, limit}
	c, err := n.client(p, on)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	return c.call(p, kind, body)
}

// client returns the connection of a lane, once it is open.
func (n *Node) client(p patience, on lane) (*client, error) {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil, ErrClosed
	}
	l := n.links[on]
	if l == nil {
		l = &link{}
		n.links[on] = l
	}
	if c := l.client; c != nil {
		n.mu.Unlock()
		return c, nil
	}
	a := l.attempt
	if a == nil {
		if l.failure != nil && time.Now().Before(l.retry) {
			defer n.mu.Unlock()
			return nil, l.failure
		}
		a = &attempt{done: make(chan struct{})}
		l.attempt = a
		n.running.Go(func() {
			var raw *conn
			var err error
			n.guarded("dial", func() { raw, err = n.connect(n.ctx, on.to, header{use: useCalls}) }, func(e error) { err = e })
			n.tried(on, l, a, raw, err)
		})
	}
	n.mu.Unlock()
	if reason := p.await(a.done, standsStill); reason != nil {
		return nil, fmt.Errorf("peer: wait for connection to %s: %w", on.to.Address, reason)
	}
	return a.client, a.err
}

// tried ends an attempt.
func (n *Node) tried(on lane, l *link, a *attempt, raw *conn, err error) {
	n.mu.Lock()
	if err == nil && n.closed {
		err = ErrClosed // Close closes raw
	}
	if err == nil {
		a.client = newClient(n, on, raw)
		raw.stream = &a.client.stream
		l.client = a.client
		l.failure, l.backoff = nil, 0
		n.running.Go(func() { n.guarded("client reader", a.client.read, a.client.fail) })
		n.running.Go(func() { n.guarded("client writer", a.client.write, a.client.fail) })
	} else {
		a.err = err
		l.failure = err
		l.backoff = min(max(2*l.backoff, firstBackoff), lastBackoff)
		l.retry = time.Now().Add(l.backoff)
	}
	l.attempt = nil
	close(a.done)
	n.mu.Unlock()
	if err != nil && n.ctx.Err() == nil {
		n.lines.Log(slog.LevelWarn, "no connection", on.to.Address, "node", on.to.Name, "addr", on.to.Address, "err", err)
	}
}

// Introduce is Call on a connection of its own, to a node of any cluster, or of none: the target's
// ID is not checked. The node's Handler sees Request.Introduction.
func (n *Node) Introduce(ctx context.Context, to Target, kind byte, body []byte) ([]byte, error) {
	raw, err := n.connect(ctx, to, header{use: useIntroduction})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	c := newClient(n, lane{to: to}, raw)
	defer c.fail(errDone)
	if !n.goUnlessClosed("client reader", c.read, c.fail) || !n.goUnlessClosed("client writer", c.write, c.fail) {
		return nil, fmt.Errorf("%w: %w", ErrNotSent, ErrClosed)
	}
	return c.call(patience{ctx: ctx}, kind, body)
}

// forget removes c, so that the next call on its lane opens a connection.
func (n *Node) forget(c *client) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.links[c.lane]; l != nil && l.client == c {
		l.client = nil
	}
}
