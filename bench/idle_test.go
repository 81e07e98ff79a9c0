package bench

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// BenchmarkIdle is the cost of an idle open queue, in percent of one core: two shards, a waiting
// claim, a long lease and a scheduled task that is not due.
func BenchmarkIdle(b *testing.B) {
	q := newQueue(b, process(2))
	ctx, cancel := context.WithCancel(context.Background())
	for _, t := range []codeq.Task{{Queue: "leased"}, {Queue: "later", RunAt: time.Now().Add(time.Hour)}} {
		_, err := q.Produce(ctx, t)
		require.NoError(b, err)
	}
	_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"leased"}, LeaseFor: time.Hour})
	require.NoError(b, err)
	waiting := make(chan error)
	go func() {
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"later"}})
		waiting <- err
	}()
	reportIdle(b)
	cancel()
	require.ErrorIs(b, <-waiting, context.Canceled)
}

// BenchmarkIdleCluster is the cost of three idle nodes in one process, in percent of one core.
func BenchmarkIdleCluster(b *testing.B) {
	for _, shards := range []int{1, 3, 8, 32} {
		b.Run(fmt.Sprintf("shards=%d", shards), func(b *testing.B) {
			openCluster(b, b.TempDir(), codeq.Options{Shards: shards})
			reportIdle(b)
		})
	}
}

// reportIdle reports the processor time of the process, in percent of one core.
func reportIdle(b *testing.B) {
	time.Sleep(*warmup)
	stopProfiles := startProfiles(b)
	before, start := workload.ReadUsage().CPU, time.Now()
	time.Sleep(*window / 2)
	used, took := workload.ReadUsage().CPU-before, time.Since(start)
	stopProfiles()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(100*used.Seconds()/took.Seconds(), "%core")
}

// BenchmarkHandOff is the time from the call of Produce until a Claim that has
// been waiting returns with the task, on a queue that does nothing else.
func BenchmarkHandOff(b *testing.B) {
	for _, d := range durabilities {
		b.Run("durability="+d.String(), func(b *testing.B) {
			q := newQueue(b, codeq.Options{Durability: d})
			ctx := context.Background()
			claimed := make(chan time.Time)
			req := codeq.ClaimRequest{Queues: []string{queueName}}
			var took []time.Duration
			for end := time.Now().Add(*window / 10); time.Now().Before(end); {
				go func() {
					l, err := q.Claim(ctx, req)
					at := time.Now()
					if err != nil {
						b.Error(err)
					} else if err := q.Complete(ctx, l.Receipt, nil); err != nil {
						b.Error(err)
					}
					claimed <- at
				}()
				time.Sleep(time.Millisecond) // the claim waits, everything is idle
				start := time.Now()
				_, err := q.Produce(ctx, codeq.Task{Queue: queueName, Payload: payload})
				require.NoError(b, err)
				took = append(took, (<-claimed).Sub(start))
			}
			slices.Sort(took)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
		})
	}
}
