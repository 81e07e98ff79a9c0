package simtest

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

// Net is a network in memory between hosts; their addresses are names. Connections are like those
// of TCP: each direction has a buffer of window bytes, and bytes arrive in order, after a random
// latency. A direction of a link may have a bandwidth, shared by its connections: bytes pass in the
// order of the writes. A cut direction holds its bytes until it is healed, so a writer blocks when
// the buffer is full; no end is notified of a cut. A paused host neither sends nor receives.
type Net struct {
	mu      sync.Mutex // guards everything, also of connections
	rng     *rand.Rand
	latency time.Duration // at most
	cut     map[link]bool
	bytes   map[link]int64     // written so far
	writes  map[link]int       // so far
	rates   map[link]int64     // bytes per second; 0: no limit
	busy    map[link]time.Time // time until which sent bytes occupy the link
	delays  map[link]time.Duration
	dials   map[string]int // of a host, so far
	paused  map[string]bool
	hosts   map[string]*Listener
	conns   map[*conn]bool
	change  signal // of a link, a host or a listener
}

// link is a direction of a link.
type link struct{ from, to string }

const window = 64 << 10

func NewNet(seed uint64, latency time.Duration) *Net {
	return &Net{
		rng: rand.New(rand.NewPCG(seed, 1)), latency: latency, cut: make(map[link]bool), bytes: make(map[link]int64), writes: make(map[link]int), dials: make(map[string]int),
		rates: make(map[link]int64), busy: make(map[link]time.Time), delays: make(map[link]time.Duration), paused: make(map[string]bool), hosts: make(map[string]*Listener), conns: make(map[*conn]bool),
	}
}

// signal wakes waiting goroutines. The net's mu guards it.
type signal struct{ next chan struct{} } // nil: no goroutine waits

func (s *signal) wait() <-chan struct{} {
	if s.next == nil {
		s.next = make(chan struct{})
	}
	return s.next
}

func (s *signal) wake() {
	if s.next != nil {
		close(s.next)
		s.next = nil
	}
}

func (n *Net) update(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	n.change.wake()
}

// Sent returns the bytes that one host has sent to another.
func (n *Net) Sent(from, to string) int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.bytes[link{from, to}]
}

// Messages returns the number of one host's writes to connections to another.
func (n *Net) Messages(from, to string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.writes[link{from, to}]
}

// Dials returns the number of dials to a host.
func (n *Net) Dials(to string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dials[to]
}

// SetCut cuts or heals one direction of a link, and reports whether that is a change.
func (n *Net) SetCut(from, to string, cut bool) (changed bool) {
	return set(n, n.cut, link{from, to}, cut)
}

// SetBandwidth limits one direction of a link from now on, in bytes per second; 0: no limit. It
// reports whether that is a change.
func (n *Net) SetBandwidth(from, to string, rate int64) (changed bool) {
	return set(n, n.rates, link{from, to}, rate)
}

// SetDelay delays the following bytes in one direction of a link by d, and reports whether that is
// a change.
func (n *Net) SetDelay(from, to string, d time.Duration) (changed bool) {
	return set(n, n.delays, link{from, to}, d)
}

// set sets a property of a link or a host, and reports whether that is a change.
func set[K, V comparable](n *Net, values map[K]V, key K, value V) (changed bool) {
	n.update(func() {
		changed = values[key] != value
		values[key] = value
	})
	return changed
}

// Unshape ends the limits and delays of all links, and reports whether there were any.
func (n *Net) Unshape() (changed bool) {
	n.update(func() {
		changed = len(n.rates)+len(n.delays) > 0
		clear(n.rates)
		clear(n.busy)
		clear(n.delays)
	})
	return changed
}

// Isolate cuts all links of a host to others, in both directions, and reports whether that is a
// change.
func (n *Net) Isolate(name string, others []string) (changed bool) {
	for _, o := range others {
		if o != name {
			to, from := n.SetCut(name, o, true), n.SetCut(o, name, true)
			changed = changed || to || from
		}
	}
	return changed
}

// Heal heals all links, and reports whether any was cut. If reset is set, connections over cut
// links end with an error.
func (n *Net) Heal(reset bool) (changed bool) {
	n.update(func() {
		for _, cut := range n.cut {
			changed = changed || cut
		}
		for c := range n.conns {
			if reset && n.cut[link{c.local, c.remote}] {
				c.reset, c.peer.reset = true, true
			}
		}
		clear(n.cut)
	})
	return changed
}

// Pause stops or continues all traffic of a host, and reports whether that is a change.
func (n *Net) Pause(name string, paused bool) (changed bool) {
	return set(n, n.paused, name, paused)
}

// Crash ends a host's listener and connections silently: the other ends get an error as soon as the
// host can reach them again. Bytes under way are lost.
func (n *Net) Crash(name string) {
	n.end(name, func(c *conn) { c.reset, c.peer.gone = true, true })
}

// Kill ends a host's listener and connections like the end of a process: bytes under way arrive.
func (n *Net) Kill(name string) {
	n.end(name, func(c *conn) {
		c.closed = true
		delete(n.conns, c)
	})
}

func (n *Net) end(name string, end func(*conn)) {
	n.update(func() {
		if l := n.hosts[name]; l != nil {
			l.close()
		}
		for c := range n.conns {
			if c.local == name {
				end(c)
			}
		}
	})
}

// blocked reports whether a link is cut or paused. REQUIRES: mu is held.
func (n *Net) blocked(from, to string) bool {
	return n.cut[link{from, to}] || n.paused[from] || n.paused[to]
}

