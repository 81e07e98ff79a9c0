package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// BenchmarkInfo is a dashboard that asks for all of 10,000 queues, or for one with 100,000 tenants.
// It reports the time of the first Info after Open, the time of a later one, and the times of the
// groups of a shard's owner during them: the 99.9th percentile and the longest. The longest may
// include a wait of the process for a processor.
func BenchmarkInfo(b *testing.B) {
	b.Run("queues", func(b *testing.B) {
		info(b, 10_000, func(n int) codeq.Task { return codeq.Task{Queue: fmt.Sprint("queue ", n), Payload: payload} })
	})
	b.Run("tenants", func(b *testing.B) {
		info(b, 100_000, func(n int) codeq.Task { return codeq.Task{Queue: queueName, Tenant: fmt.Sprint(n), Payload: payload} })
	})
}

func info(b *testing.B, n int, task func(n int) codeq.Task) {
	ctx, dir := context.Background(), b.TempDir()
	q := open(b, dir, process(0))
	fill(b, q, 1, n, 1000, task)
	require.NoError(b, q.Close())
	q = open(b, dir, process(0))
	ask := func() {
		_, err := q.Info(ctx)
		require.NoError(b, err)
	}
	begin := time.Now()
	ask()
	first := time.Since(begin)
	for b.Loop() {
		ask()
	}
	st, err := q.StorageStats()
	require.NoError(b, err)
	var most, longest time.Duration
	for i := range st.Shards {
		groups := &st.Shards[i].Upkeep[codeq.UpkeepGroup]
		most, longest = max(most, groups.Quantile(0.999)), max(longest, groups.Max)
	}
	b.ReportMetric(ms(first), "ms/first")
	b.ReportMetric(ms(most), "ms/p999-group")
	b.ReportMetric(ms(longest), "ms/longest-group")
}
