package peer

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// group is the stream layer of one Raft group. It implements raft.StreamLayer.
type group struct {
	node   *Node
	number int
	once   sync.Once
	closed chan struct{} // closed by Close
}

// Group returns the connections of Raft group g, for one raft.NetworkTransport at a time. g must be
// less than Config.Groups. Its Close ends only its Accept: the connections that it returned stay
// open until Raft or Close of the Node closes them. A connection without an Accept within Timeout
// is closed.
func (n *Node) Group(g int) raft.StreamLayer {
	return &group{node: n, number: g, closed: make(chan struct{})}
}

// Accept returns the next connection of the group from another node.
func (g *group) Accept() (net.Conn, error) {
	select {
	case <-g.closed:
		return nil, net.ErrClosed // even if a connection is waiting
	default:
	}
	select {
	case <-g.closed:
	case <-g.node.ctx.Done():
	case c := <-g.node.groups[g.number]:
		return c, nil
	}
	return nil, net.ErrClosed
}

func (g *group) Close() error {
	g.once.Do(func() { close(g.closed) })
	return nil
}

// Addr returns the address of the Node's listener.
func (g *group) Addr() net.Addr { return g.node.c.Listener.Addr() }

// Dial opens a connection to the same group of a node, at a Target.RaftAddress, within timeout, if
// positive, and Config.Timeout.
func (g *group) Dial(addr raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	to, err := targetOf(addr)
	if err != nil {
		return nil, err
	}
	ctx := g.node.ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	c, err := g.node.connect(ctx, to, header{use: useRaft, group: uint32(g.number)})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// handOver passes a connection to Accept of its group, or closes it.
func (n *Node) handOver(c *conn, to chan<- net.Conn) {
	patience := time.NewTimer(n.c.Timeout)
	defer patience.Stop()
	select {
	case to <- c:
		return
	case <-patience.C:
	case <-n.ctx.Done():
	}
	_ = c.Close()
}

// OpenFiles opens a connection to Config.Files of a node of the cluster. The caller closes it, if
// Close of the Node has not.
func (n *Node) OpenFiles(ctx context.Context, to Target, group int) (net.Conn, error) {
	c, err := n.connect(ctx, to, header{use: useFiles, group: uint32(group)})
	if err != nil {
		return nil, err
	}
	return c, nil
}
