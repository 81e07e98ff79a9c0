package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"codeq/internal/base"
)

// The directory of a node may be an older copy of itself, which lacks what the node has
// acknowledged since. So both sides of a connection between members say the lives of their
// directories, and each refuses the other one if its Config.CheckLives does.

// MaxLives is how many lives a node says at most.
const MaxLives = 16

func livesLen(lives []uint64) int { return 1 + 8*len(lives) }

func appendLives(b []byte, lives []uint64) []byte {
	b = append(b, byte(len(lives)))
	for _, l := range lives {
		b = binary.BigEndian.AppendUint64(b, l)
	}
	return b
}

// SetLives replaces the lives that this node says, from the next connection on.
func (n *Node) SetLives(lives []uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lives = lives
}

func (n *Node) ownLives() []uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lives
}

// checkLives lets this node know the lives of the other side of a connection. A node that is
// introduced may be anybody, and older builds say nothing.
func (n *Node) checkLives(use byte, other Identity, lives []uint64) error {
	if use == useIntroduction || len(lives) == 0 {
		return nil
	}
	if err := n.c.CheckLives(other, lives); err != nil {
		return fmt.Errorf("peer: %s: %w", other, err)
	}
	return nil
}

// refusedCopy is the answer to a node whose lives this one has refused, if it is to be told.
func refusedCopy(err error) *RefusedError {
	if errors.Is(err, base.ErrOldCopy) {
		return &RefusedError{RefusedCopy, err.Error()}
	}
	return nil
}

// Greet makes a node know the lives of this one: it opens a connection, and closes it. It is not
// counted as a try to reach the node.
func (n *Node) Greet(ctx context.Context, to Target) error {
	c, err := n.tryConnect(ctx, to, header{use: useCalls})
	if err != nil {
		return err
	}
	return c.Close()
}
