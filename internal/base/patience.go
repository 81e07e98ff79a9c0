package base

import (
	"context"
	"time"
)

// Patience is a schedule of retries, with ever longer pauses. The zero Patience has no end.
type Patience struct {
	until  time.Time     // zero: no end
	pause  time.Duration // the last one
	strict bool          // no retry at the end, when there is no time left for an answer
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 100 * time.Millisecond
)

// NewPatience returns a Patience that ends at a time. strict: without a retry at the end.
func NewPatience(until time.Time, strict bool) Patience {
	return Patience{until: until, strict: strict}
}

// Wait returns when another attempt makes sense: after a pause, or at once when change is closed.
// It is false when the time for attempts is over.
func (p *Patience) Wait(ctx context.Context, change <-chan struct{}) bool {
	p.pause = min(max(2*p.pause, minPause), maxPause)
	pause, last := p.pause, false
	if !p.until.IsZero() {
		left := time.Until(p.until)
		if left <= 0 {
			return false
		}
		last = p.strict && left <= pause
		pause = min(pause, left)
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-change:
	case <-t.C:
		return !last
	case <-ctx.Done():
		return false
	}
	return true
}

// Pause returns after the longest pause of a Patience, or when change is closed, or ctx ends.
func Pause(ctx context.Context, change <-chan struct{}) {
	(&Patience{pause: maxPause}).Wait(ctx, change)
}
