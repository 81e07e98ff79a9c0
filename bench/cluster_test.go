package bench

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkCluster is BenchmarkFullCycle on three nodes in one process, which
// talk over TCP loopback: the producers and workers are spread over the nodes.
func BenchmarkCluster(b *testing.B) {
	forEachCluster(b, func(b *testing.B, queues []*codeq.Queue) { fullCycle(b, queues...) })
}

// BenchmarkClusterRun is BenchmarkRun on three nodes, each with a Run of its own.
func BenchmarkClusterRun(b *testing.B) {
	forEachCluster(b, func(b *testing.B, queues []*codeq.Queue) {
		measure(b, workload.Load{Batch: batch, Backlog: 2 * producers * batch}, workload.Runner{Queues: queues})
	})
}

// forEachCluster runs f on three nodes at two durabilities, with one shard and with three.
func forEachCluster(b *testing.B, f func(b *testing.B, queues []*codeq.Queue)) {
	for _, d := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		for _, shards := range []int{1, 3} {
			b.Run(fmt.Sprintf("nodes=3/durability=%v/shards=%d", d, shards), func(b *testing.B) {
				f(b, openCluster(b, b.TempDir(), codeq.Options{Durability: d, Shards: shards}))
			})
		}
	}
}

// openCluster opens three nodes below a directory, until the end of the benchmark.
func openCluster(b *testing.B, dir string, opts codeq.Options) []*codeq.Queue {
	queues, err := workload.OpenCluster(context.Background(), dir, 3, opts)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, workload.CloseAll(queues)) })
	return queues
}
