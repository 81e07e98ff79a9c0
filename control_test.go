package codeq

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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

// TestBulkSender: elements arrive in their order, in bulks of the size, and no faster than the
// rate.
func TestBulkSender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for perSecond, want := range map[float64][]int{0: {4, 1}, 20: {2, 2, 1}} {
			var got []int
			var sizes []int
			b := newBulkSender(3, 4, perSecond, nil, func(to int, bulk []int) error {
				require.Equal(t, 1, to)
				got, sizes = append(got, bulk...), append(sizes, len(bulk))
				return nil
			})
			began := time.Now()
			for i := range 5 {
				require.NoError(t, b.add(t.Context(), 1, i))
			}
			require.NoError(t, b.flush(t.Context()))
			require.Equal(t, []int{0, 1, 2, 3, 4}, got)
			require.Equal(t, want, sizes)
			if perSecond > 0 {
				require.InDelta(t, 3/perSecond, time.Since(began).Seconds(), 0.001, "two are free")
			}
		}
	})
}

// TestBulkSenderWaits: the wait for the rate ends with its context, and not before, also if the
// next turn is later; and at once when the queue closes. What has not waited until its turn takes
// none.
func TestBulkSenderWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := make(chan struct{})
		b := newBulkSender(1, 1, 0.01, closed, func(int, []int) error { return nil })
		began := time.Now()
		require.NoError(t, b.add(t.Context(), 0, 1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, b.add(ctx, 0, 2), context.DeadlineExceeded)
		require.Error(t, ctx.Err())
		require.Equal(t, time.Second, time.Since(began))
		require.ErrorIs(t, b.add(ctx, 0, 2), context.DeadlineExceeded, "at once")
		require.Equal(t, time.Second, time.Since(began))
		require.NoError(t, b.add(t.Context(), 0, 2))
		require.InDelta(t, 100, time.Since(began).Seconds(), 0.001)
		time.AfterFunc(time.Second, func() { close(closed) })
		require.ErrorIs(t, b.add(t.Context(), 0, 3), ErrClosed)
		require.InDelta(t, 101, time.Since(began).Seconds(), 0.001)
	})
}
