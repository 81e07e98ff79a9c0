package cluster

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
)

// TestAdoptedNodeFoundsNothing: a node that another cluster has adopted while it was about to begin
// one does not begin that when it is opened again.
func TestAdoptedNodeFoundsNothing(t *testing.T) {
	n := newLoneNode(t, crashfs.New(), filepath.Join(t.TempDir(), "votes"), &notes{})
	defer func() { require.NoError(t, n.c.Listener.Close()) }()
	n.c.Directory.Cluster = manifest.NewID()
	require.ErrorIs(t, n.begin(n.founders()), base.ErrNotMember)
	require.Empty(t, n.c.Directory.Founders)
}
