package base

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrLate is the error of a call that ends because its Limit is over.
var ErrLate = errors.New("codeq: the shard does not get further")

// Limits makes the Limits of the calls of a shard. It must not be copied.
type Limits struct {
	timeout time.Duration
	done    func() uint64
	pool    sync.Pool // of *Limit
}

// Init prepares Limits of a length. done counts the work of the shard: as long as it grows, calls
// wait.
func (ls *Limits) Init(timeout time.Duration, done func() uint64) {
	ls.timeout, ls.done = timeout, done
}

// Limit is how long a call waits for a shard: for its timeout, and for longer only while the shard
// has done something in the last half of the timeout. A nil Limit has no end. It is for one
// goroutine.
type Limit struct {
	of     *Limits
	timer  *time.Timer
	end    time.Time // when the timeout has passed
	seen   uint64    // done at the last look
	looked bool
}

// New returns the Limit of a call that began at a time. One that began long ago still has an eighth
// of the timeout.
func (ls *Limits) New(begin time.Time) *Limit {
	l, ok := ls.pool.Get().(*Limit)
	if !ok {
		l = &Limit{of: ls, timer: time.NewTimer(time.Hour)}
	}
	l.end, l.looked = begin.Add(ls.timeout), false
	left := time.Until(l.end)
	if least := ls.timeout / 8; left < least {
		left, l.end = least, l.end.Add(least-left)
	}
	if left > ls.timeout/2 {
		left -= ls.timeout / 2
	} else {
		l.look()
	}
	l.timer.Reset(left)
	return l
}

// Free ends a Limit.
func (l *Limit) Free() {
	if l != nil {
		l.timer.Stop()
		l.of.pool.Put(l)
	}
}

// C is received from when it is time to ask IsOver.
func (l *Limit) C() <-chan time.Time {
	if l == nil {
		return nil
	}
	return l.timer.C
}

// End is when the timeout has passed.
func (l *Limit) End() time.Time { return l.end }

// IsOver reports whether the call has to end, after a receive from C. If not, C will be ready
// again. moves: a large message for the call has got further.
func (l *Limit) IsOver(moves bool) bool {
	first := !l.looked
	if grown := l.look(); !first && !grown && !moves {
		return true
	}
	l.timer.Reset(l.of.timeout / 2)
	return false
}

// Await returns the outcome that done brings. If ctx ends before, or limit is over, settled is
// false and the error matches ErrUncertain.
func Await(ctx context.Context, limit *Limit, done <-chan error) (settled bool, err error) {
	cancel := ctx.Done()
	switch {
	case limit != nil:
		return limit.await(ctx, done)
	case cancel == nil:
		return true, <-done
	}
	select { // which a third channel makes slower, even a nil one
	case err := <-done:
		return true, err
	case <-cancel:
		return false, uncertain(ctx)
	}
}

func uncertain(ctx context.Context) error { return fmt.Errorf("%w: %w", ErrUncertain, EndOf(ctx)) }

func (l *Limit) await(ctx context.Context, done <-chan error) (settled bool, err error) {
	for {
		select {
		case err := <-done:
			return true, err
		case <-ctx.Done():
			return false, uncertain(ctx)
		case <-l.C():
			if l.IsOver(false) {
				return false, fmt.Errorf("%w: %w", ErrUncertain, ErrLate)
			}
		}
	}
}

// NotApplied is the error of a call that has ended with ctx, or else its limit, and has not been
// applied.
func NotApplied(ctx context.Context) error {
	if ctx.Err() != nil {
		return EndOf(ctx)
	}
	return fmt.Errorf("%w: %w", ErrNotLeader, ErrLate)
}

// look reports whether the shard has done something since the last look.
func (l *Limit) look() bool {
	before := l.seen
	l.seen, l.looked = l.of.done(), true
	return l.seen != before
}
