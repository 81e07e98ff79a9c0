package bench

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkSteps is a Run with 128 workers, whose handlers do ten steps each, with results of 64
// bytes, and produce the next task. It reports, beside the allocations,
//
//	steps/s      stored steps
//	cpu-us/step  processor time of a step, with its share of the task
func BenchmarkSteps(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		const each = 10
		result := make([]byte, 64)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var steps atomic.Int64
		var m codeq.Mux
		codeq.Handle(&m, queueName, func(ctx context.Context, j *codeq.Job[[]byte]) error {
			for i := range each {
				if _, err := codeq.Step(ctx, stepNames[i], func(context.Context) ([]byte, error) { return result, nil }); err != nil {
					return err
				}
				steps.Add(1)
			}
			j.FollowUp(codeq.Task{Queue: queueName, Payload: j.Args})
			return nil
		})
		stock(b, q, queueName, 2*workers)
		ran := make(chan error, 1)
		go func() { ran <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: workers, Grace: time.Second}) }()
		time.Sleep(*warmup)
		n, usage, begun := steps.Load(), workload.ReadUsage(), time.Now()
		time.Sleep(*window)
		took, done, used := time.Since(begun), float64(steps.Load()-n), workload.ReadUsage().Since(usage)
		cancel()
		require.NoError(b, <-ran)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(done/took.Seconds(), "steps/s")
		b.ReportMetric(float64(used.CPU.Microseconds())/done, "cpu-us/step")
	})
}

var stepNames = [...]string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
