package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"codeq/internal/base"
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
	// Lives are the lives of this node's directory, fewer than MaxLives; SetLives replaces them.
	// Defaults to none.
	Lives Lives
	// CheckLives is called for each connection between members, before it is used, with the lives
	// of the other side. It may wait until ctx ends, which happens when the other side closes the
	// connection. After an error the connection is not used; the other side gets base.ErrOldCopy
	// and ErrEarly. Defaults to accepting all.
	CheckLives func(ctx context.Context, other Identity, lives Lives) error
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

	mu      sync.Mutex
	self    Identity
	closed  bool
	conns   map[*conn]struct{} // all open connections
	large   chan struct{}      // an element for each request of Bounds.Large that is being served
	links   map[lane]*link     // all that were ever called
	broken  map[Target]error   // the last error of a connection to each, unless it was opened
	formats Formats            // Least rises
	lives   Lives              // never changed, but replaced
	newest  map[ID]int         // see NewestOf
	// admitted is the birth of the process that may have a directory open; see Admit.
	admitted map[ID]uint64
	moved    map[ID]string // address of each node that was last found elsewhere than at the target's
}

// conn is a connection that Close of the Node closes, unless it was closed before.
type conn struct {
	net.Conn
	node *Node
	// Bytes that came while CheckLives was waiting; they are read first.
	early []byte
	first [1]byte // memory of early
	// Guarded by node.mu.
	use    byte    // 0: before the end of the handshake
	other  ID      // directory of the other side
	lives  Lives   // lives of other
	stream *stream // of a connection of calls; nil: there is none yet
	newest int     // format that the other side knows
	dialed bool    // by this node
	said   int     // Formats.Least in this node's last message to the other side, if dialed
	untold bool    // Require has ended the connection, as Least has risen since
}

func (c *conn) Read(b []byte) (int, error) {
	if len(c.early) == 0 {
		return c.Conn.Read(b)
	}
	k := copy(b, c.early)
	c.early = c.early[k:]
	return k, nil
}

// carry stores the stream of the connection.
func (c *conn) carry(s *stream) {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.stream = s
}

func (c *conn) Close() error {
	c.node.mu.Lock()
	delete(c.node.conns, c)
	c.node.mu.Unlock()
	return c.Conn.Close()
}

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