func (n *Net) lag() time.Duration {
	if n.latency == 0 {
		return 0
	}
	return time.Duration(n.rng.Int64N(int64(n.latency)))
}

// pass sends bytes over a link, and returns the time of their arrival. REQUIRES: mu is held.
func (n *Net) pass(l link, bytes int) time.Time {
	n.bytes[l] += int64(bytes)
	at := time.Now()
	if rate := n.rates[l]; rate > 0 {
		if at.Before(n.busy[l]) {
			at = n.busy[l]
		}
		at = at.Add(time.Duration(int64(bytes) * int64(time.Second) / rate))
		n.busy[l] = at
	}
	return at.Add(n.delays[l] + n.lag())
}

// wait waits for a signal, or until the earliest of some times; zero times do not count. REQUIRES:
// mu is held; it is released.
func (n *Net) wait(change <-chan struct{}, until ...time.Time) {
	first := time.Time{}
	for _, t := range until {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	all := n.change.wait()
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

// Listen makes a host reachable.
func (n *Net) Listen(name string) *Listener {
	l := &Listener{net: n, name: name}
	n.update(func() { n.hosts[name] = l })
	return l
}

// Listens reports whether a host listens under a name.
func (n *Net) Listens(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.hosts[name]
	return l != nil && !l.closed
}

// Dial connects the host of the listener from to another host. It waits while the link is cut.
func (n *Net) Dial(ctx context.Context, from *Listener, to string) (net.Conn, error) {
	fail := func(err error) error { return &net.OpError{Op: "dial", Net: "sim", Err: fmt.Errorf("%s: %w", to, err)} }
	n.mu.Lock()
	n.dials[to]++
	n.mu.Unlock()
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
			here := &conn{net: n, local: from.name, remote: to}
			there := &conn{net: n, local: to, remote: from.name}
			here.peer, there.peer = there, here
			n.conns[here], n.conns[there] = true, true
			l.backlog = append(l.backlog, there)
			n.change.wake()
			n.mu.Unlock()
			return here, nil
		}
		change := n.change.wait()
		n.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return nil, fail(context.Cause(ctx))
		}
	}
}

// Listener accepts the connections to a host.
type Listener struct {
	net     *Net
	name    string
	backlog []*conn
	closed  bool
}

func (l *Listener) Accept() (net.Conn, error) {
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

// close closes the listener and its backlog. REQUIRES: the net's mu is held.
func (l *Listener) close() {
	l.closed = true
	for _, c := range l.backlog {
		c.reset, c.peer.gone = true, true
	}
	l.backlog = nil
}

func (l *Listener) Close() error {
	l.net.update(l.close)
	return nil
}

func (l *Listener) Addr() net.Addr { return addr(l.name) }

type addr string

func (addr) Network() string  { return "sim" }
func (a addr) String() string { return string(a) }

// conn is one end of a connection. Its segments are the bytes to read.
type conn struct {
	net           *Net
	local, remote string
	peer          *conn

	// Guarded by the net's mu.
	segments      []segment
	buffered      int
	arrival       time.Time // of the last segment
	toRead, room  signal    // for Read, and for Write; both when a deadline or an end changes
	closed        bool      // by its user
	reset         bool      // broken
	gone          bool      // lost by the other host: an error as soon as that is reachable
	readDeadline  time.Time
	writeDeadline time.Time
}

type segment struct {
	at   time.Time
	data []byte
}

// broken returns the reason why reads and writes fail; nil: they do not. REQUIRES: mu is held.
func (c *conn) broken(deadline time.Time) error {
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

func (c *conn) Read(p []byte) (int, error) {
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
				c.peer.room.wake()
				n.mu.Unlock()
				return read, nil
			default:
				at = c.segments[0].at
			}
		}
		n.wait(c.toRead.wait(), at, c.readDeadline)
	}
}

func (c *conn) Write(p []byte) (written int, err error) {
	n := c.net
	n.mu.Lock()
	n.writes[link{c.local, c.remote}]++
	n.mu.Unlock()
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
		if room := window - c.peer.buffered; room > 0 && !n.paused[c.local] {
			chunk := append([]byte(nil), p[:min(room, len(p))]...)
			at := n.pass(link{c.local, c.remote}, len(chunk))
			if at.Before(c.peer.arrival) {
				at = c.peer.arrival
			}
			c.peer.arrival = at
			c.peer.segments = append(c.peer.segments, segment{at, chunk})
			c.peer.buffered += len(chunk)
			written, p = written+len(chunk), p[len(chunk):]
			if len(c.peer.segments) == 1 { // otherwise Read waits for the first segment
				c.peer.toRead.wake()
			}
			n.mu.Unlock()
			continue
		}
		n.wait(c.room.wait(), c.writeDeadline)
	}
	return written, nil
}

func (c *conn) error(op string, err error) error {
	return &net.OpError{Op: op, Net: "sim", Source: addr(c.local), Addr: addr(c.remote), Err: err}
}

func (c *conn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.closed = true
	delete(c.net.conns, c)
	c.wake()
	c.peer.wake()
	return nil
}

// wake wakes Read and Write. REQUIRES: mu is held.
func (c *conn) wake() {
	c.toRead.wake()
	c.room.wake()
}

func (c *conn) set(f func()) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	f()
	c.wake()
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return addr(c.local) }
func (c *conn) RemoteAddr() net.Addr { return addr(c.remote) }
func (c *conn) SetDeadline(t time.Time) error {
	return c.set(func() { c.readDeadline, c.writeDeadline = t, t })
}
func (c *conn) SetReadDeadline(t time.Time) error  { return c.set(func() { c.readDeadline = t }) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.set(func() { c.writeDeadline = t }) }
