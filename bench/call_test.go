package bench

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkCall is a Run with 128 workers, and 128 callers of Call, which take the results of 64
// bytes. It reports, beside the allocations,
//
//	calls/s      tasks that were produced, handled and answered
//	ms/call      mean time of a call
//	cpu-us/call  processor time of a call
func BenchmarkCall(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		result := make([]byte, 64)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var m codeq.Mux
		codeq.Handle(&m, queueName, func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.SetResult(result)
			return nil
		})
		ran := make(chan error, 1)
		go func() { ran <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: workers, Grace: time.Second}) }()
		call := func() error {
			_, err := codeq.Call[[]byte](ctx, q, codeq.Task{Queue: queueName, Payload: payload})
			return err
		}
		count := func(d time.Duration) (n int64, took time.Duration) {
			var calls [workers]int64
			var g errgroup.Group
			begun := time.Now()
			for c := range calls {
				g.Go(func() error {
					for ; time.Since(begun) < d; calls[c]++ {
						if err := call(); err != nil {
							return err
						}
					}
					return nil
				})
			}
			require.NoError(b, g.Wait())
			for _, of := range calls {
				n += of
			}
			return n, time.Since(begun)
		}
		count(*warmup)
		usage := workload.ReadUsage()
		n, took := count(*window)
		used := workload.ReadUsage().Since(usage)
		cancel()
		require.NoError(b, <-ran)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(n)/took.Seconds(), "calls/s")
		b.ReportMetric(took.Seconds()*1000*workers/float64(n), "ms/call")
		b.ReportMetric(float64(used.CPU.Microseconds())/float64(n), "cpu-us/call")
	})
}
