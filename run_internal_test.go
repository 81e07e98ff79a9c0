package codeq

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/record"
	"codeq/internal/testkit"
	"codeq/internal/wire"
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

// TestClaimedButNotStarted: when Run ends, it gives back the tasks that no worker has begun,
// uncounted and in their places. It does the same with a task if the handler ends with its context.
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

// TestStoppedWorker: a worker takes a task at the moment when Run cancels the handlers. It gives
// the task back without a call of its handler.
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

// TestTaskContextIsSmall: thousands of tasks are at work at once, and each has a taskContext. This
// fits into 384 bytes, a size of Go's allocator; the next size is 416.
func TestTaskContextIsSmall(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(taskContext{}), uintptr(384))
}

// TestInheritTrace: the trace context of a task passes to another task as a whole, unless the other
// task has one already, or has no room.
func TestInheritTrace(t *testing.T) {
	type header = map[string]string
	from := header{"traceparent": "p", "tracestate": "s", "other": "o"}
	for _, tc := range []struct{ own, from, want header }{
		{nil, from, header{"traceparent": "p", "tracestate": "s"}},
		{header{"a": "b"}, from, header{"a": "b", "traceparent": "p", "tracestate": "s"}},
		{nil, header{"traceparent": "p"}, header{"traceparent": "p"}},
		{header{"traceparent": ""}, from, header{"traceparent": ""}},
		{header{"tracestate": "x"}, from, header{"tracestate": "x"}},
		{header{"a": "b"}, header{"tracestate": "s"}, header{"a": "b"}},
		{header{"a": "far too long"}, from, header{"a": "far too long"}},
	} {
		require.Equal(t, tc.want, record.InheritTrace(tc.own, tc.from, 25))
	}
}

// TestCancelBeforeHandler: a task that is canceled between the claim of Run and
// its handler is not handled.
func TestCancelBeforeHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: Forever})
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
			t.Error("the handler of a canceled task runs")
			return nil
		})
		id := produce(t, q, Task{Queue: "a"})[0]
		var reported []error
		r, err := q.newRun(t.Context(), &m, &RunOptions{OnError: func(_ *Lease, err error) { reported = append(reported, err) }})
		require.NoError(t, err)
		r.number = q.runs.Add(r)
		op, err := q.claim(t.Context(), &r.req, r)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(t.Context(), id))
		q.notices.Wait()
		w := new(worker)
		r.Do(w, op.Grants[0])
		op.unref()
		require.Len(t, reported, 1)
		require.ErrorIs(t, reported[0], ErrCanceled)
		_, running := w.Task()
		require.False(t, running)
		require.Equal(t, Canceled, infoOf(t, q, id).State)
	})
}

// TestCancelToldToItsRun: of several calls of Run, only the one with the task gets the cancel of
// the task.
func TestCancelToldToItsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2})
		var ended [3]atomic.Int64
		for i, name := range []string{"a", "b", "c"} {
			var m Mux
			Handle(&m, name, func(ctx context.Context, j *Job[[]byte]) error {
				<-ctx.Done()
				ended[i].Add(1)
				return ctx.Err()
			})
			go func() { _ = q.Run(t.Context(), &m, nil) }()
		}
		id := produce(t, q, Task{Queue: "b"})[0]
		produce(t, q, Task{Queue: "a"}, Task{Queue: "c"})
		synctest.Wait()
		require.NoError(t, q.Cancel(t.Context(), id))
		synctest.Wait()
		told := 0
		for r := range q.runs.All {
			if !r.canceledReceipts.IsEmpty() {
				told++
			}
		}
		require.Equal(t, 1, told)
		for i, want := range []int64{0, 1, 0} {
			require.Equal(t, want, ended[i].Load())
		}
	})
}

// TestPlaceOfCanceledHandler: the task of a running handler is canceled, and then its lease ends
// with the report that the handler goes on. The place of the handler does not become free.
func TestPlaceOfCanceledHandler(t *testing.T) {
	t.Parallel()
	for _, how := range []engine.Failure{engine.FailOverdue, engine.FailReturn | engine.StillRuns} {
		ownCluster(t, func(t *testing.T, q *Queue) {
			ctx, stop := context.WithCancel(t.Context())
			ids, err := q.ProduceBatch(ctx, []Task{{Queue: "a", Group: "g"}, {Queue: "a", Group: "g"}})
			require.NoError(t, err)
			started, end, ran := make(chan *Lease, 2), make(chan struct{}), make(chan error, 1)
			var m Mux
			Handle(&m, "a", func(_ context.Context, j *Job[[]byte]) error { started <- j.Lease; <-end; return nil })
			go func() { ran <- q.Run(ctx, &m, &RunOptions{Concurrency: 4}) }()
			first := <-started
			require.Equal(t, ids[0], first.ID)
			require.NoError(t, q.Cancel(ctx, first.ID))
			require.ErrorIs(t, q.failed(ctx, first.Receipt, call.Fail{How: how}, nil), ErrLeaseLost)
			time.Sleep(5 * time.Second)
			require.Empty(t, started, how)
			close(end)
			require.Equal(t, ids[1], (<-started).ID)
			stop()
			require.NoError(t, <-ran)
		})
	}
}

// TestUnknownCallsAboutWorkers: a node refuses unknown calls about workers.
func TestUnknownCallsAboutWorkers(t *testing.T) {
	ownCluster(t, func(t *testing.T, q *Queue) {
		ctx, stop := context.WithCancel(t.Context())
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error { return nil })
		ran := make(chan error, 1)
		go func() { ran <- q.Run(ctx, &m, nil) }()
		time.Sleep(time.Second) // until it is a worker
		_, err := q.serveNode(ctx, []byte("{"))
		require.Equal(t, errMalformedCall, err)
		_, err = q.serveNode(ctx, wire.AppendJSON(nil, &workersCall{Do: "dance"}))
		require.Equal(t, errMalformedCall, err)
		stop()
		require.NoError(t, <-ran)
	})
}
