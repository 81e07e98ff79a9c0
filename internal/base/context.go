package base

import (
	"context"
	"errors"
	"fmt"
)

// EndOf says why ctx has ended: the error matches context.Canceled or context.DeadlineExceeded, and
// the cause if the ctx was given one. REQUIRES: ctx has ended.
func EndOf(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// IsClosed reports whether a channel without senders is closed.
func IsClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}
