// Package bulk collects elements for several receivers, and delivers them in bulks, no faster than
// a rate.
package bulk

import (
	"context"
	"fmt"

	"golang.org/x/time/rate"

	"codeq/internal/base"
)

// Bulks holds what was added and is not delivered yet.
type Bulks[T any] struct {
	deliver func(to int, bulk []T) error
	waiting [][]T // by receiver
	size    int
	limit   *rate.Limiter
}

// New returns Bulks for so many receivers, each bulk of at most so many elements. perSecond bounds
// the elements of all bulks; 0: as fast as possible.
func New[T any](receivers, size int, perSecond float64, deliver func(to int, bulk []T) error) *Bulks[T] {
	b := &Bulks[T]{deliver: deliver, waiting: make([][]T, receivers), size: size, limit: rate.NewLimiter(rate.Inf, 0)}
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
	if err := b.limit.WaitN(ctx, len(bulk)); err != nil { // also if the deadline is too near
		end := context.DeadlineExceeded
		if ctx.Err() != nil {
			end = base.EndOf(ctx)
		}
		return fmt.Errorf("%w: %w", end, err)
	}
	return b.deliver(to, bulk)
}
