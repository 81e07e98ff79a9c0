package bench

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// TestFeatures: each feature leaves only its kept tasks, stocked or not.
func TestFeatures(t *testing.T) {
	for _, f := range workload.Features() {
		t.Run(f.Name, func(t *testing.T) {
			q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2, Durability: codeq.DurabilityNone})
			require.NoError(t, err)
			defer func() { require.NoError(t, q.Close()) }()
			l := workload.FeatureLoad{Feature: f, Queues: []*codeq.Queue{q}, Tasks: 2500, Workers: 16}
			for _, stocked := range []bool{true, false} {
				var before codeq.Counts
				r, err := l.Run(t.Context(), stocked, func() error {
					stats, err := q.Stats(t.Context())
					before = stats[workload.QueueName]
					return err
				})
				require.NoError(t, err)
				require.Equal(t, []int{l.Tasks, l.Tasks}, []int{r.Produced, r.Ended})
				require.Equal(t, stocked, before.Total() > uint64(l.First))
				l.First += l.Tasks
			}
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			var left codeq.Counts
			switch f.Name {
			case "kept":
				left.Done = uint64(l.First)
			case "dead":
				left.Dead = uint64(l.First)
			}
			require.Equal(t, left, stats[workload.QueueName])
		})
	}
}

func TestOfManyTasksTheFirstAreWorkedOff(t *testing.T) {
	l := workload.FeatureLoad{Feature: workload.FeatureNamed("plain"), Tasks: 10_000_000}
	require.Equal(t, 2_000_000, l.Worked())
	l.Whole = true
	require.Equal(t, l.Tasks, l.Worked())
	l.Whole, l.Feature = false, workload.FeatureNamed("retried")
	require.Equal(t, l.Tasks, l.Worked())
}
func TestClusterIsServedWhereShardsAreAtHome(t *testing.T) {
	const nodes = 3
	queues, err := workload.OpenCluster(t.Context(), t.TempDir(), nodes, codeq.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, workload.CloseAll(queues)) }()
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
	_, err := workload.OpenCluster(ctx, dir, 2, codeq.Options{})
	require.ErrorIs(t, err, context.Canceled)
	node := func(i int) string { return fmt.Sprintf("node-%02d", i) }
	for i := range 2 {
		q, err := codeq.Open(filepath.Join(dir, node(i)),
			&codeq.Options{Cluster: &codeq.Cluster{Node: node(i), Listen: freeAddress(t)}})
		require.NoError(t, err)
		require.NoError(t, q.Close())
	}
}

// freeAddress is an address without a listener.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}