// largeBody is the size, in bytes, from which requests have a lane of their own: other ones pass
// them.
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
		c.Handler = func(r *Request) { r.Fail(CodePeer, "no handler") }
	}
	if c.Files == nil {
		c.Files = func(int, net.Conn) {}
	}
	n := &Node{
		c:       c,
		lines:   NewLines(c.Logger),
		conns:   make(map[*conn]struct{}),
		links:   make(map[lane]*link),
		broken:  make(map[Target]error),
		self:    c.Identity,
		formats: c.Formats,
		lives:   c.Lives,
		newest:  make(map[ID]int),
		groups:  make([]chan net.Conn, c.Groups),

		admitted: make(map[ID]uint64),
		moved:    make(map[ID]string),
	}
	if n.c.Addresses == nil {
		n.c.Addresses = func(Target) []string { return nil }
	}
	if n.c.Raise == nil {
		n.c.Raise = func(int) error { return nil }
	}
	if n.c.CheckLives == nil {
		n.c.CheckLives = func(context.Context, Identity, Lives) error { return nil }
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

// register makes Close close raw. After Close it closes raw itself and returns nil.
func (n *Node) register(raw net.Conn) *conn {
	c := &conn{Conn: raw, node: n}
	n.mu.Lock()
	closed := n.closed
	if !closed {
		n.conns[c] = struct{}{}
	}
	n.mu.Unlock()
	if closed {
		_ = raw.Close()
		return nil
	}
	return c
}

// accept is the goroutine that accepts connections.
func (n *Node) accept() {
	var delay time.Duration
	for {
		raw, err := n.c.Listener.Accept()
		if err != nil {
			if n.ctx.Err() != nil {
				return
			}
			n.lines.Log(slog.LevelError, "accept failed", "", "err", err)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			delay = min(max(2*delay, firstBackoff), lastBackoff)
			n.pause(delay)
			continue
		}
		delay = 0
		if n.isBusy() {
			n.turnAway(raw)
			continue
		}
		if c := n.register(raw); c != nil {
			n.goUnlessClosed("accepted connection", func() { n.serveAccepted(c) }, func(error) { _ = c.Close() })
		}
	}
}

// serveAccepted reads the header of an accepted connection and serves the connection, or passes it
// on. After an error, it closes it.
func (n *Node) serveAccepted(c *conn) {
	h, err := n.checkHeader(c)
	if err != nil {
		_ = c.Close()
		if n.ctx.Err() == nil {
			n.lines.Log(slog.LevelWarn, "connection not accepted", "", "from", c.RemoteAddr(), "name", h.from.Name, "err", err)
		}
		return
	}
	switch h.use {
	case useRaft:
		n.handOver(c, n.groups[h.group])
		return
	case useFiles:
		n.c.Files(int(h.group), c)
		_ = c.Close()
		return
	}
	s := newServer(n, h, c)
	c.carry(&s.stream)
	if !n.goUnlessClosed("server writer", s.write, s.fail) {
		_ = c.Close()
		return
	}
	n.guarded("server reader", s.read, s.fail)
}

// checkHeader does the accepting side of the handshake, within Timeout.
func (n *Node) checkHeader(c *conn) (header, error) {
	if err := c.SetDeadline(time.Now().Add(n.c.Timeout)); err != nil {
		return header{}, err
	}
	h, err := readHeader(c)
	var refused *RefusedError
	var formats Formats
	switch {
	case errors.As(err, &refused) && refused != errTLS:
	case err != nil:
		refuseTLS(c, err)
		return h, err
	default:
		if refused = n.refusal(c, h); refused != nil {
			break
		}
		lives := livesOf(h.lives)
		if err := n.checkDialer(c, h, lives); err != nil {
			if refused = refusedLives(err); refused == nil {
				return h, err
			}
			break
		}
		formats, refused = n.agree(c, h.use, h.from, h.formats, lives)
	}
	self := n.Identity()
	if err := writeAnswer(c, answer{self.Cluster, self.ID, formats, n.ownLives()}, refused); err != nil {
		return h, fmt.Errorf("peer: answer header: %w", err)
	}
	if refused != nil {
		return h, refused
	}
	return h, c.SetDeadline(time.Time{})
}

// checkDialer is checkLives for a dialer, which waits for the answer: so it is bounded by
// Timeout/2.
func (n *Node) checkDialer(c *conn, h header, lives Lives) error {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.Timeout/2)
	defer cancel()
	return n.checkLives(ctx, c, h.use, h.from, lives)
}

// refusal is the reason why a connection is not accepted; nil: it is.
func (n *Node) refusal(c *conn, h header) *RefusedError {
	self := n.Identity()
	refused := func(r Reason, format string, args ...any) *RefusedError {
		return &RefusedError{r, fmt.Sprintf(format, args...)}
	}
	if int64(h.groups) != int64(n.c.Groups) {
		return refused(RefusedGroups, "%s has %d groups, not %d", self.Name, n.c.Groups, h.groups)
	}
	if ofGroup(h.use) && int64(h.group) >= int64(n.c.Groups) {
		return refused(RefusedGroup, "%s has no group %d", self.Name, h.group)
	}
	if err := n.c.Verify(c.Conn, h.from.Name, true); err != nil {
		return refused(RefusedName, "certificate of node %q: %v", h.from.Name, err)
	}
	switch {
	case h.use == useIntroduction:
		if h.to.Name != self.Name {
			return refused(RefusedNode, "this is %s, not node %q", self, h.to.Name)
		}
	case h.from.Cluster != self.Cluster || self.Cluster == (ID{}):
		return refused(RefusedCluster, "this is %s, not of cluster %s", self, orNone(h.from.Cluster))
	case h.to.ID != self.ID:
		return refused(RefusedNode, "this is %s, not %s", self, h.to)
	case h.from.ID == self.ID:
		return refused(RefusedNode, "this is %s itself", self)
	}
	return nil
}

// Identity is the identity of this node.
func (n *Node) Identity() Identity {
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

// Failure is the last error of a connection to a node of the cluster; nil if it was opened, or
// there was none.
func (n *Node) Failure(to Target) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.broken[to]
}

