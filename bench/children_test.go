package bench

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// BenchmarkChildren measures the children of one task that exists already: 3,000 children from one
// call each, until they are ready after the parent's end; and 300,000 (30,000 with -short) from the
// parent's end until all are ready.
func BenchmarkChildren(b *testing.B) {
	told := 300_000
	if testing.Short() {
		told = 30_000
	}
	b.Run("produce", func(b *testing.B) { benchChildren(b, 3000, 1, false) })
	b.Run("tell", func(b *testing.B) { benchChildren(b, told, 1000, true) })
}

func benchChildren(b *testing.B, children, batch int, tell bool) {
	ctx := context.Background()
	q := newQueue(b, process(1))
	defer reportSteps(b, q)
	ready := func() uint64 {
		stats, err := q.Stats(ctx)
		require.NoError(b, err)
		return stats["child"].Ready
	}
	for b.Loop() {
		b.StopTimer()
		parent, err := q.Produce(ctx, codeq.Task{Queue: "parent", Payload: payload})
		require.NoError(b, err)
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"parent"}, LeaseFor: time.Hour})
		require.NoError(b, err)
		before := ready()
		if !tell {
			b.StartTimer()
		}
		fill(b, q, 1, children, batch, func(int) codeq.Task {
			return codeq.Task{Queue: "child", Payload: payload, After: []codeq.ID{parent}}
		})
		if tell {
			b.StartTimer()
		}
		require.NoError(b, q.Complete(ctx, l.Receipt, nil))
		for ready() < before+uint64(children) {
			time.Sleep(time.Millisecond)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*children), "ns/child")
}
