package bench

import (
	"context"
	"sync"
	"testing"

	"codeq"
)

// BenchmarkFullCycle is 32 producers and 128 workers that make single calls of
// Produce, Claim and Complete, each waiting for its own commit.
func BenchmarkFullCycle(b *testing.B) { forEach(b, fullCycle) }

func fullCycle(b *testing.B, q *codeq.Queue) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var l load
	var wg sync.WaitGroup
	for range producers {
		wg.Go(func() { l.produce(ctx, b, q) })
	}
	for range workers {
		wg.Go(func() { l.work(ctx, b, q) })
	}
	l.measure(b, nil)
	cancel()
	wg.Wait()
}

func (l *load) produce(ctx context.Context, b *testing.B, q *codeq.Queue) {
	for n := 0; ctx.Err() == nil; n++ {
		if _, err := q.Produce(ctx, l.task(n)); err != nil {
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
