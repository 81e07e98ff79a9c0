package cluster

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/guard"
)

// TestRecoverOfBrokenNode: a node whose log cannot be applied says why.
func TestRecoverOfBrokenNode(t *testing.T) {
	disk, votes := vfs.NewMem(), filepath.Join(t.TempDir(), "votes")
	require.NoError(t, disk.MkdirAll("dir", 0o700))
	n := newLoneNode(t, disk, votes, new(notes))
	require.NoError(t, n.Open())
	r := n.Group(0).raft
	require.Eventually(t, func() bool { return r.VerifyLeader().Error() == nil }, 10*time.Second, time.Millisecond)
	require.NoError(t, r.Apply(entryOf(0, 0, r.CurrentTerm(), "an entry").Data, 0).Error())
	require.NoError(t, n.Close())

	guard.Observe(func(what string, value any, _ []byte) { t.Errorf("panic in %s: %v", what, value) })
	defer guard.Observe(nil)
	require.ErrorIs(t, newLoneNode(t, disk, votes, &notes{err: errBroken}).Recover(), errBroken)
}
