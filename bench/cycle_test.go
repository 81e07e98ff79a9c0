package bench

import (
	"context"
	"sync"
	"testing"

	"codeq"
)

// BenchmarkFullCycle is 32 producers and 128 workers that make single calls of
// Produce, Claim and Complete, each waiting for its own commit.
func BenchmarkFullCycle(b *testing.B) {
	forEach(b, func(b *testing.B, q *codeq.Queue) { fullCycle(b, q, nil) })
}

// fullCycle runs the cycle. shape, if given, alters the n-th task of each producer.
func fullCycle(b *testing.B, q *codeq.Queue, shape func(producer, n int, t codeq.Task) codeq.Task) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var l load
	var wg sync.WaitGroup
	for i := range producers {
		wg.Go(func() { l.produce(ctx, b, q, i, shape) })
	}
	for range workers {
		wg.Go(func() { l.work(ctx, b, q) })
	}
	l.measure(b, nil)
	cancel()
	wg.Wait()
}

func (l *load) produce(ctx context.Context, b *testing.B, q *codeq.Queue, producer int, shape func(producer, n int, t codeq.Task) codeq.Task) {
	for n := 0; ctx.Err() == nil; n++ {
		t := l.task(n)
		if shape != nil {
			t = shape(producer, n, t)
		}
		if _, err := q.Produce(ctx, t); err != nil {
			endedBy(ctx, b, err)
			return
		}
		l.created.Add(1)
	}
}

func (l *load) work(ctx context.Context, b *testing.B, q *codeq.Queue) {
	req := codeq.ClaimRequest{Queues: []string{queueName}}
	for ctx.Err() == nil {
		lease, err := q.Claim(ctx, req)
		if err != nil {
			endedBy(ctx, b, err)
			return
		}
		if err := q.Complete(ctx, lease.Receipt, nil); err != nil {
			endedBy(ctx, b, err)
			return
		}
		l.complete(lease.Payload)
	}
}
