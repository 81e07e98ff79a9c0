package guard

import (
	"context"
	"errors"
	"log/slog"
	"sync"
)

// Until returns a context that also ends, with a cause, when end is closed. The call passes its
// error to stop at its end, and returns the result: only the end of its own context matches
// context.Canceled. After a panic of the goroutine that watches end (called what in messages), the
// context ends with the error of caught.
func Until(own context.Context, end <-chan struct{}, cause error, log *slog.Logger, what string,
	caught func(what string, value any, stack []byte) error,
) (_ context.Context, stop func(error) error) {
	ctx, cancel := context.WithCancelCause(own)
	var watch sync.WaitGroup
	watch.Go(func() {
		Contain(log, what, func() {
			select {
			case <-end:
				cancel(cause)
			case <-ctx.Done():
			}
		}, func(value any, stack []byte) { cancel(caught(what, value, stack)) })
	})
	return ctx, func(err error) error {
		cancel(nil)
		watch.Wait()
		if errors.Is(err, context.Canceled) && errors.Is(context.Cause(ctx), cause) && own.Err() == nil {
			return cause
		}
		return err
	}
}
