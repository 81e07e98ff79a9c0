package bench

import (
	"context"
	"sync"
	"testing"

	"codeq"
)

// outstanding is how many batches are produced and not yet worked on at the
// most: producers wait for the workers, as a service with back-pressure does.
const outstanding = 2 * producers

// BenchmarkRun is 32 producers with ProduceBatch of 64 tasks, and Run with 128
// workers whose handler does nothing.
func BenchmarkRun(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var l load
		room := make(chan struct{}, outstanding)
		for range outstanding {
			room <- struct{}{}
		}
		var wg sync.WaitGroup
		for range producers {
			wg.Go(func() { l.produceBatches(ctx, b, q, room) })
		}
		var m codeq.Mux
		codeq.Handle(&m, queueName, func(_ context.Context, job *codeq.Job[[]byte]) error {
			l.complete(job.Args)
			if l.worked.Add(1)%batch == 0 {
				room <- struct{}{}
			}
			return nil
		})
		wg.Go(func() {
			err := q.Run(ctx, &m, &codeq.RunOptions{
				Concurrency: workers,
				OnError:     func(_ *codeq.Lease, err error) { b.Error(err) },
			})
			if err != nil {
				b.Error(err)
			}
		})
		l.measure(b, func() int64 { return l.committed(b, q) })
		cancel()
		wg.Wait()
	})
}

func (l *load) produceBatches(ctx context.Context, b *testing.B, q *codeq.Queue, room <-chan struct{}) {
	tasks := make([]codeq.Task, batch)
	for n := 0; ; n += batch {
		select {
		case <-room:
		case <-ctx.Done():
			return
		}
		for i := range tasks {
			tasks[i] = l.task(n + i)
		}
		if _, err := q.ProduceBatch(ctx, tasks); err != nil {
			endedBy(ctx, b, err)
			return
		}
		l.created.Add(batch)
	}
}

// committed is how many tasks are gone from the queue: Run does not tell when
// a completion is committed, the counts do.
func (l *load) committed(b *testing.B, q *codeq.Queue) int64 {
	created := l.created.Load()
	stats, err := q.Stats(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	return created - int64(stats[queueName].Total())
}
