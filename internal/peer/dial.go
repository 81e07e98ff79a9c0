package peer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq/internal/base"
)

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
	h.groups, h.from = uint32(n.c.Groups), n.identity()
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
// may answer late (CheckIncarnations).
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
	h.formats, h.incarnations = n.say(c), n.ownIncarnations()
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
	incarnations := incarnationsOf(a.incarnations)
	if err := n.checkIncarnations(ctx, c, h.use, got, incarnations); err != nil {
		return err
	}
	if _, refused := n.agree(c, h.use, got, a.formats, incarnations); refused != nil {
		return refused
	}
	return nil
}
