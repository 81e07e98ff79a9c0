package bench

import (
	"context"
	"fmt"
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
	q := newQueue(b, process(0))
	names := make([]string, queues)
	for i := range names {
		names[i] = fmt.Sprint("queue ", i)
	}
	fill(b, q, 1, tasks, 1000, func(i int) codeq.Task { return codeq.Task{Queue: names[i%queues], Payload: payload} })
	b.StartTimer()
	workOff(context.Background(), b, q, names, tasks, func(int, *codeq.Job[[]byte]) {})
	b.StopTimer()
	reportSteps(b, q)
}
