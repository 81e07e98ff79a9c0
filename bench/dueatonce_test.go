package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
)

// BenchmarkDueAtOnce stores tasks that are all due at one millisecond. It measures the time from
// then until all are ready, and the time of single cycles of another queue during it. Then one
// worker takes all of them.
func BenchmarkDueAtOnce(b *testing.B) {
	for _, load := range []struct{ tasks, bytes int }{{1_000_000, 100}, {10_000, 64 << 10}} {
		for _, shards := range []int{1, 2} {
			tasks := load.tasks
			if testing.Short() {
				tasks /= 20
			}
			b.Run(fmt.Sprintf("tasks=%d/bytes=%d/shards=%d", tasks, load.bytes, shards), func(b *testing.B) {
				dueAtOnce(b, tasks, load.bytes, shards)
			})
		}
	}
}

func dueAtOnce(b *testing.B, tasks, bytes, shards int) {
	var skew atomic.Int64
	opts := process(shards)
	inspect.Options(&opts).Wall = func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
	q := newQueue(b, opts)
	defer reportSteps(b, q)
	due := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	fill(b, q, 1, tasks, min(1000, max(1, (4<<20)/bytes)), func(int) codeq.Task {
		return codeq.Task{Queue: queueName, Payload: make([]byte, bytes), RunAt: due}
	})
	skew.Store(int64(time.Hour))
	defer startProfiles(b)()
	untilReady(b, q, tasks, time.Now())
	start := time.Now()
	for taken := 0; taken < tasks; {
		leases, err := q.ClaimBatch(context.Background(), codeq.ClaimRequest{Queues: []string{queueName}, Max: 256, NoWait: true})
		require.NoError(b, err)
		taken += len(leases)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(tasks)/time.Since(start).Seconds(), "claims/s")
}

// untilReady does single cycles of another queue until all tasks are ready. It reports the time
// from start until then, and the number and the longest time of the cycles.
func untilReady(b *testing.B, q *codeq.Queue, tasks int, start time.Time) {
	cycles, worst := 0, time.Duration(0)
	for ready := uint64(0); ready < uint64(tasks); cycles++ {
		begin := time.Now()
		_, err := q.Produce(context.Background(), codeq.Task{Queue: "other", Payload: payload})
		require.NoError(b, err)
		complete(b, q, "other")
		worst = max(worst, time.Since(begin))
		stats, err := q.Stats(context.Background())
		require.NoError(b, err)
		ready = stats[queueName].Ready
	}
	took := time.Since(start)
	b.ReportMetric(took.Seconds(), "s-until-ready")
	b.ReportMetric(float64(tasks)/took.Seconds(), "ready/s")
	b.ReportMetric(float64(cycles), "other-cycles")
	b.ReportMetric(ms(worst), "other-cycle-max-ms")
}
