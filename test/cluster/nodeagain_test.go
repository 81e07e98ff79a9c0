package cluster_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestNodeAgain: a directory becomes a node, then a queue by itself, then a node again, with all
// its tasks and files.
func TestNodeAgain(t *testing.T) {
	t.Parallel()
	ctx, dir := context.Background(), t.TempDir()
	open := func(name string) *codeq.Queue {
		o := &codeq.Options{Shards: 1}
		if name != "" {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			o.Cluster = &codeq.Cluster{Node: name, Listener: l, HeartbeatTimeout: 50 * time.Millisecond}
		}
		q, err := codeq.Open(dir, o)
		require.NoError(t, err)
		return q
	}
	for n, name := range []string{"", "a", "", "b", "", "a"} {
		q := open(name)
		if name != "" {
			require.NoError(t, q.WaitReady(ctx))
		}
		_, err := q.Produce(ctx, codeq.Task{Queue: "mail"})
		require.NoError(t, err)
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.EqualValues(t, n+1, stats["mail"].Ready)
		require.NoError(t, q.Close())
		report, err := codeq.Verify(dir, nil)
		require.NoError(t, err)
		require.Empty(t, report.Problems)
	}
}
