package bench

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

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
		q := open(b, dir)
		begin := time.Now()
		const batch = 1000
		for n := 0; n < queues; n += batch {
			tasks := make([]codeq.Task, batch)
			for i := range tasks {
				tasks[i] = codeq.Task{Queue: fmt.Sprint("queue ", n+i), Payload: payload}
			}
			if _, err := q.ProduceBatch(ctx, tasks); err != nil {
				b.Fatal(err)
			}
			for i := 0; empty && i < batch; i++ {
				complete(b, q, tasks[i].Queue)
			}
		}
		b.ReportMetric(float64(time.Since(begin).Microseconds())/float64(queues), "us/queue")
		b.ReportMetric(float64(heapBytes()-before)/float64(queues), "B/queue")

		var longest atomic.Int64
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
				}
				begin := time.Now()
				if _, err := q.Produce(ctx, codeq.Task{Queue: "beside"}); err != nil {
					b.Error(err)
					return
				}
				longest.Store(max(longest.Load(), int64(time.Since(begin))))
			}
		}()
		begin = time.Now()
		if _, err := q.Stats(ctx); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/Stats")
		close(stop)
		<-stopped
		b.ReportMetric(float64(longest.Load())/1e6, "ms/produce-beside")
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
		q := open(b, dir)
		lease(b, q, queueName, leases, false)
		stock(b, q, queueName, 1)
		reopen(b, q, dir, queueName)
	}
}

// reopen closes a queue, opens it, and claims a task.
func reopen(b *testing.B, q *codeq.Queue, dir, queue string) {
	if err := q.Close(); err != nil {
		b.Fatal(err)
	}
	begin := time.Now()
	q = open(b, dir)
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/Open")
	complete(b, q, queue)
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/first-claim")
	reportSteps(b, q)
	if err := q.Close(); err != nil {
		b.Fatal(err)
	}
}

// complete claims a task and ends it.
func complete(b *testing.B, q *codeq.Queue, queue string) {
	ctx := context.Background()
	l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
	if err == nil {
		err = q.Complete(ctx, l.Receipt, nil)
	}
	if err != nil {
		b.Fatal(err)
	}
}

// heapBytes is the memory in use.
func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
