package codeq

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// simNet is a network in memory between hosts that have names for addresses.
// Connections are like those of TCP: each direction has a buffer of simWindow
// bytes, which arrive in order, after a latency drawn by lot. A direction of a link that
// is cut holds its bytes back until it is healed, so that a writer blocks
// when the buffer is full; nobody is told of a cut. A host that is
// paused neither sends nor receives. Time is that of the bubble.
type simNet struct {
	mu      sync.Mutex // guards everything, that of the connections too
	rng     *rand.Rand
	latency time.Duration // at most
	cut     map[simLink]bool
	bytes   map[simLink]int64 // written so far
	paused  map[string]bool
	hosts   map[string]*simListener
	conns   map[*simConn]bool
	change  chan struct{} // closed and replaced when a link, a host or a listener changes
}

// simLink is a direction of a link.
type simLink struct{ from, to string }

const simWindow = 64 << 10

func newSimNet(seed uint64, latency time.Duration) *simNet {
	return &simNet{
		rng: rand.New(rand.NewPCG(seed, 1)), latency: latency, cut: make(map[simLink]bool), bytes: make(map[simLink]int64), paused: make(map[string]bool),
		hosts: make(map[string]*simListener), conns: make(map[*simConn]bool), change: make(chan struct{}),
	}
}

// bump wakes those who wait on a channel. REQUIRES: mu is held.
func bump(change *chan struct{}) {
	close(*change)
	*change = make(chan struct{})
}

func (n *simNet) update(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	bump(&n.change)
}

// sent is how many bytes one host has sent to another.
func (n *simNet) sent(from, to string) int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.bytes[simLink{from, to}]
}

// setCut cuts or heals one direction of a link.
func (n *simNet) setCut(from, to string, cut bool) {
	n.update(func() { n.cut[simLink{from, to}] = cut })
}

// isolate cuts a host off from all others, in both directions.
func (n *simNet) isolate(name string, others []string) {
	n.update(func() {
		for _, o := range others {
			if o != name {
				n.cut[simLink{name, o}], n.cut[simLink{o, name}] = true, true
			}
		}
	})
}

// heal heals all links. If reset is set, connections over those that were cut end
// with an error.
func (n *simNet) heal(reset bool) {
	n.update(func() {
		for c := range n.conns {
			if reset && n.cut[simLink{c.local, c.remote}] {
				c.reset, c.peer.reset = true, true
			}
		}
		clear(n.cut)
	})
}

func (n *simNet) pause(name string, paused bool) { n.update(func() { n.paused[name] = paused }) }

// crash ends a host's listener and connections, without a farewell: the other
// ends see it when something from the host would have reached them.
func (n *simNet) crash(name string) {
	n.update(func() {
		if l := n.hosts[name]; l != nil {
			l.close()
		}
		for c := range n.conns {
			if c.local == name {
				c.reset, c.peer.gone = true, true
			}
		}
	})
}

// blocked reports whether nothing passes now. REQUIRES: mu is held.
func (n *simNet) blocked(from, to string) bool {
	return n.cut[simLink{from, to}] || n.paused[from] || n.paused[to]
}

func (n *simNet) lag() time.Duration {
	if n.latency == 0 {
		return 0
	}
	return time.Duration(n.rng.Int64N(int64(n.latency)))
}

// wait waits for a change, of what change is closed at, or until a time; zero: for ever.
// REQUIRES: mu is held; it is released.
func (n *simNet) wait(change <-chan struct{}, until ...time.Time) {
	first := time.Time{}
	for _, t := range until {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	all := n.change
	n.mu.Unlock()
	var at <-chan time.Time
	if !first.IsZero() {
		t := time.NewTimer(time.Until(first))
		defer t.Stop()
		at = t.C
	}
	select {
	case <-change:
	case <-all:
	case <-at:
	}
}

// listen makes a host reachable.
func (n *simNet) listen(name string) *simListener {
	l := &simListener{net: n, name: name}
	n.update(func() { n.hosts[name] = l })
	return l
}

// dial is Cluster.dial of a host whose listener is from.
func (n *simNet) dial(ctx context.Context, from *simListener, to string) (net.Conn, error) {
	fail := func(err error) error { return &net.OpError{Op: "dial", Net: "sim", Err: fmt.Errorf("%s: %w", to, err)} }
	for {
		n.mu.Lock()
		if from.closed {
			n.mu.Unlock()
			return nil, fail(syscall.ENETDOWN)
		}
		if !n.blocked(from.name, to) && !n.blocked(to, from.name) {
			l := n.hosts[to]
			if l == nil || l.closed {
				n.mu.Unlock()
				return nil, fail(syscall.ECONNREFUSED)
			}
			here := &simConn{net: n, local: from.name, remote: to, change: make(chan struct{})}
			there := &simConn{net: n, local: to, remote: from.name, change: make(chan struct{})}
			here.peer, there.peer = there, here
			n.conns[here], n.conns[there] = true, true
			l.backlog = append(l.backlog, there)
			bump(&n.change)
			n.mu.Unlock()
			return here, nil
		}
		change := n.change
		n.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return nil, fail(context.Cause(ctx))
		}
	}
}

