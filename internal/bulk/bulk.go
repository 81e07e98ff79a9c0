// Package bulk collects elements for several receivers, and delivers them in bulks, no faster than
// a rate.
package bulk

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"codeq/internal/base"
)

// Bulks holds what was added and is not delivered yet.
type Bulks[T any] struct {
	deliver func(to int, bulk []T) error
	waiting [][]T // by receiver
	size    int
	limit   *rate.Limiter
	closed  <-chan struct{}
}

// New returns Bulks for so many receivers, each bulk of at most so many elements. perSecond bounds
// the elements of all bulks; 0: as fast as possible. Once closed is closed, Add and Flush return
// base.ErrClosed rather than wait.
func New[T any](receivers, size int, perSecond float64, closed <-chan struct{}, deliver func(to int, bulk []T) error) *Bulks[T] {
	b := &Bulks[T]{deliver: deliver, waiting: make([][]T, receivers), size: size, closed: closed, limit: rate.NewLimiter(rate.Inf, 0)}
	if perSecond > 0 {
		b.size = max(1, min(size, int(perSecond/10)))
		b.limit = rate.NewLimiter(rate.Limit(perSecond), b.size)
	}
	return b
}

// Add adds an element, and delivers a bulk that is complete.
func (b *Bulks[T]) Add(ctx context.Context, to int, v T) error {
	b.waiting[to] = append(b.waiting[to], v)
	if len(b.waiting[to]) < b.size {
		return nil
	}
	return b.flush(ctx, to)
}

// Flush delivers everything that was added.
func (b *Bulks[T]) Flush(ctx context.Context) error {
	for to := range b.waiting {
		if err := b.flush(ctx, to); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bulks[T]) flush(ctx context.Context, to int) error {
	bulk := b.waiting[to]
	b.waiting[to] = nil
	if len(bulk) == 0 {
		return nil
	}
	if err := b.await(ctx, len(bulk)); err != nil {
		return err
	}
	return b.deliver(to, bulk)
}

// await waits until so many elements may be delivered. Unlike rate.Limiter.WaitN it waits until ctx
// ends also if its deadline is before their turn: otherwise a caller that tries again until ctx
// ends would never rest.
func (b *Bulks[T]) await(ctx context.Context, n int) (err error) {
	if ctx.Err() != nil {
		return base.EndOf(ctx)
	}
	turn := b.limit.ReserveN(time.Now(), n)
	d := turn.Delay()
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		err = base.EndOf(ctx)
	case <-b.closed:
		err = base.ErrClosed
	}
	turn.Cancel()
	return err
}
