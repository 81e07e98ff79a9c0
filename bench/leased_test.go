package bench

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	q := newQueue(b, process(1))
	lease(b, q, "few", 10, false)
	lease(b, q, queueName, leases, false)
	ids, err := q.ProduceBatch(ctx, slices.Repeat([]codeq.Task{{Queue: queueName, Payload: payload}}, ready))
	require.NoError(b, err)
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
				require.Equal(b, want, n)
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
		q := open(b, dir, process(0))
		lease(b, q, queueName, leases, true)
		require.NoError(b, q.Close())
		start := time.Now()
		q = open(b, dir, process(0))
		untilReady(b, q, leases, start)
		reportSteps(b, q)
		require.NoError(b, q.Close())
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
			require.NoError(b, err)
			batch -= len(got)
			left -= len(got)
		}
	}
}
