package cluster

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRejoinedIsCommitted: a node is not taken back until its vote is committed: the change may be
// dropped again.
func TestRejoinedIsCommitted(t *testing.T) {
	n, other := openFollower(t)
	g := n.Group(0)
	require.True(t, n.votes())
	require.ErrorContains(t, n.askToRejoin(t.Context()), "nobody has taken this node back")
	require.True(t, sendEntries(t, g, other, 5, 2, entryOf(2, 5, 5, "")).Success)
	require.NoError(t, g.AwaitApplied(t.Context(), 2))
	require.NoError(t, n.askToRejoin(t.Context()))
}
