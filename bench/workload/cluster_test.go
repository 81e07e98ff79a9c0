package workload

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

func TestClusterIsServedWhereShardsAreAtHome(t *testing.T) {
	const nodes = 3
	queues, err := OpenCluster(t.Context(), t.TempDir(), nodes, codeq.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, CloseAll(queues)) }()
	require.Len(t, queues, nodes)
	for _, q := range queues {
		st, err := q.ClusterStatus(t.Context())
		require.NoError(t, err)
		require.Len(t, st.Shards, nodes, "the default")
		for _, sh := range st.Shards {
			require.Equal(t, fmt.Sprint("node-0", sh.Shard), sh.Leader)
		}
	}
}

func TestClusterThatIsGivenUpIsClosed(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	_, err := OpenCluster(ctx, dir, 2, codeq.Options{})
	require.ErrorIs(t, err, context.Canceled)
	for i := range 2 {
		q, err := codeq.Open(filepath.Join(dir, nodeName(i)),
			&codeq.Options{Cluster: &codeq.Cluster{Node: nodeName(i), Listen: freeAddress(t)}})
		require.NoError(t, err)
		require.NoError(t, q.Close())
	}
}

// freeAddress is an address at which nobody listens.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}
