package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"
)

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
		incarnations := incarnationsOf(h.incarnations)
		if err := n.checkDialer(c, h, incarnations); err != nil {
			if refused = refusedIncarnations(err); refused == nil {
				return h, err
			}
			break
		}
		formats, refused = n.agree(c, h.use, h.from, h.formats, incarnations)
	}
	self := n.identity()
	if err := writeAnswer(c, answer{self.Cluster, self.ID, formats, n.ownIncarnations()}, refused); err != nil {
		return h, fmt.Errorf("peer: answer header: %w", err)
	}
	if refused != nil {
		return h, refused
	}
	return h, c.SetDeadline(time.Time{})
}

// checkDialer is checkIncarnations for a dialer, which waits for the answer: so it is bounded by
// Timeout/2.
func (n *Node) checkDialer(c *conn, h header, incarnations Incarnations) error {
	ctx, cancel := context.WithTimeout(n.ctx, n.c.Timeout/2)
	defer cancel()
	return n.checkIncarnations(ctx, c, h.use, h.from, incarnations)
}

// refusal is the reason why a connection is not accepted; nil: it is.
func (n *Node) refusal(c *conn, h header) *RefusedError {
	self := n.identity()
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
