package peer

import (
	"net"
)

// conn is a connection that Close of the Node closes, unless it was closed before.
type conn struct {
	net.Conn
	node *Node
	// Bytes that came while CheckIncarnations was waiting; they are read first.
	early []byte
	first [1]byte // memory of early
	// Guarded by node.mu.
	use          byte         // 0: before the end of the handshake
	other        ID           // directory of the other side
	incarnations Incarnations // incarnations of other
	stream       *stream      // of a connection of calls; nil: there is none yet
	newest       int          // format that the other side knows
	dialed       bool         // by this node
	said         int          // Formats.Least in this node's last message to the other side, if dialed
	untold       bool         // Require has ended the connection, as Least has risen since
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
