package call

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// TestBulkSender: elements arrive in order, in bulks of the given size, and no faster than the
// rate.
func TestBulkSender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for perSecond, want := range map[float64][]int{0: {4, 1}, 20: {2, 2, 1}} {
			var got []keys.ID
			var sizes []int
			b := NewBulkSender(3, 4, perSecond, nil, func(to int, bulk []keys.ID) error {
				require.Equal(t, 1, to)
				got, sizes = append(got, bulk...), append(sizes, len(bulk))
				return nil
			})
			began := time.Now()
			for i := range 5 {
				require.NoError(t, b.Add(t.Context(), 1, keys.ID{byte(i)}))
			}
			require.NoError(t, b.Flush(t.Context()))
			require.Equal(t, []keys.ID{{0}, {1}, {2}, {3}, {4}}, got)
			require.Equal(t, want, sizes)
			if perSecond > 0 {
				require.InDelta(t, 3/perSecond, time.Since(began).Seconds(), 0.001, "two are free")
			}
		}
	})
}

// TestBulkSenderWaits: the wait for the rate ends with its context, and not earlier, even if the
// next turn is later. It ends at once when the queue closes. A call that gives up before its turn
// uses up no turn.
func TestBulkSenderWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := make(chan struct{})
		b := NewBulkSender(1, 1, 0.01, closed, func(int, []keys.ID) error { return nil })
		began := time.Now()
		require.NoError(t, b.Add(t.Context(), 0, keys.ID{1}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, b.Add(ctx, 0, keys.ID{2}), context.DeadlineExceeded)
		require.Error(t, ctx.Err())
		require.Equal(t, time.Second, time.Since(began))
		require.ErrorIs(t, b.Add(ctx, 0, keys.ID{2}), context.DeadlineExceeded, "at once")
		require.Equal(t, time.Second, time.Since(began))
		require.NoError(t, b.Add(t.Context(), 0, keys.ID{2}))
		require.InDelta(t, 100, time.Since(began).Seconds(), 0.001)
		time.AfterFunc(time.Second, func() { close(closed) })
		require.ErrorIs(t, b.Add(t.Context(), 0, keys.ID{3}), base.ErrClosed)
		require.InDelta(t, 101, time.Since(began).Seconds(), 0.001)
	})
}
