package peer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Bounds limit the nodes and programs that connect to a Node. Zero fields are no bounds.
type Bounds struct {
	Connections int // open at a time; a further one gets RefusedBusy
	// Calls limits the calls of one connection without a written answer; more of them are refused
	// with CodeBusy.
	Calls int
	Body  int // bytes of a request's body; a larger one ends its connection
	// Large limits the requests with a body of more than 64 KiB without an answer, on all
	// connections: a connection is not read while its next one has no place.
	Large int
	// Queued is the number of bytes of answers waiting to be written above which a connection is
	// not read. If nothing can be written for a Timeout, the connection ends.
	Queued int
	// Idle is the longest time of a connection without traffic and without a pending answer; then
	// it ends.
	Idle time.Duration
}

// isBusy reports whether the number of connections has reached its limit.
func (n *Node) isBusy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	most := n.c.Bounds.Connections
	return most > 0 && len(n.conns) >= most
}

// turnAway tells a new connection that the limit is reached. It never waits: a few bytes fit into
// an empty connection.
func (n *Node) turnAway(raw net.Conn) {
	_ = raw.SetWriteDeadline(time.Now().Add(time.Second))
	text := fmt.Sprintf("there are %d connections, and no more are accepted", n.c.Bounds.Connections)
	_ = writeAnswer(raw, answer{}, &RefusedError{RefusedBusy, text})
	_ = raw.Close()
}

// count counts a request; false: the limit is exceeded.
func (c *server) count() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	most := c.node.c.Bounds.Calls
	return most == 0 || c.calls <= most
}

// admit waits until a large body may be read.
func (c *server) admit(length int) error {
	b := &c.node.c.Bounds
	if b.Body > 0 && length > b.Body {
		return fmt.Errorf("%w: body of %d bytes, more than %d", errProtocol, length, b.Body)
	}
	if c.node.large == nil {
		return nil
	}
	select {
	case c.node.large <- struct{}{}:
		c.admitted = true
		return nil
	case <-c.node.ctx.Done():
		return ErrClosed
	}
}

// bounded returns the reader of a connection, with its bounds.
func (c *server) bounded() io.Reader {
	if c.node.c.Bounds.Idle == 0 {
		return c.conn
	}
	return boundedReader{c}
}

// boundedReader reads a connection as long as its other side takes part in it.
type boundedReader struct{ c *server }

// Read implements io.Reader.
func (r boundedReader) Read(p []byte) (int, error) {
	if err := r.c.awaitRoom(); err != nil {
		return 0, err
	}
	for {
		if err := r.c.conn.SetReadDeadline(time.Now().Add(r.c.node.c.Bounds.Idle)); err != nil {
			return 0, err
		}
		n, err := r.c.conn.Read(p)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if r.c.isIdle() {
			return 0, errIdle
		}
	}
}

func (c *server) isIdle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls == 0
}

// awaitRoom waits while too many bytes of answers are queued.
func (c *server) awaitRoom() error {
	for {
		c.mu.Lock()
		if c.err != nil || len(c.queue) <= c.node.c.Bounds.Queued {
			defer c.mu.Unlock()
			return c.err
		}
		if c.room == nil {
			c.room = make(chan struct{})
		}
		room := c.room
		c.mu.Unlock()
		<-room // opened by the writer, which makes progress within a Timeout, or fails
	}
}
