package cluster

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/peer"
)

// TestTriesOfClosingNode: a call that a closing node no longer sends is ErrClosed, unless an
// earlier try may have been applied, or the node was removed.
func TestTriesOfClosingNode(t *testing.T) {
	ctx := context.Background()
	closing, cancel := context.WithCancel(ctx)
	cancel()
	notSent := fmt.Errorf("%w: %w: %w", base.ErrNotLeader, peer.ErrNotSent, peer.ErrClosed)
	lost := fmt.Errorf("%w: %w", base.ErrUncertain, peer.ErrLost)
	n := &Node{ctx: closing}
	n.removal.certain.Store(true)
	removed := n.removedError(0)
	for _, c := range []struct {
		name  string
		tries Tries
		err   error
		want  error
	}{
		{"not sent", Tries{}, notSent, base.ErrClosed},
		{"a read not sent", Tries{Reads: true}, notSent, base.ErrClosed},
		{"a read without a reply", Tries{Reads: true}, lost, base.ErrClosed},
		{"a read not sent after no reply", Tries{Reads: true, doubt: lost}, notSent, base.ErrClosed},
		{"no reply", Tries{}, lost, lost},
		{"not sent after no reply", Tries{doubt: lost}, notSent, lost},
		{"removed", Tries{}, removed, removed},
	} {
		c.tries.Group = &Group{node: n}
		again, err := c.tries.Failed(ctx, c.err, true, nil)
		require.False(t, again, c.name)
		require.Equal(t, c.want, err, c.name)
	}
}
