package peer

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"codeq/internal/guard"
)

const (
	defaultTimeout = 5 * time.Second
	firstBackoff   = 50 * time.Millisecond // after a dial has failed; it doubles
	lastBackoff    = 250 * time.Millisecond
)

// Config of a Node.
type Config struct {
	// Identity of this node; SetCluster replaces its Cluster.
	Identity Identity
	// Formats are those that this node knows and requires. Defaults to 1 and 1.
	Formats Formats
	// Raise is called before this node comes to require a later format that it knows, because
	// another node of its cluster requires it. Until it returns, that one sends nothing. Defaults
	// to none.
	Raise func(format int) error
	// Incarnations are the incarnations of this node's directory, fewer than MaxIncarnations;
	// SetIncarnations replaces them. Defaults to none.
	Incarnations Incarnations
	// CheckIncarnations is called for each connection between members, before it is used, with the
	// incarnations of the other side. It may wait until ctx ends, which happens when the other side
	// closes the connection. After an error the connection is not used; the other side gets
	// base.ErrOldCopy and ErrEarly. Defaults to accepting all.
	CheckIncarnations func(ctx context.Context, other Identity, incarnations Incarnations) error
	// Verify refuses the other side of a connection if its certificate is not for a node of that
	// name. Defaults to accepting all.
	Verify func(conn net.Conn, name string, accepted bool) error
	// Listener accepts the connections of the other nodes; TLS, if any, is already around it. The
	// Node closes it. Raft sends its Addr to the others, so they must be able to dial it. Nil: this
	// Node accepts no connections.
	Listener net.Listener
	// Bounds limit the connections of the Listener. Defaults to none: nodes trust each other.
	Bounds Bounds
	// Addresses are other possible addresses of a node that is not at the target's. Defaults to
	// none.
	Addresses func(to Target) []string
	// Dial opens a connection to a Listener of another node, TLS, if any, included. It must return
	// soon once ctx ends.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Groups is the number of Raft groups; nodes with another number are refused.
	Groups int
	// Handler is called by the reader of a connection, for one request after another in the order
	// of sending, so it must not block. It answers by Request.Reply or Request.Fail, at once or
	// later, from any goroutine. Each connection has its own reader.
	Handler func(*Request)
	// Files receives the files that another node sends for a group, and returns when no more come.
	// It is called for each connection of OpenFiles, which then ends.
	Files func(group int, from net.Conn)
	// Timeout of dialing, of the handshake of a connection, of writing at most 1 MiB, and of
	// waiting for any bytes while calls are pending. Defaults to 5 seconds.
	Timeout time.Duration
	// Logger logs connections that were refused or failed. Defaults to none.
	Logger *slog.Logger
}

// Node is one end of all connections between this node and the others. Its methods are safe for
// concurrent use.
type Node struct {
	c       Config
	lines   *Lines
	ctx     context.Context // ends with Close
	stop    context.CancelFunc
	running sync.WaitGroup  // goroutines of the Node; added to under mu before closed is set
	waiters sync.Pool       // of *waiter with their channels: not shared between synctest bubbles
	groups  []chan net.Conn // from a group's new connections to its Accept; never closed

	// mu guards the fields below, and those of links and connections. Nothing waits while it is
	// held: goroutines may be started, and connections are closed after it.
	mu           sync.Mutex
	self         Identity
	closed       bool
	conns        map[*conn]struct{} // all open connections
	large        chan struct{}      // an element for each request of Bounds.Large that is being served
	links        map[lane]*link     // all that were ever called
	broken       map[Target]error   // the last error of a connection to each, unless it was opened
	formats      Formats            // Least rises
	incarnations Incarnations       // never changed, but replaced
	newest       map[ID]int         // see NewestOf
	// admitted is the birth of the process that may have a directory open; see Admit.
	admitted map[ID]uint64
	moved    map[ID]string // address of each node that was last found elsewhere than at the target's
}

