package bench

import (
	"testing"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkFullCycle is 32 producers and 128 workers that make single calls of
// Produce, Claim and Complete, each waiting for its own commit.
func BenchmarkFullCycle(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) { fullCycle(b, q) })
}

// fullCycle runs the cycle with callers on all queues.
func fullCycle(b *testing.B, queues ...*codeq.Queue) {
	measure(b, workload.Load{}, workload.Calls{Queues: queues})
}
