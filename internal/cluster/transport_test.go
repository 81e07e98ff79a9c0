package cluster

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// TestFailedReplicaSendsNothing: what it has read of its log may not be what is there.
func TestFailedReplicaSendsNothing(t *testing.T) {
	g := loneGroup(vfs.NewMem(), nil)
	g.broken.Store(&errBroken)
	tr := &transport{group: g}
	require.ErrorIs(t, tr.AppendEntries("a", "a", new(raft.AppendEntriesRequest), nil), errBroken)
	p := newPipeline(newFakePipeline(0), g)
	_, err := p.AppendEntries(new(raft.AppendEntriesRequest), new(raft.AppendEntriesResponse))
	require.ErrorIs(t, err, errBroken)
	require.NoError(t, p.Close())
}
