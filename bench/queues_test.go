package bench

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// BenchmarkIdleQueues is the cost of 1,000,000 queues (100,000 with -short): emptied, after each
// has had a task, and stocked, while each has one. It reports the heap for each queue, the time of
// a Stats, the longest wait of a produce beside it, the time of Open, and the time from Open to the
// first claimed task.
func BenchmarkIdleQueues(b *testing.B) {
	queues := 1_000_000
	if testing.Short() {
		queues = 100_000
	}
	b.Run("emptied", func(b *testing.B) { idleQueues(b, queues, true) })
	b.Run("stocked", func(b *testing.B) { idleQueues(b, queues, false) })
}

func idleQueues(b *testing.B, queues int, empty bool) {
	ctx := context.Background()
	for b.Loop() {
		dir := b.TempDir()
		before := heapBytes()
		q := open(b, dir, process(0))
		begin := time.Now()
		const batch = 1000
		for n := 0; n < queues; n += batch {
			name := func(i int) string { return fmt.Sprint("queue ", n+i) }
			fill(b, q, 1, batch, batch, func(i int) codeq.Task { return codeq.Task{Queue: name(i), Payload: payload} })
			for i := 0; empty && i < batch; i++ {
				complete(b, q, name(i))
			}
		}
		b.ReportMetric(float64(time.Since(begin).Microseconds())/float64(queues), "us/queue")
		b.ReportMetric(float64(heapBytes()-before)/float64(queues), "B/queue")

		stock(b, q, "beside", 1)
		during, stop := context.WithCancel(ctx)
		beside := produceBeside(during, q)
		begin = time.Now()
		_, err := q.Stats(ctx)
		require.NoError(b, err)
		b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/Stats")
		stop()
		waited := <-beside
		b.ReportMetric(ms(waited.Quantile(1)), "ms/produce-beside")
		reopen(b, q, dir, "beside")
	}
}

// BenchmarkLeasedOpen opens a queue with 1,000,000 long leases (100,000 with -short), and claims
// the first task behind them.
func BenchmarkLeasedOpen(b *testing.B) {
	leases := 1_000_000
	if testing.Short() {
		leases = 100_000
	}
	for b.Loop() {
		dir := b.TempDir()
		q := open(b, dir, process(0))
		lease(b, q, queueName, leases, false)
		stock(b, q, queueName, 1)
		reopen(b, q, dir, queueName)
	}
}

// reopen closes a queue, opens it, and claims a task.
func reopen(b *testing.B, q *codeq.Queue, dir, queue string) {
	require.NoError(b, q.Close())
	begin := time.Now()
	q = open(b, dir, process(0))
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/Open")
	complete(b, q, queue)
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/first-claim")
	reportSteps(b, q)
	require.NoError(b, q.Close())
}

// heapBytes is the memory in use.
func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
