package codeq

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMiddlewareDecides: what the outermost middleware returns is what becomes
// of the task.
func TestMiddlewareDecides(t *testing.T) {
	boom := errors.New("boom")
	for name, tc := range map[string]struct {
		mw      Middleware
		state   State
		handled int
		report  string // of each attempt
	}{
		"swallows": {func(next Handler) Handler {
			return func(ctx context.Context, l *Lease) error { _ = next(ctx, l); return nil }
		}, Done, 1, ""},
		"gives up": {func(next Handler) Handler {
			return func(ctx context.Context, l *Lease) error { return DeadLetter(next(ctx, l)) }
		}, Dead, 1, "boom"},
		"skips": {func(Handler) Handler {
			return func(context.Context, *Lease) error { return nil }
		}, Done, 0, ""},
		"refuses": {func(Handler) Handler {
			return func(context.Context, *Lease) error { return Snooze(time.Hour) }
		}, Scheduled, 0, ""},
		"panics": {func(next Handler) Handler {
			return func(ctx context.Context, l *Lease) error { _ = next(ctx, l); panic("of middleware") }
		}, Scheduled, 1, "panic: of middleware"},
		"ends the goroutine": {func(next Handler) Handler {
			return func(ctx context.Context, l *Lease) error { runtime.Goexit(); return next(ctx, l) }
		}, Scheduled, 0, errGoexit.Error()},
		"loses the context": {func(next Handler) Handler {
			return func(_ context.Context, l *Lease) error { return next(context.Background(), l) }
		}, Scheduled, 0, errForeignContext.Error()},
		"loses the lease": {func(next Handler) Handler {
			return func(ctx context.Context, _ *Lease) error { return next(ctx, nil) }
		}, Scheduled, 0, "panic: runtime error: invalid memory address"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, Options{Retention: time.Hour})
				var m Mux
				handled := 0
				m.Use(tc.mw)
				Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
					handled++
					return boom
				})
				run := startRun(t, q, &m, RunOptions{Concurrency: 1})
				ids := produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
				synctest.Wait()
				for _, id := range ids {
					require.Equal(t, tc.state, infoOf(t, q, id).State)
				}
				require.Equal(t, 2*tc.handled, handled, "of both tasks: the worker goes on")
				require.NoError(t, run.End(nil))
				if tc.report == "" {
					require.Empty(t, run.Reported())
					return
				}
				require.Len(t, run.Reported(), 2)
				for _, err := range run.Reported() {
					require.ErrorContains(t, err, tc.report)
				}
			})
		})
	}
}