// New returns a Node that accepts connections. Close ends it.
func New(c Config) *Node {
	if c.Timeout <= 0 {
		c.Timeout = defaultTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Verify == nil {
		c.Verify = func(net.Conn, string, bool) error { return nil }
	}
	if c.Formats == (Formats{}) {
		c.Formats = Formats{1, 1}
	}
	if c.Handler == nil {
		c.Handler = func(r *Request) { r.Fail(codePeer, "no handler") }
	}
	if c.Files == nil {
		c.Files = func(int, net.Conn) {}
	}
	n := &Node{
		c:            c,
		lines:        NewLines(c.Logger),
		conns:        make(map[*conn]struct{}),
		links:        make(map[lane]*link),
		broken:       make(map[Target]error),
		self:         c.Identity,
		formats:      c.Formats,
		incarnations: c.Incarnations,
		newest:       make(map[ID]int),
		groups:       make([]chan net.Conn, c.Groups),

		admitted: make(map[ID]uint64),
		moved:    make(map[ID]string),
	}
	if n.c.Addresses == nil {
		n.c.Addresses = func(Target) []string { return nil }
	}
	if n.c.Raise == nil {
		n.c.Raise = func(int) error { return nil }
	}
	if n.c.CheckIncarnations == nil {
		n.c.CheckIncarnations = func(context.Context, Identity, Incarnations) error { return nil }
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	if b := &n.c.Bounds; b.Large > 0 {
		n.large = make(chan struct{}, b.Large)
	}
	n.waiters.New = func() any { return &waiter{done: make(chan struct{}, 1)} }
	for g := range n.groups {
		n.groups[g] = make(chan net.Conn)
	}
	if c.Listener == nil {
		return n
	}
	n.running.Go(func() {
		for again := true; again; {
			again = false
			guard.Run("accept", n.accept, func(value any, stack []byte) {
				_ = n.panicked("accept", value, stack)
				again = n.pause(lastBackoff)
			})
		}
	})
	return n
}

// panicked logs a panic, and returns it as an error.
func (n *Node) panicked(what string, value any, stack []byte) error {
	n.c.Logger.Error("codeq has panicked; this is a bug of codeq", "in", what, "value", fmt.Sprint(value), "stack", string(stack))
	return fmt.Errorf("peer: panic in %s: %v", what, value)
}

// pause waits for d and returns true, or returns false once the Node is closed.
func (n *Node) pause(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-n.ctx.Done():
		return false
	}
}

// guarded runs f on a goroutine of a connection: if f panics, it calls end with the reason.
func (n *Node) guarded(what string, f func(), end func(error)) {
	guard.Run(what, f, func(value any, stack []byte) { end(n.panicked(what, value, stack)) })
}

// Close closes the listener and all connections, including those of Raft, and waits for the Node's
// goroutines and Handlers. Pending calls fail with ErrLost, or ErrNotSent. A Handler must not call
// it. Closing again does nothing.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		n.running.Wait()
		return nil
	}
	n.closed = true
	var clients []*client
	for _, l := range n.links {
		if l.client != nil {
			clients = append(clients, l.client)
		}
	}
	n.mu.Unlock()

	n.stop()
	var err error
	if n.c.Listener != nil {
		err = n.c.Listener.Close()
	}
	for _, c := range clients {
		c.fail(ErrClosed)
	}
	n.mu.Lock()
	conns := make([]*conn, 0, len(n.conns))
	for c := range n.conns {
		conns = append(conns, c)
	}
	n.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
	n.running.Wait()
	n.lines.Close()
	return err
}

// goUnlessClosed runs guarded in a goroutine that Close waits for. It reports whether it did.
func (n *Node) goUnlessClosed(what string, f func(), end func(error)) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.running.Go(func() { n.guarded(what, f, end) })
	return true
}

// identity is the identity of this node.
func (n *Node) identity() Identity {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.self
}

// SetCluster makes a node without a cluster part of one.
func (n *Node) SetCluster(id ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.self.Cluster = id
}
