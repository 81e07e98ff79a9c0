package codeq

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/fsck"
	"codeq/internal/inspect"
	"codeq/internal/offline"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// Helpers of the tests inside this package. Tests outside have more helpers in test/queuetest.
// Tests inside cannot import it.

// bubble runs a test in fake time on a queue in memory, and checks the stored state at its end.
func bubble(t *testing.T, opts Options, test func(t *testing.T, q *Queue)) {
	synctest.Test(t, func(t *testing.T) {
		if opts.private.FS == nil {
			opts.private.FS = crashfs.New()
		}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		test(t, q)
		synctest.Wait()
		require.NoError(t, q.checkAll())
	})
}

func produce(t *testing.T, q *Queue, tasks ...Task) (ids []ID) {
	t.Helper()
	for _, task := range tasks {
		id, err := q.Produce(context.Background(), task)
		require.NoError(t, err)
		ids = append(ids, id)
	}
	return ids
}

// claimNow claims without waiting, and returns nil when no task is ready.
func claimNow(t *testing.T, q *Queue, queues ...string) *Lease {
	t.Helper()
	l, err := q.Claim(context.Background(), ClaimRequest{Queues: queues, NoWait: true})
	if errors.Is(err, ErrEmpty) {
		return nil
	}
	require.NoError(t, err)
	return l
}

// startingAt returns q with a fixed first shard in place of a random one.
func (q *Queue) startingAt(shard int) *Queue { return inspect.Of(q).StartingAt(shard).(*Queue) }

// checkAll runs the checker on the stored state of every shard.
func (q *Queue) checkAll() error {
	var errs []error
	for shard := range q.led() {
		errs = append(errs, inspect.Of(q).Read(shard, func(st *store.Store) error {
			snap := st.DB().NewSnapshot()
			return errors.Join(fsck.Check(snap, offline.Rules, shard, len(q.replicas)), snap.Close())
		}))
	}
	return errors.Join(errs...)
}

// probe calls look on the owner goroutine of a shard.
func (s *shard) probe(look func(*shard) error) error {
	op := &inspection{completion: newCompletion(0), look: func(o *inspect.Owner) error {
		err := look(s)
		o.Commit = s.commit
		return err
	}}
	_, err := s.do(context.Background(), op, &op.completion, nil)
	return err
}

// crashNotice makes the owner of a shard panic.
func crashNotice() *notice {
	return &notice{&internal, func(*shard) { panic(testkit.Injected("of the test")) }}
}

// standStill stops the owner of a shard before its next decision, until the call of goOn.
func standStill(s *shard) (goOn func()) {
	stands, over := make(chan struct{}), make(chan struct{})
	go s.probe(func(*shard) error { close(stands); <-over; return nil })
	<-stands
	return func() { close(over) }
}

func TestMain(m *testing.M) { testkit.Main(m) }

// TestLoggerBlocks: no call waits for a handler of log records. The queue counts the records that
// it loses because the handler is slow.
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
		const taken = 1024 + 1 // the handler had one record when the buffer was full
		require.Equal(t, []string{"log records lost, as the handler did not take them count=499"}, (*h.Seen)[taken:])
		require.Equal(t, slices.Repeat([]string{"from the owner"}, taken), (*h.Seen)[:taken])
		require.NoError(t, q.Close())
	})
}

// TestLoggerBlocksClose: Close waits one second for the handler.
func TestLoggerBlocksClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		q := openForRun(t, Options{Logger: slog.New(testkit.NewUserHandler(func(string) { <-gate }))})
		q.opts.log.Info("first")
		q.opts.log.Info("second")
		begun := time.Now()
		require.NoError(t, q.Close())
		require.Equal(t, time.Second, time.Since(begun))
		close(gate) // ends the handler's goroutine; otherwise the bubble would not end
	})
}

// TestLoggerEnds: a handler that panics, or ends its goroutine, still gets the next record.
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
