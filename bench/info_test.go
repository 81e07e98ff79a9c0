package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"codeq"
)

// BenchmarkInfo is a dashboard that asks for all of 10,000 queues, or for one with 100,000 tenants.
// It reports the time of the first Info after Open, the time of a later one, and the times of the
// groups of a shard's owner during them: the 99.9th percentile and the longest. The longest may
// include a wait of the process for a processor.
func BenchmarkInfo(b *testing.B) {
	b.Run("queues", func(b *testing.B) {
		info(b, 10_000, func(n int) codeq.Task { return codeq.Task{Queue: fmt.Sprint("queue ", n)} })
	})
	b.Run("tenants", func(b *testing.B) {
		info(b, 100_000, func(n int) codeq.Task { return codeq.Task{Queue: queueName, Tenant: fmt.Sprint(n)} })
	})
}

func info(b *testing.B, n int, task func(n int) codeq.Task) {
	ctx, dir := context.Background(), b.TempDir()
	q := open(b, dir)
	const batch = 1000
	for first := 0; first < n; first += batch {
		tasks := make([]codeq.Task, batch)
		for i := range tasks {
			tasks[i] = task(first + i)
			tasks[i].Payload = payload
		}
		if _, err := q.ProduceBatch(ctx, tasks); err != nil {
			b.Fatal(err)
		}
	}
	if err := q.Close(); err != nil {
		b.Fatal(err)
	}
	q = open(b, dir)
	ask := func() {
		if _, err := q.Info(ctx); err != nil {
			b.Fatal(err)
		}
	}
	begin := time.Now()
	ask()
	first := time.Since(begin)
	for b.Loop() {
		ask()
	}
	st, err := q.StorageStats()
	if err != nil {
		b.Fatal(err)
	}
	var most, longest time.Duration
	for i := range st.Shards {
		groups := &st.Shards[i].Upkeep[codeq.UpkeepGroup]
		most, longest = max(most, groups.Quantile(0.999)), max(longest, groups.Max)
	}
	b.ReportMetric(float64(first.Microseconds())/1e3, "ms/first")
	b.ReportMetric(float64(most.Microseconds())/1e3, "ms/p999-group")
	b.ReportMetric(float64(longest.Microseconds())/1e3, "ms/longest-group")
}