type simListener struct {
	net     *simNet
	name    string
	backlog []*simConn
	closed  bool
}

func (l *simListener) Accept() (net.Conn, error) {
	for {
		l.net.mu.Lock()
		if l.closed {
			l.net.mu.Unlock()
			return nil, net.ErrClosed
		}
		if len(l.backlog) > 0 && !l.net.paused[l.name] {
			c := l.backlog[0]
			l.backlog = l.backlog[1:]
			l.net.mu.Unlock()
			return c, nil
		}
		l.net.wait(nil)
	}
}

// close refuses further connections. REQUIRES: the net's mu is held.
func (l *simListener) close() {
	l.closed = true
	for _, c := range l.backlog {
		c.reset, c.peer.gone = true, true
	}
	l.backlog = nil
}

func (l *simListener) Close() error {
	l.net.update(l.close)
	return nil
}

func (l *simListener) Addr() net.Addr { return simAddr(l.name) }

type simAddr string

func (simAddr) Network() string  { return "sim" }
func (a simAddr) String() string { return string(a) }

// simConn is one end of a connection. What it is to read is in its buffer.
type simConn struct {
	net           *simNet
	local, remote string
	peer          *simConn

	// Guarded by the net's mu.
	segments      []simSegment
	buffered      int
	arrival       time.Time     // of the last segment
	change        chan struct{} // closed and replaced when buffer, deadlines or ends change
	closed        bool          // by its user
	reset         bool          // broken
	gone          bool          // the other host has lost it, and says so as soon as it can be heard
	readDeadline  time.Time
	writeDeadline time.Time
}

type simSegment struct {
	at   time.Time
	data []byte
}

// broken is why nothing can be read or written; nil if something can. REQUIRES: mu is held.
func (c *simConn) broken(deadline time.Time) error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.reset, c.gone && !c.net.blocked(c.remote, c.local):
		return syscall.ECONNRESET
	case !deadline.IsZero() && !time.Now().Before(deadline):
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (c *simConn) Read(p []byte) (int, error) {
	n := c.net
	for {
		n.mu.Lock()
		if err := c.broken(c.readDeadline); err != nil {
			n.mu.Unlock()
			return 0, c.error("read", err)
		}
		var at time.Time
		if !n.blocked(c.remote, c.local) {
			switch {
			case len(c.segments) == 0 && c.peer.closed:
				n.mu.Unlock()
				return 0, io.EOF
			case len(c.segments) == 0:
			case !time.Now().Before(c.segments[0].at):
				read := copy(p, c.segments[0].data)
				if c.segments[0].data = c.segments[0].data[read:]; len(c.segments[0].data) == 0 {
					c.segments = c.segments[1:]
				}
				c.buffered -= read
				bump(&c.peer.change)
				n.mu.Unlock()
				return read, nil
			default:
				at = c.segments[0].at
			}
		}
		n.wait(c.change, at, c.readDeadline)
	}
}

func (c *simConn) Write(p []byte) (written int, err error) {
	n := c.net
	for len(p) > 0 {
		n.mu.Lock()
		if err := c.broken(c.writeDeadline); err != nil {
			n.mu.Unlock()
			return written, c.error("write", err)
		}
		if c.peer.closed && !n.blocked(c.remote, c.local) {
			n.mu.Unlock()
			return written, c.error("write", syscall.EPIPE)
		}
		if room := simWindow - c.peer.buffered; room > 0 && !n.paused[c.local] {
			chunk := append([]byte(nil), p[:min(room, len(p))]...)
			at := time.Now().Add(n.lag())
			if at.Before(c.peer.arrival) {
				at = c.peer.arrival
			}
			c.peer.arrival = at
			c.peer.segments = append(c.peer.segments, simSegment{at, chunk})
			c.peer.buffered += len(chunk)
			n.bytes[simLink{c.local, c.remote}] += int64(len(chunk))
			written, p = written+len(chunk), p[len(chunk):]
			bump(&c.peer.change)
			n.mu.Unlock()
			continue
		}
		n.wait(c.change, c.writeDeadline)
	}
	return written, nil
}

func (c *simConn) error(op string, err error) error {
	return &net.OpError{Op: op, Net: "sim", Source: simAddr(c.local), Addr: simAddr(c.remote), Err: err}
}

func (c *simConn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.closed = true
	delete(c.net.conns, c)
	bump(&c.change)
	bump(&c.peer.change)
	return nil
}

func (c *simConn) set(f func()) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	f()
	bump(&c.change)
	return nil
}

func (c *simConn) LocalAddr() net.Addr  { return simAddr(c.local) }
func (c *simConn) RemoteAddr() net.Addr { return simAddr(c.remote) }
func (c *simConn) SetDeadline(t time.Time) error {
	return c.set(func() { c.readDeadline, c.writeDeadline = t, t })
}
func (c *simConn) SetReadDeadline(t time.Time) error  { return c.set(func() { c.readDeadline = t }) }
func (c *simConn) SetWriteDeadline(t time.Time) error { return c.set(func() { c.writeDeadline = t }) }