// connect dials a target and does the dialing side of the handshake, within Timeout and ctx.
func (n *Node) connect(ctx context.Context, to Target, h header) (*conn, error) {
	c, err := n.tryConnect(ctx, to, h)
	if h.use == useIntroduction { // the caller gets the error
		return c, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil {
		delete(n.broken, to)
	} else {
		n.broken[to] = err
	}
	return c, err
}

func (n *Node) tryConnect(ctx context.Context, to Target, h header) (*conn, error) {
	h.groups, h.from = uint32(n.c.Groups), n.Identity()
	h.to = Identity{h.from.Cluster, to.ID, to.Name}
	if len(h.from.Name) > maxName || len(h.to.Name) > maxName {
		return nil, fmt.Errorf("peer: names of %d and %d bytes", len(h.from.Name), len(h.to.Name))
	}
	if h.use != useIntroduction && h.from.Cluster == (ID{}) {
		return nil, errNoCluster
	}
	ctx, cancel := context.WithTimeout(ctx, n.c.Timeout)
	defer cancel()
	if h.use == useIntroduction {
		return n.dialTold(ctx, to, h)
	}
	return n.dialMoved(ctx, to, h)
}

// dialTold is dial, again if this node has come to require a later format meanwhile: the other side
// may answer late (CheckLives).
func (n *Node) dialTold(ctx context.Context, to Target, h header) (*conn, error) {
	c, err := n.dial(ctx, to, h)
	for errors.Is(err, errUntold) {
		c, err = n.dial(ctx, to, h)
	}
	return c, err
}

// dial opens a connection to a target. ctx has a deadline.
func (n *Node) dial(ctx context.Context, to Target, h header) (*conn, error) {
	raw, err := n.c.Dial(ctx, to.Address)
	if err != nil {
		return nil, fmt.Errorf("peer: dial %s: %w", to.Address, err)
	}
	c := n.register(raw)
	if c == nil {
		return nil, ErrClosed
	}
	h.formats, h.lives = n.say(c), n.ownLives()
	deadline, _ := ctx.Deadline()
	if err = c.SetDeadline(deadline); err == nil {
		stop := context.AfterFunc(ctx, func() {
			n.guarded("end of a handshake", func() { _ = c.SetDeadline(time.Unix(1, 0)) }, func(error) {})
		})
		err = n.greet(ctx, c, h)
		if !stop() && err == nil {
			err = base.EndOf(ctx)
		}
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		if n.isUntold(c) {
			return nil, errUntold
		}
		return nil, fmt.Errorf("peer: connect to %s: %w", to.Address, err)
	}
	return c, nil
}

// errUntold: this node has come to require a later format than it has sent to the other side.
var errUntold = errors.New("peer: told an earlier format")

func (n *Node) isUntold(c *conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return c.untold
}

// greet sends the header of a dialed connection, and checks that the right node has accepted.
func (n *Node) greet(ctx context.Context, c *conn, h header) error {
	_, sent := c.Write(encodeHeader(h))
	a, err := readAnswer(c) // the answer may be a refusal that came before the header
	var refused *RefusedError
	if sent != nil && !errors.As(err, &refused) {
		err = sent
	}
	if err != nil {
		return err
	}
	if err := n.c.Verify(c.Conn, h.to.Name, false); err != nil {
		return &RefusedError{RefusedName, fmt.Sprintf("certificate of node %q: %v", h.to.Name, err)}
	}
	got := Identity{a.cluster, a.id, h.to.Name}
	if h.use != useIntroduction && got != h.to {
		return &RefusedError{RefusedNode, fmt.Sprintf("%s has answered, not %s", got, h.to)}
	}
	lives := livesOf(a.lives)
	if err := n.checkLives(ctx, c, h.use, got, lives); err != nil {
		return err
	}
	if _, refused := n.agree(c, h.use, got, a.formats, lives); refused != nil {
		return refused
	}
	return nil
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
	c, err := n.client(ctx, until, limit, on)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	return c.call(ctx, until, limit, kind, body)
}

// client returns the connection of a lane, once it is open.
func (n *Node) client(ctx context.Context, until <-chan struct{}, limit *base.Limit, on lane) (*client, error) {
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
	for {
		var reason error
		select {
		case <-a.done:
			return a.client, a.err
		case <-ctx.Done():
			reason = base.EndOf(ctx)
		case <-until:
			reason = errUntil
		case <-limit.C():
			if !limit.IsOver(false) {
				continue
			}
			reason = base.ErrLate
		}
		return nil, fmt.Errorf("peer: wait for connection to %s: %w", on.to.Address, reason)
	}
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
	return c.call(ctx, nil, nil, kind, body)
}

// forget removes c, so that the next call on its lane opens a connection.
func (n *Node) forget(c *client) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.links[c.lane]; l != nil && l.client == c {
		l.client = nil
	}
}

var _ io.Closer = (*Node)(nil)
