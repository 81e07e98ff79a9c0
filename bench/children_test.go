package bench

import (
	"context"
	"testing"
	"time"

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
	q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		reportSteps(b, q)
		if err := q.Close(); err != nil {
			b.Error(err)
		}
	}()
	for b.Loop() {
		b.StopTimer()
		parent := stock(b, q, "parent", 1)[0]
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"parent"}, LeaseFor: time.Hour})
		if err != nil {
			b.Fatal(err)
		}
		before := countOf(b, q, "child")
		if !tell {
			b.StartTimer()
		}
		for n := 0; n < children; n += batch {
			tasks := make([]codeq.Task, batch)
			for i := range tasks {
				tasks[i] = codeq.Task{Queue: "child", Payload: payload, After: []codeq.ID{parent}}
			}
			if _, err := q.ProduceBatch(ctx, tasks); err != nil {
				b.Fatal(err)
			}
		}
		if tell {
			b.StartTimer()
		}
		if err := q.Complete(ctx, l.Receipt, nil); err != nil {
			b.Fatal(err)
		}
		for countOf(b, q, "child").Ready < before.Ready+uint64(children) {
			time.Sleep(time.Millisecond)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*children), "ns/child")
}

func countOf(b *testing.B, q *codeq.Queue, queue string) codeq.Counts {
	stats, err := q.Stats(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	return stats[queue]
}
