package codeq

import (
	"log/slog"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testkit"
)

// TestLoggerBlocks: nothing waits for a handler of log records, and what it was not in time for is
// counted.
func TestLoggerBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		h := testkit.NewUserHandler(func(string) { <-gate })
		q := openForRun(t, Options{Logger: slog.New(h)})
		const records = 1024 + 500
		for range records { // the owner logs
			require.NoError(t, q.shard(0).probe(func(s *shard) error { s.opts.log.Info("from the owner"); return nil }))
		}
		produce(t, q, Task{Queue: "a"})
		close(gate)
		synctest.Wait()
		const taken = 1024 + 1 // one was in its hands when the queue was full
		require.Equal(t, []string{"log records lost, as the handler did not take them count=499"}, (*h.Seen)[taken:])
		require.Equal(t, slices.Repeat([]string{"from the owner"}, taken), (*h.Seen)[:taken])
		require.NoError(t, q.Close())
	})
}

// TestLoggerBlocksClose: Close gives the handler a second.
func TestLoggerBlocksClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		q := openForRun(t, Options{Logger: slog.New(testkit.NewUserHandler(func(string) { <-gate }))})
		q.opts.log.Info("first")
		q.opts.log.Info("second")
		begun := time.Now()
		require.NoError(t, q.Close())
		require.Equal(t, time.Second, time.Since(begun))
		close(gate) // its goroutine ends, or the bubble does not
	})
}

// TestLoggerEnds: a handler that panics, or ends its goroutine, is called for the next record.
func TestLoggerEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := testkit.NewUserHandler(func(message string) {
					if message == "bad" {
						end()
					}
				})
				q := openForRun(t, Options{Logger: slog.New(h)})
				for _, message := range []string{"good", "bad", "bad", "good"} {
					q.opts.log.With("shard", 1).Info(message)
					synctest.Wait()
				}
				lost := "log records lost, as the handler did not take them count="
				require.Equal(t, []string{"good", lost + "1", lost + "1", "good"}, *h.Seen)
				require.NoError(t, q.Close())
			})
		})
	}
}
