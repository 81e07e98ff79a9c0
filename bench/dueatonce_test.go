package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

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
	ctx := context.Background()
	var skew atomic.Int64
	opts := &codeq.Options{Shards: shards, Durability: codeq.DurabilityProcess}
	inspect.Options(opts).Wall = func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
	q, err := codeq.Open(b.TempDir(), opts)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		reportSteps(b, q)
		if err := q.Close(); err != nil {
			b.Error(err)
		}
	}()
	due := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	size := min(1000, max(1, (4<<20)/bytes))
	for n := 0; n < tasks; n += size {
		all := make([]codeq.Task, min(size, tasks-n))
		for i := range all {
			all[i] = codeq.Task{Queue: queueName, Payload: make([]byte, bytes), RunAt: due}
		}
		if _, err := q.ProduceBatch(ctx, all); err != nil {
			b.Fatal(err)
		}
	}
	skew.Store(int64(time.Hour))
	stopProfiles := startProfiles(b)
	start := time.Now()
	took, cycles, worst := untilReady(b, q, tasks, start)
	start = time.Now()
	for taken := 0; taken < tasks; {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{queueName}, Max: 256, NoWait: true})
		if err != nil {
			b.Fatal(err)
		}
		taken += len(leases)
	}
	claims := time.Since(start)
	stopProfiles()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(took.Seconds(), "s-until-ready")
	b.ReportMetric(float64(tasks)/took.Seconds(), "ready/s")
	b.ReportMetric(float64(tasks)/claims.Seconds(), "claims/s")
	b.ReportMetric(float64(cycles), "other-cycles")
	b.ReportMetric(float64(worst.Microseconds())/1e3, "other-cycle-max-ms")
}

// untilReady does single cycles of another queue until all tasks are ready. It returns the time
// from start until then, the number of cycles, and the time of the longest one.
func untilReady(b *testing.B, q *codeq.Queue, tasks int, start time.Time) (took time.Duration, cycles int, worst time.Duration) {
	for {
		begin := time.Now()
		cycleOther(b, q)
		cycles, worst = cycles+1, max(worst, time.Since(begin))
		stats, err := q.Stats(context.Background())
		if err != nil {
			b.Fatal(err)
		}
		if stats[queueName].Ready == uint64(tasks) {
			return time.Since(start), cycles, worst
		}
	}
}

// cycleOther produces, claims and completes one task of another queue.
func cycleOther(b *testing.B, q *codeq.Queue) {
	ctx := context.Background()
	if _, err := q.Produce(ctx, codeq.Task{Queue: "other", Payload: payload}); err != nil {
		b.Fatal(err)
	}
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"other"}})
	if err != nil {
		b.Fatal(err)
	}
	if err := q.Complete(ctx, l.Receipt, nil); err != nil {
		b.Fatal(err)
	}
}
