package cluster_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestNothingLeftOfNode is TestNothingLeft for nodes of a cluster, and their sockets.
func TestNothingLeftOfNode(t *testing.T) {
	before := testkit.WatchLeaks()
	t.Run("nodes", func(t *testing.T) {
		q := threeNodes(t, codeq.Options{Durability: codeq.DurabilityNone}, nil)[1]
		wait := queuetest.UseEverything(t, q)
		require.NoError(t, q.Close())
		wait()
	})
	before.Require(t, "after a cluster")
}
