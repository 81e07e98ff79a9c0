package bench

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"codeq"
)

// BenchmarkEvents is FullCycle with one subscription that reads every event.
func BenchmarkEvents(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		sub, err := q.Subscribe(codeq.SubscribeOptions{Buffer: 1 << 16})
		if err != nil {
			b.Fatal(err)
		}
		var read atomic.Int64
		var reader sync.WaitGroup
		reader.Go(func() {
			for _, err := range sub.All(context.Background()) {
				if err != nil {
					return
				}
				read.Add(1)
			}
		})
		fullCycle(b, q)
		sub.Close()
		reader.Wait()
		b.ReportMetric(float64(sub.Lost())/float64(max(read.Load(), 1)), "lost/read")
	})
}
