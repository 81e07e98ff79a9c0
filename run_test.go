package codeq

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// openForRun opens a queue that is closed when the test's bubble ends.
func openForRun(t *testing.T, opts Options) *Queue {
	t.Helper()
	opts.Shards = cmp.Or(opts.Shards, 1)
	opts.Backoff.Jitter = -1
	if opts.fs == nil {
		opts.fs = vfs.NewMem()
	}
	q, err := Open("q", &opts)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, q.Close()) })
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

// ActiveRun is a call of Run in a goroutine of its own.
type ActiveRun struct {
	Cancel context.CancelCauseFunc
	Done   chan struct{} // closed when Run has returned
	Err    error         // of Run; valid once done is closed
	Took   time.Duration // from the end of its context, or of waiting for it, until Run returned

	mu      sync.Mutex // guards reports
	reports []error    // what OnError was told
}

// startRun calls Run until the test's bubble ends.
func startRun(t *testing.T, q *Queue, m *Mux, opts RunOptions) *ActiveRun {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	r := &ActiveRun{Cancel: cancel, Done: make(chan struct{})}
	opts.OnError = func(l *Lease, err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reports = append(r.reports, err)
	}
	go func() {
		defer close(r.Done)
		r.Err = q.Run(ctx, m, &opts)
	}()
	t.Cleanup(func() { _ = r.End(errBubbleOver) }) // a test that cares has ended it
	return r
}

var errBubbleOver = errors.New("the test is over")

// End ends the context of Run and returns what Run returns.
func (r *ActiveRun) End(cause error) error {
	r.Cancel(cause)
	return r.Wait()
}

func (r *ActiveRun) Wait() error {
	start := time.Now()
	<-r.Done
	r.Took = time.Since(start)
	return r.Err
}

func (r *ActiveRun) Reported() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.reports)
}

// untilCancelled is a handler that is slow and obedient.
func untilCancelled(ctx context.Context, _ *Job[[]byte]) error {
	<-ctx.Done()
	return ctx.Err()
}

// countCommits counts the commits of all shards from now on.
func countCommits(t *testing.T, q *Queue) (sum func() int) {
	counters := make([]countingCommitter, len(q.replicas))
	for i, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error {
			counters[i].committer = s.commit
			s.commit = &counters[i]
			return nil
		}))
	}
	return func() (n int) {
		for i, s := range q.led() {
			require.NoError(t, s.probe(func(*shard) error {
				n += counters[i].commits
				return nil
			}))
		}
		return n
	}
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
// uncounted and in their places.
func TestClaimedButNotStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		Handle(&m, "a", untilCancelled)
		ids := produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 6)...)
		r, err := q.newRun(t.Context(), &m, &RunOptions{Concurrency: 4})
		require.NoError(t, err)
		n, err := r.Claim(t.Context(), 4) // and no workers
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
		w := r.pool.Workers()[0]
		_, hasTask := w.Stop(ErrClosed)
		require.False(t, hasTask)
		r.Do(w, &op.Grants[0])
		op.unref()
		got := infoOf(t, q, id)
		require.Equal(t, Ready, got.State)
		require.Zero(t, got.Attempts)
	})
}
