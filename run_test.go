package codeq

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

// openForRun opens a queue that is closed when the test's bubble ends.
func openForRun(t *testing.T, opts Options) *Queue {
	t.Helper()
	opts.Shards = cmp.Or(opts.Shards, 1)
	opts.Backoff.Jitter = -1
	if inspect.Options(&opts).FS == nil {
		inspect.Options(&opts).FS = crashfs.New()
	}
	q, err := Open("q", &opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := q.Close(); !errors.Is(err, testkit.ErrDisk) { // see failShard
			assert.NoError(t, err)
		}
	})
	return q
}

// countsOf returns the counts of one queue.
func countsOf(t *testing.T, q *Queue, name string) Counts {
	t.Helper()
	counts, err := q.Stats(context.Background())
	require.NoError(t, err)
	return counts[name]
}

func infoOf(t *testing.T, q *Queue, id ID) *TaskInfo {
	t.Helper()
	i, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return i
}

// loseLease ends a lease as if its deadline had passed.
func loseLease(t *testing.T, q *Queue, id ID) {
	t.Helper()
	require.NoError(t, q.shard(q.shardOf(id)).probe(func(s *shard) error {
		if !s.Probe().Expire(id) {
			return ErrNotFound
		}
		return nil
	}))
}

// TestClaimedButNotStarted: tasks that no worker has begun when Run is to end are given back
// uncounted and in their places, and so is one whose handler ends with its context.
func TestClaimedButNotStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		Handle(&m, "a", func(ctx context.Context, _ *Job[[]byte]) error { <-ctx.Done(); return ctx.Err() })
		ids := produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 6)...)
		r, err := q.newRun(t.Context(), &m, &RunOptions{Concurrency: 1})
		require.NoError(t, err)
		n, err := r.Claim(t.Context(), 4)
		require.NoError(t, err)
		require.Equal(t, 4, n)
		require.Equal(t, Counts{Leased: 4, Ready: 2}, countsOf(t, q, "a"))
		require.Zero(t, r.pool.Drain(context.Canceled))
		require.Equal(t, Counts{Ready: 6}, countsOf(t, q, "a"))
		for _, id := range ids {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}, NoWait: true})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			require.Equal(t, 1, l.Attempt)
		}
	})
}

// TestStoppedWorker: a task that a worker takes at the moment in which Run
// cancels its handlers is given back without being handled.
func TestStoppedWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
			t.Error("a stopped worker runs a handler")
			return nil
		})
		id := produce(t, q, Task{Queue: "a"})[0]
		r, err := q.newRun(t.Context(), &m, nil)
		require.NoError(t, err)
		op, err := q.claim(t.Context(), &r.req, r)
		require.NoError(t, err)
		w := new(worker)
		_, hasTask := w.Stop(ErrClosed)
		require.False(t, hasTask)
		r.Do(w, op.Grants[0])
		op.unref()
		got := infoOf(t, q, id)
		require.Equal(t, Ready, got.State)
		require.Zero(t, got.Attempts)
	})
}

// TestTaskContextIsSmall: thousands of tasks are at work at once, each with a taskContext of its
// own. It fits into 384 bytes, a size of Go's allocator; the next one is 416.
func TestTaskContextIsSmall(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(taskContext{}), uintptr(384))
}
