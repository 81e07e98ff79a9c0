package codeq_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestNoCluster: a queue by itself is no cluster, nor its directory that of a node beside others.
func TestNoCluster(t *testing.T) {
	dir := t.TempDir()
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	_, err = q.ClusterStatus(t.Context())
	require.ErrorIs(t, err, codeq.ErrNoCluster)
	require.ErrorIs(t, q.AddNode(t.Context(), codeq.Peer{"a", "b"}), codeq.ErrNoCluster)
	require.ErrorIs(t, q.RemoveNode(t.Context(), "a"), codeq.ErrNoCluster)
	require.ErrorIs(t, q.TransferLeadership(t.Context(), 0, "a"), codeq.ErrNoCluster)
	require.ErrorIs(t, q.Drain(t.Context()), codeq.ErrNoCluster)
	require.ErrorIs(t, q.Undrain(t.Context()), codeq.ErrNoCluster)
	require.NoError(t, q.Close())
	_, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:1", Peers: []codeq.Peer{{"b", "b:1"}}}})
	require.ErrorIs(t, err, codeq.ErrNotMember)
	require.ErrorIs(t, codeq.RecoverCluster(dir, nil), codeq.ErrNoCluster)
}
