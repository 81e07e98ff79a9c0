package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
)

// The directory of a node may be an older copy of itself, which lacks later acknowledgements of the
// node; and two processes may have copies of one directory. So both sides of a connection between
// members send the incarnations of their directories, and the first incarnation of their processes.
// Each refuses the other one if its Config.CheckIncarnations does.

// MaxIncarnations is the largest number of incarnations that a node sends, with the first one of
// its process.
const MaxIncarnations = 16

// Incarnations are those of a node's directory.
type Incarnations struct {
	All   []uint64 // the last one is the current one, and the first one also represents all before it
	Birth uint64   // first incarnation of the process that has the directory open; 0: not sent
}

// said returns the incarnations as a node sends them. Its birth is the last one but one, and the
// first one still stands for those before.
func (l Incarnations) said() []uint64 {
	if l.Birth == 0 {
		return l.All
	}
	first, now := l.All[0], l.All[len(l.All)-1]
	if len(l.All) == 1 {
		return []uint64{first, l.Birth, now}
	}
	return slices.Insert(slices.Clone(l.All), len(l.All)-1, l.Birth)
}

// incarnationsOf is the inverse of said.
func incarnationsOf(said []uint64) Incarnations {
	if len(said) < 3 {
		return Incarnations{All: said}
	}
	at := len(said) - 2
	return Incarnations{slices.Delete(slices.Clone(said), at, at+1), said[at]}
}

func incarnationsLen(incarnations []uint64) int { return 1 + 8*len(incarnations) }

func appendIncarnations(b []byte, incarnations []uint64) []byte {
	b = append(b, byte(len(incarnations)))
	for _, l := range incarnations {
		b = binary.BigEndian.AppendUint64(b, l)
	}
	return b
}

// SetIncarnations replaces the incarnations that this node sends, from the next connection on.
func (n *Node) SetIncarnations(incarnations Incarnations) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.incarnations = incarnations
}

// ownIncarnations are the incarnations of this node, as it sends them.
func (n *Node) ownIncarnations() []uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.incarnations.said()
}

// ErrEarly is the error of a Config.CheckIncarnations that cannot decide yet: the other side may
// try again.
var ErrEarly = errors.New("peer: not known yet")

// checkIncarnations passes the incarnations of the other side of a connection to
// Config.CheckIncarnations. A node that is introduced may be anybody, and a node without an
// incarnation says nothing.
func (n *Node) checkIncarnations(ctx context.Context, c *conn, use byte, other Identity, incarnations Incarnations) error {
	if use == useIntroduction || len(incarnations.All) == 0 {
		return nil
	}
	ctx, stop := n.whileOpen(ctx, c)
	defer stop()
	if err := n.c.CheckIncarnations(ctx, other, incarnations); err != nil {
		return fmt.Errorf("peer: %s: %w", other, err)
	}
	return nil
}

// whileOpen returns a ctx that ends when the other side closes a connection, which must have no
// other reader. stop ends it; the connection has no deadline for reads then.
func (n *Node) whileOpen(ctx context.Context, c *conn) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	end := sync.OnceFunc(func() { close(watched) })
	watches := n.goUnlessClosed("watch of a handshake", func() {
		defer end()
		k, err := c.Conn.Read(c.first[:])
		c.early = c.first[:k]
		if err != nil {
			cancel()
		}
	}, func(error) { cancel(); end() })
	return ctx, func() {
		cancel()
		if watches {
			_ = c.SetReadDeadline(time.Unix(1, 0))
			<-watched
			_ = c.SetReadDeadline(time.Time{})
		}
	}
}

// refusedIncarnations is the answer to a node after this one has refused its incarnations; nil: no
// answer.
func refusedIncarnations(err error) *RefusedError {
	switch {
	case errors.Is(err, base.ErrOldCopy):
		return &RefusedError{RefusedCopy, err.Error()}
	case errors.Is(err, ErrEarly):
		return &RefusedError{RefusedEarly, err.Error()}
	}
	return nil
}

// Greet sends the incarnations of this node to another one: it opens a connection, and closes it.
// It does not count as an attempt to reach the node.
func (n *Node) Greet(ctx context.Context, to Target) error {
	c, err := n.tryConnect(ctx, to, header{use: useCalls})
	if err != nil {
		return err
	}
	return c.Close()
}

// Probe asks the process at an address for the ID of its directory, and its incarnations.
func (n *Node) Probe(ctx context.Context, to Target) (ID, Incarnations, error) {
	c, err := n.tryConnect(ctx, to, header{use: useIntroduction})
	if err != nil {
		return ID{}, Incarnations{}, err
	}
	return c.other, c.incarnations, c.Close()
}

// Admit ends the connections with processes that have a directory open and began before an
// incarnation, and refuses them from then on.
func (n *Node) Admit(id ID, birth uint64) {
	n.mu.Lock()
	n.admitted[id] = max(birth, n.admitted[id])
	var end []*conn
	for c := range n.conns {
		if c.use != 0 && n.precedes(c, id) {
			end = append(end, c)
		}
	}
	n.mu.Unlock()
	for _, c := range end {
		_ = c.Close()
	}
}

// Admitted is the birth of the last process that Admit has accepted for a directory; 0: none.
func (n *Node) Admitted(id ID) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.admitted[id]
}

// precedes reports whether the other side of a connection is a process with a directory that began
// before the admitted one. The other side of a connection without incarnations does not count.
// REQUIRES: mu is held.
func (n *Node) precedes(c *conn, id ID) bool {
	return c.use != useIntroduction && c.other == id && c.incarnations.Birth != 0 && c.incarnations.Birth < n.admitted[id]
}

// Hears asks the processes that have a directory open, and began before an incarnation, for an
// answer, over the open connections of calls. It returns the address of the first answer, or ends
// with ctx.
func (n *Node) Hears(ctx context.Context, id ID, before uint64) (from string, ok bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.mu.Lock()
	asked := make(map[*stream]string)
	for c := range n.conns {
		if s := c.stream; s != nil && c.other == id && c.incarnations.Birth < before {
			asked[s] = c.RemoteAddr().String()
		}
	}
	n.mu.Unlock()
	if len(asked) == 0 {
		return "", false
	}
	heard := make(chan string, len(asked))
	for s, at := range asked {
		n.goUnlessClosed("ping", func() {
			if s.answers(ctx) {
				heard <- at
				cancel()
			}
		}, func(error) {})
	}
	<-ctx.Done()
	select {
	case from = <-heard:
		return from, true
	default:
		return "", false
	}
}
