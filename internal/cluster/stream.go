package cluster

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// stream gives Raft the address under which others know this node, and connections with time for
// large messages.
type stream struct {
	raft.StreamLayer
	address string
	moved   func(to raft.ServerAddress) // progressBytes more of a large message have been sent
}

func (s stream) Addr() net.Addr { return advertised(s.address) }

// Dial implements raft.StreamLayer.
func (s stream) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	c, err := s.StreamLayer.Dial(address, timeout)
	if err != nil {
		return nil, &dialError{err}
	}
	return &patientConn{Conn: c, moved: func() { s.moved(address) }}, nil
}

// dialError is the reason why there is no connection.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

type advertised string

func (advertised) Network() string  { return "tcp" }
func (a advertised) String() string { return string(a) }

// patientConn is a connection that Raft has dialed. Raft gives each message, and its answer, a time
// that does not depend on its size. Here each progressBytes of a message may take as long as Raft
// allows for a message; the answer may take that long after the last of them, and the time of a
// slow disk for the message.
type patientConn struct {
	net.Conn
	moved func() // progressBytes more have been written

	mu          sync.Mutex // guards the fields below
	read, write time.Time  // deadlines; zero: there is none
	unanswered  int        // bytes written since bytes were read
	progress    int        // bytes written since the deadlines were moved
}

const (
	progressBytes = 256 << 10
	slowDisk      = 4 << 20 // bytes that a slow disk stores in a second
)

// SetDeadline implements net.Conn.
func (c *patientConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetWriteDeadline(t), c.SetReadDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *patientConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !t.IsZero() {
		t = t.Add(c.storing())
	}
	c.read = t
	return c.Conn.SetReadDeadline(t)
}

// SetWriteDeadline implements net.Conn.
func (c *patientConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write, c.progress = t, 0
	return c.Conn.SetWriteDeadline(t)
}

// storing is how long the other side may take to store the bytes without an answer so far.
// REQUIRES: mu is held.
func (c *patientConn) storing() time.Duration {
	return storing(c.unanswered)
}

// Read implements net.Conn.
func (c *patientConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.mu.Lock()
		c.unanswered = 0
		c.mu.Unlock()
	}
	return n, err
}

// Write implements net.Conn.
func (c *patientConn) Write(p []byte) (int, error) {
	for written := 0; ; {
		n, err := c.Conn.Write(p[written:min(len(p), written+progressBytes)])
		written += n
		if err == nil {
			err = c.advance(n)
		}
		if err != nil || written == len(p) {
			return written, err
		}
	}
}

// advance counts bytes as written.
func (c *patientConn) advance(bytes int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unanswered += bytes
	if c.progress += bytes; c.progress < progressBytes {
		return nil
	}
	c.progress = 0
	c.moved()
	var err error
	t := time.Now().Add(raftTimeout)
	if !c.write.IsZero() && c.write.Before(t) {
		c.write = t
		err = c.Conn.SetWriteDeadline(t)
	}
	if t = t.Add(c.storing()); !c.read.IsZero() && c.read.Before(t) {
		c.read = t
		err = errors.Join(err, c.Conn.SetReadDeadline(t))
	}
	return err
}
