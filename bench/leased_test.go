package bench

import (
	"context"
	"testing"
	"time"

	"codeq"
)

// BenchmarkLeased is Get and List beside 1,000,000 leases (100,000 with -short) of one
// queue, which come before 10,000 ready tasks of it: the time of a Get, of a List of
// the ready tasks, of one of a queue with ten leases, and of one of all leases.
func BenchmarkLeased(b *testing.B) {
	const ready = 10_000
	leases := 1_000_000
	if testing.Short() {
		leases = 100_000
	}
	ctx := context.Background()
	q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := q.Close(); err != nil {
			b.Error(err)
		}
	}()
	lease(b, q, "few", 10, false)
	lease(b, q, queueName, leases, false)
	ids := stock(b, q, queueName, ready)
	list := func(o codeq.ListOptions, want int) func(*testing.B) {
		return func(b *testing.B) {
			for b.Loop() {
				n := 0
				for _, err := range q.List(ctx, o) {
					if err != nil {
						b.Fatal(err)
					}
					n++
				}
				if n != want {
					b.Fatalf("%d tasks of %d", n, want)
				}
			}
		}
	}
	b.Run("Get", func(b *testing.B) {
		defer reportSteps(b, q) // of the leases, too
		i := 0
		for b.Loop() {
			if _, err := q.Get(ctx, ids[i%ready]); err != nil {
				b.Fatal(err)
			}
			i++
		}
	})
	b.Run("List/ready", list(codeq.ListOptions{State: codeq.Ready, Queue: queueName}, ready))
	b.Run("List/few", list(codeq.ListOptions{State: codeq.Leased, Queue: "few"}, 10))
	b.Run("List/leased", list(codeq.ListOptions{State: codeq.Leased, Queue: queueName}, leases))
}

// stock produces tasks.
func stock(b *testing.B, q *codeq.Queue, queue string, n int) (ids []codeq.ID) {
	for len(ids) < n {
		tasks := make([]codeq.Task, min(1000, n-len(ids)))
		for i := range tasks {
			tasks[i] = codeq.Task{Queue: queue, Payload: payload}
		}
		made, err := q.ProduceBatch(context.Background(), tasks)
		if err != nil {
			b.Fatal(err)
		}
		ids = append(ids, made...)
	}
	return ids
}

// BenchmarkLeasedEnd is 1,000,000 leases (100,000 with -short) that all end at once, since their
// process has ended. It reports the time from Open until all tasks are ready, and the time of
// single cycles of another queue during it.
func BenchmarkLeasedEnd(b *testing.B) {
	leases := 1_000_000
	if testing.Short() {
		leases = 100_000
	}
	for b.Loop() {
		dir := b.TempDir()
		q := open(b, dir)
		lease(b, q, queueName, leases, true)
		if err := q.Close(); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		q = open(b, dir)
		took, cycles, worst := untilReady(b, q, leases, start)
		b.ReportMetric(took.Seconds(), "s-until-ready")
		b.ReportMetric(float64(leases)/took.Seconds(), "ready/s")
		b.ReportMetric(float64(cycles), "other-cycles")
		b.ReportMetric(float64(worst.Microseconds())/1e3, "other-cycle-max-ms")
		reportSteps(b, q)
		if err := q.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// lease produces tasks and claims them, for a day or, if local, until the queue is closed.
func lease(b *testing.B, q *codeq.Queue, queue string, n int, local bool) {
	for left := n; left > 0; {
		batch := min(1000, left)
		stock(b, q, queue, batch)
		for batch > 0 {
			got, err := q.ClaimBatch(context.Background(), codeq.ClaimRequest{
				Queues: []string{queue}, Max: batch, LeaseFor: 24 * time.Hour, Local: local,
			})
			if err != nil {
				b.Fatal(err)
			}
			batch -= len(got)
			left -= len(got)
		}
	}
}
