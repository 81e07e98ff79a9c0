package cluster_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestClusterStorageStats: every node has its replicas, and only Raft's log.
func TestClusterStorageStats(t *testing.T) {
	t.Parallel()
	qs := threeNodes(t, codeq.Options{Shards: 1}, nil)
	_, err := qs[0].Produce(t.Context(), codeq.Task{Queue: "a", Payload: make([]byte, 1000)})
	require.NoError(t, err)
	for _, q := range qs {
		st, err := q.StorageStats()
		require.NoError(t, err)
		require.Len(t, st.Shards, 1)
		require.Positive(t, st.FreeBytes)
		require.Positive(t, st.Shards[0].DiskBytes)
		require.Positive(t, st.Shards[0].MemTableBytes)
		require.Zero(t, st.Shards[0].LogBytes)
		require.Zero(t, st.Shards[0].LoggedBytes)
	}
}
