package peer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Bounds are what a Node lets those have that connect to it. Zero fields are no bounds.
type Bounds struct {
	Connections int // open at a time; who comes then is told so
	// Calls are those of one connection whose answers have not been written; more of them are
	// refused by CodeBusy.
	Calls int
	Body  int // bytes of a request's body; one that announces more ends its connection
	// Large is how many requests with a larger body than 64 KiB there may be, on all connections,
	// until they are answered: a connection is not read while it has one for which there is no
	// place.
	Large int
	// Queued is how many bytes of answers wait to be written with which a connection is not read.
	// If nothing can be written for a Timeout, it ends.
	Queued int
	// Idle is after how long a connection ends that brings nothing and waits for no answer.
	Idle time.Duration
}

// isBusy reports whether there are as many connections as may be.
func (n *Node) isBusy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	most := n.c.Bounds.Connections
	return most > 0 && len(n.conns) >= most
}

// turnAway tells whoever has connected that there are as many connections as may be. It waits for
// nobody: a few bytes fit into an empty connection.
func (n *Node) turnAway(raw net.Conn) {
	_ = raw.SetWriteDeadline(time.Now().Add(time.Second))
	text := fmt.Sprintf("there are %d connections, and no more are accepted", n.c.Bounds.Connections)
	_ = writeAnswer(raw, answer{}, &RefusedError{RefusedBusy, text})
	_ = raw.Close()
}

// count counts a request; false: there are more than may be.
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

// bounded returns what the reader of a connection reads.
func (c *server) bounded() io.Reader {
	if c.node.c.Bounds.Idle == 0 {
		return c.conn
	}
	return boundedReader{c}
}

// boundedReader reads a connection as long as its other side takes part in it.
type boundedReader struct{ c *server }

// Read is io.Reader's.
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
		<-room // opened by the writer, which gets on within a Timeout, or fails
	}
}
