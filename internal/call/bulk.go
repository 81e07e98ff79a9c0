package call

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// BulkSender collects elements for several receivers, and delivers them in bulks, no faster than a
// rate. It holds the elements that are not delivered yet.
type BulkSender struct {
	deliver func(to int, bulk []keys.ID) error
	waiting [][]keys.ID // by receiver
	size    int
	limit   *rate.Limiter
	closed  <-chan struct{}
}

// NewBulkSender returns a BulkSender for so many receivers, each bulk of at most so many elements.
// perSecond bounds the elements of all bulks; 0: as fast as possible. Once closed is closed, Add
// and Flush return base.ErrClosed rather than wait.
func NewBulkSender(receivers, size int, perSecond float64, closed <-chan struct{}, deliver func(to int, bulk []keys.ID) error) *BulkSender {
	b := &BulkSender{deliver: deliver, waiting: make([][]keys.ID, receivers), size: size, closed: closed, limit: rate.NewLimiter(rate.Inf, 0)}
	if perSecond > 0 {
		b.size = max(1, min(size, int(perSecond/10)))
		b.limit = rate.NewLimiter(rate.Limit(perSecond), b.size)
	}
	return b
}

// Add adds an element, and delivers a bulk that is complete.
func (b *BulkSender) Add(ctx context.Context, to int, id keys.ID) error {
	b.waiting[to] = append(b.waiting[to], id)
	if len(b.waiting[to]) < b.size {
		return nil
	}
	return b.send(ctx, to)
}

// Flush delivers everything that was added.
func (b *BulkSender) Flush(ctx context.Context) error {
	for to := range b.waiting {
		if err := b.send(ctx, to); err != nil {
			return err
		}
	}
	return nil
}

func (b *BulkSender) send(ctx context.Context, to int) error {
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
func (b *BulkSender) await(ctx context.Context, n int) (err error) {
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
