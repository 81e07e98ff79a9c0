package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"codeq"
)

// BenchmarkQueues is Run with 128 workers over one queue and over 10,000 of them, with the same
// 1,000,000 tasks in all (200,000 with -short), which are there when it begins. The goal: the
// tasks/s over many queues are at least half of those over one.
func BenchmarkQueues(b *testing.B) {
	tasks := 1_000_000
	if testing.Short() {
		tasks = 200_000
	}
	for _, queues := range []int{1, 10_000} {
		b.Run(fmt.Sprint("queues=", queues), func(b *testing.B) {
			b.StopTimer()
			for range b.N {
				runQueues(b, queues, tasks)
			}
			b.ReportMetric(float64(b.N*tasks)/b.Elapsed().Seconds(), "tasks/s")
		})
	}
}

// runQueues works off tasks with Run. The tasks are spread over queues. The timer measures only
// Run.
func runQueues(b *testing.B, queues, tasks int) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	q, err := codeq.Open(b.TempDir(), &codeq.Options{Durability: codeq.DurabilityProcess})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := q.Close(); err != nil {
			b.Error(err)
		}
	}()
	m := new(codeq.Mux)
	var left atomic.Int64
	left.Store(int64(tasks))
	for i := range queues {
		codeq.Handle(m, fmt.Sprint("queue ", i), func(context.Context, *codeq.Job[[]byte]) error {
			if left.Add(-1) == 0 {
				cancel()
			}
			return nil
		})
	}
	for n := 0; n < tasks; {
		list := make([]codeq.Task, min(1000, tasks-n))
		for i := range list {
			list[i] = codeq.Task{Queue: fmt.Sprint("queue ", n%queues), Payload: payload}
			n++
		}
		if _, err := q.ProduceBatch(ctx, list); err != nil {
			b.Fatal(err)
		}
	}
	b.StartTimer()
	if err := q.Run(ctx, m, &codeq.RunOptions{Concurrency: workers}); err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	reportSteps(b, q)
}
