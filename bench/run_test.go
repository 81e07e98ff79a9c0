package bench

import (
	"testing"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkRun is 32 producers with ProduceBatch of 64 tasks, and Run with 128 workers. The handler
// does nothing. Producers wait for the workers, as a service with back-pressure does.
func BenchmarkRun(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		measure(b, workload.Load{Batch: batch, Backlog: 2 * producers * batch}, workload.Runner{Queues: []*codeq.Queue{q}})
	})
}

// BenchmarkBatchHandler is BenchmarkRun with a handler of batches of 100 tasks.
func BenchmarkBatchHandler(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		measure(b, workload.Load{Batch: batch, Backlog: 2 * producers * batch}, workload.Runner{Queues: []*codeq.Queue{q}, Batch: 100})
	})
}
