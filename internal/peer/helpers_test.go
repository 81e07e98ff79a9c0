package peer

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

const testTimeout = 5 * time.Second

// network connects listeners in one synctest bubble, by net.Pipe.
type network struct {
	mu        sync.Mutex
	listeners map[string]*pipeListener
	dials     int
	delay     time.Duration                                   // of each dial
	wrap      func(dialed, accepted net.Conn) (d, a net.Conn) // or nil
}

// inNetwork runs a test in a bubble with a network.
func inNetwork(t *testing.T, test func(t *testing.T, nw *network)) {
	synctest.Test(t, func(t *testing.T) { test(t, &network{listeners: make(map[string]*pipeListener)}) })
}

type pipeListener struct {
	addr   pipeAddr
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

type pipeAddr string

func (pipeAddr) Network() string  { return "pipe" }
func (a pipeAddr) String() string { return string(a) }

func (nw *network) listen(addr string) *pipeListener {
	l := &pipeListener{addr: pipeAddr(addr), conns: make(chan net.Conn), closed: make(chan struct{})}
	nw.mu.Lock()
	defer nw.mu.Unlock()
	nw.listeners[addr] = l
	return l
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Addr() net.Addr { return l.addr }

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (nw *network) dial(ctx context.Context, addr string) (net.Conn, error) {
	nw.mu.Lock()
	l := nw.listeners[addr]
	nw.dials++
	nw.mu.Unlock()
	select {
	case <-time.After(nw.delay):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l == nil {
		return nil, fmt.Errorf("nobody listens at %s", addr)
	}
	var dialed, accepted net.Conn = net.Pipe()
	if nw.wrap != nil {
		dialed, accepted = nw.wrap(dialed, accepted)
	}
	select {
	case l.conns <- accepted:
		return dialed, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// testCluster is the cluster of all nodes.
var testCluster = ID{'c'}

// identityOf is the identity of the node with a name; the ID of its directory follows from the
// name.
func identityOf(name string) Identity {
	id := ID{'i'}
	copy(id[1:], name)
	return Identity{testCluster, id, name}
}

// at is the node that listens at its name.
func at(name string) Target { return Target{identityOf(name).ID, name, name} }

// headerTo is a header of a node "x" for the node with a name.
func headerTo(name string, h header) header {
	h.from, h.to = identityOf("x"), identityOf(name)
	if h.formats == (Formats{}) {
		h.formats = Formats{7, 1}
	}
	return h
}

// node starts a Node that listens at its name.
func (nw *network) node(t testing.TB, name string, handler func(*Request)) *Node {
	n := New(Config{
		Identity: identityOf(name), Listener: nw.listen(name), Dial: nw.dial, Groups: 2, Handler: handler, Timeout: testTimeout,
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

// requireNoConns requires that an idle node has no connection.
func requireNoConns(t *testing.T, n *Node) {
	t.Helper()
	synctest.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	require.Empty(t, n.conns)
}

// connect returns a connection of calls to addr.
func (nw *network) connect(t *testing.T, addr string) net.Conn {
	c, err := nw.dial(t.Context(), addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = c.Write(encodeHeader(headerTo(addr, header{use: useCalls, groups: 2})))
	require.NoError(t, err)
	_, err = readAnswer(c)
	require.NoError(t, err)
	return c
}

// fake accepts one connection at addr, does the handshake, and passes it to serve in a goroutine.
func (nw *network) fake(t *testing.T, addr string, serve func(net.Conn)) {
	l := nw.listen(addr)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := readHeader(c); err != nil {
			t.Errorf("header: %v", err)
		}
		if err := writeAnswer(c, answer{cluster: testCluster, id: identityOf(addr).ID, formats: Formats{1, 1}}, nil); err != nil {
			t.Errorf("answer: %v", err)
		}
		serve(c)
	}()
	t.Cleanup(func() { _ = l.Close() })
}

// outcome of a Call in a separate goroutine.
type outcome struct {
	reply []byte
	err   error
}

func goCall(ctx context.Context, n *Node, addr string, body []byte) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		reply, err := n.Call(ctx, at(addr), 1, body)
		done <- outcome{reply, err}
	}()
	return done
}

func echo(r *Request) { r.Reply(r.Body) }
