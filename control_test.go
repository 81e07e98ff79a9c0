package codeq

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

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

// TestCancelToldToItsRun: of several calls of Run, the one that has the task learns of its cancel.
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
