package peer

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"codeq/internal/base"
)

// client is the calling side of a connection of calls.
type client struct {
	stream
	lane
	node *Node

	// heard counts the reads from the network.
	heard atomic.Uint64
	// incoming: the reader is in the middle of a large reply.
	incoming atomic.Bool

	// Guarded by mu.
	last    uint64             // number of the last call
	pending map[uint64]*waiter // calls without a reply, by number
	watch   *time.Timer        // runs check
	armed   bool               // watch will run check; true while calls are pending
	checked uint64             // heard at the last check
	pinging bool               // a ping was sent, and nothing has come since
}

// waiter is a call without a reply. The goroutine that removes it from pending owns it: the reader
// or settleAll, which fill it in and send on done, or the caller, which has given up.
type waiter struct {
	done  chan struct{} // capacity 1
	end   uint64        // of its frame in the stream
	reply []byte
	err   error
}

func newClient(n *Node, on lane, conn net.Conn) *client {
	c := &client{node: n, lane: on, pending: make(map[uint64]*waiter)}
	c.init(conn, n.c.Timeout)
	c.ended = c.settleAll
	c.watch = time.AfterFunc(time.Hour, func() { n.guarded("check of a peer", c.check, c.fail) })
	c.watch.Stop()
	return c
}

// patience is how long a call waits: until ctx ends, until is closed, or limit is over. All of a
// call's waits share it.
type patience struct {
	ctx   context.Context
	until <-chan struct{} // nil: not closed
	limit *base.Limit     // nil: no limit
}

// await returns nil when done is closed, or gives an element, or else the reason why the call waits
// no longer. moves reports whether the call makes progress.
func (p *patience) await(done <-chan struct{}, moves func() bool) error {
	for {
		select {
		case <-done:
			return nil
		case <-p.ctx.Done():
			return base.EndOf(p.ctx)
		case <-p.until:
			return errUntil
		case <-p.limit.C():
			if p.limit.IsOver(moves()) {
				return base.ErrLate
			}
		}
	}
}

func standsStill() bool { return false }

func (c *client) call(p patience, kind byte, body []byte) ([]byte, error) {
	c.mu.Lock()
	for c.err == nil && len(c.queue) > queuedBytes {
		if err := c.waitForRoom(p); err != nil {
			c.mu.Unlock()
			return nil, fmt.Errorf("%w: wait for room in the connection to %s: %w", ErrNotSent, c.to.Address, err)
		}
	}
	if err := c.err; err != nil {
		c.mu.Unlock()
		return nil, fmt.Errorf("%w: connection to %s: %w", ErrNotSent, c.to.Address, err)
	}
	w := c.node.waiters.Get().(*waiter)
	c.last++
	number := c.last
	c.append(frameRequest, kind, number, body)
	w.end = c.appended
	c.pending[number] = w
	if !c.armed {
		c.armed = true
		c.pinging = false
		c.checked = c.heard.Load()
		c.watch.Reset(c.timeout)
	}
	c.mu.Unlock()

	var seen traffics
	if reason := p.await(w.done, func() bool { return c.moves(w, &seen) }); reason != nil {
		if c.abandon(number) {
			c.node.waiters.Put(w)
			return nil, fmt.Errorf("%w: %w", ErrLost, reason)
		}
		<-w.done
	}
	reply, err := w.reply, w.err
	w.reply, w.err = nil, nil
	c.node.waiters.Put(w)
	return reply, err
}

// traffics counts the traffic of a connection.
type traffics struct{ handed, heard uint64 }

// moves reports whether a request, or a large reply that is this call's or comes before it, has
// made progress since the last look.
func (c *client) moves(w *waiter, last *traffics) bool {
	c.mu.Lock()
	now := traffics{c.handed, c.heard.Load()}
	c.mu.Unlock()
	before := *last
	*last = now
	return before.handed < w.end && before.handed < now.handed || c.incoming.Load() && before.heard < now.heard
}

// waitForRoom returns nil when there may be room, or the reason why it stopped waiting. REQUIRES:
// mu is held; it is released meanwhile.
func (c *client) waitForRoom(p patience) error {
	if c.room == nil {
		c.room = make(chan struct{})
	}
	room := c.room
	c.mu.Unlock()
	defer c.mu.Lock()
	return p.await(room, standsStill)
}

// abandon reports whether the caller owns its waiter again; then it cancels the request on the
// other side. Otherwise the waiter is about to be settled.
func (c *client) abandon(number uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.pending[number]; !ok {
		return false
	}
	delete(c.pending, number)
	if c.err == nil {
		c.append(frameCancel, 0, number, nil)
	}
	return true
}

// settleAll fails all pending calls. The stream has ended, so that no more will come.
func (c *client) settleAll() {
	c.node.forget(c)
	c.mu.Lock()
	c.watch.Stop()
	pending, handed, err := c.pending, c.handed, c.err
	c.pending = nil
	c.mu.Unlock()
	for _, w := range pending {
		kind := ErrLost
		if w.end > handed {
			kind = ErrNotSent
		}
		w.err = fmt.Errorf("%w: connection to %s: %w", kind, c.to.Address, err)
		w.done <- struct{}{}
	}
}

// read is the goroutine that reads.
func (c *client) read() { c.readFrames(countingReader{c}, c.admit, c.receive) }

// admit records that a large reply has begun.
func (c *client) admit(int) error {
	c.incoming.Store(true)
	return nil
}

// countingReader counts the reads that return.
type countingReader struct{ c *client }

func (r countingReader) Read(p []byte) (int, error) {
	n, err := r.c.conn.Read(p)
	r.c.heard.Add(1)
	return n, err
}

func (c *client) receive(f frame) error {
	c.incoming.Store(false)
	var failure error
	switch f.typ {
	case frameReply:
	case frameFail:
		failure = &RemoteError{f.code, string(f.body)}
		f.body = nil
	case framePing:
		c.send(framePong, 0, 0, nil)
		return nil
	case framePong:
		c.ponged()
		return nil
	default:
		return fmt.Errorf("%w: frame of type %d from a called node", errProtocol, f.typ)
	}
	c.mu.Lock()
	w := c.pending[f.number]
	delete(c.pending, f.number)
	c.mu.Unlock()
	if w != nil { // else its caller has given up
		w.reply, w.err = f.body, failure
		w.done <- struct{}{}
	}
	return nil
}

// check runs every Timeout while calls are pending. If nothing has come since the last check, it
// sends a ping. It ends the connection if nothing comes within a Timeout after the ping was
// written; until then, earlier bytes are still being sent, and each Write has its own deadline.
func (c *client) check() {
	c.mu.Lock()
	heard := c.heard.Load()
	next := c.timeout
	silent := false
	switch {
	case c.err != nil:
		c.mu.Unlock()
		return
	case len(c.pending) == 0:
		c.armed = false
		c.mu.Unlock()
		return
	case heard != c.checked:
		c.checked = heard
		c.pinging = false
	case !c.pinging:
		c.pinging = true
		c.ping()
		c.pingEnd, c.pingOut = c.appended, time.Time{}
	case !c.pingOut.IsZero():
		next = c.timeout - time.Since(c.pingOut)
		silent = next <= 0
	}
	if !silent {
		c.watch.Reset(next)
	}
	c.mu.Unlock()
	if silent {
		c.node.lines.Log(slog.LevelWarn, "peer is silent", c.to.Address, "addr", c.to.Address)
		c.fail(errSilent)
	}
}
