package bulk

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// TestBulks: elements arrive in their order, in bulks of the size, and no faster than the rate.
func TestBulks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for perSecond, want := range map[float64][]int{0: {4, 1}, 20: {2, 2, 1}} {
			var got []int
			var sizes []int
			b := New(3, 4, perSecond, nil, func(to int, bulk []int) error {
				require.Equal(t, 1, to)
				got, sizes = append(got, bulk...), append(sizes, len(bulk))
				return nil
			})
			began := time.Now()
			for i := range 5 {
				require.NoError(t, b.Add(t.Context(), 1, i))
			}
			require.NoError(t, b.Flush(t.Context()))
			require.Equal(t, []int{0, 1, 2, 3, 4}, got)
			require.Equal(t, want, sizes)
			if perSecond > 0 {
				require.InDelta(t, 3/perSecond, time.Since(began).Seconds(), 0.001, "two are free")
			}
		}
	})
}

// TestEndOfWait: the wait for the rate ends with its context, and not before, also if the next turn
// is later; and at once when the queue closes. What has not waited until its turn takes none.
func TestEndOfWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := make(chan struct{})
		b := New(1, 1, 0.01, closed, func(int, []int) error { return nil })
		began := time.Now()
		require.NoError(t, b.Add(t.Context(), 0, 1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, b.Add(ctx, 0, 2), context.DeadlineExceeded)
		require.Error(t, ctx.Err())
		require.Equal(t, time.Second, time.Since(began))
		require.ErrorIs(t, b.Add(ctx, 0, 2), context.DeadlineExceeded, "at once")
		require.Equal(t, time.Second, time.Since(began))
		require.NoError(t, b.Add(t.Context(), 0, 2))
		require.InDelta(t, 100, time.Since(began).Seconds(), 0.001)
		time.AfterFunc(time.Second, func() { close(closed) })
		require.ErrorIs(t, b.Add(t.Context(), 0, 3), base.ErrClosed)
		require.InDelta(t, 101, time.Since(began).Seconds(), 0.001)
	})
}
