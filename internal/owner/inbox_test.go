package owner_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/owner"
)

var errStopped = errors.New("stopped")

// TestPushWaitsForRoom: a caller waits while the inbox is full, and the owner learns the arrival of
// the late operation.
func TestPushWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := owner.NewInbox(1, time.Now, func(op int) bool { return op == 2 })
		require.NoError(t, in.Push(t.Context(), 1, nil))
		time.Sleep(5 * time.Millisecond)
		go func() { _ = in.Push(t.Context(), 2, nil) }()
		synctest.Wait()
		time.Sleep(5 * time.Millisecond)
		ops, late, refused := in.Take(nil, false)
		require.Equal(t, []int{1}, ops)
		require.Equal(t, owner.Lateness{Taken: math.MaxUint64, Left: 5}, late)
		require.NoError(t, refused)
		synctest.Wait()
		ops, late, _ = in.Take(nil, false)
		require.Equal(t, []int{2}, ops)
		require.Equal(t, owner.Lateness{Taken: 5, Left: math.MaxUint64}, late)
	})
}

// TestPushEndsWithItsContext: a caller that gives up leaves nothing behind.
func TestPushEndsWithItsContext(t *testing.T) {
	in := owner.NewInbox(1, time.Now, func(int) bool { return true })
	require.NoError(t, in.Push(t.Context(), 1, nil))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, in.Push(ctx, 2, nil), context.Canceled)
	require.NoError(t, in.Pass(3)) // Pass does not wait
	ops, _, _ := in.Take(nil, false)
	require.Equal(t, []int{1, 3}, ops)
}

// TestOwnerIsWoken: the first operation ends the owner's sleep, once.
func TestOwnerIsWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := owner.NewInbox(8, time.Now, func(int) bool { return false })
		_, _, _ = in.Take(nil, true)
		time.Sleep(7 * time.Millisecond)
		require.NoError(t, in.Pass(1))
		require.NoError(t, in.Pass(2))
		<-in.Wake()
		require.EqualValues(t, 7, in.Woken())
		require.Empty(t, in.Wake())
		require.Equal(t, 2, in.Len())

		_, _, _ = in.Take(nil, false)
		_, _, _ = in.Take(nil, true)
		time.Sleep(time.Millisecond)
		require.EqualValues(t, 8, in.Awake()) // by a timer
		require.NoError(t, in.Pass(3))
		require.Empty(t, in.Wake())
	})
}

// TestAwait: the owner takes one operation from the middle, and sleeps until it comes. Others do
// not end the sleep, which ends as well when the caller has gone or the inbox is stopped.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := owner.NewInbox(8, time.Now, func(int) bool { return false })
		for op := range 3 {
			require.NoError(t, in.Pass(op))
		}
		isNine := func(op int) bool { return op == 9 }
		go func() {
			for _, op := range []int{7, 9, 8} {
				time.Sleep(time.Millisecond)
				_ = in.Pass(op)
			}
		}()
		op, found := in.Await(isNine, nil, nil)
		require.True(t, found)
		require.Equal(t, 9, op)
		gone := make(chan struct{})
		close(gone)
		_, found = in.Await(isNine, gone, nil)
		require.False(t, found)
		_, found = in.Await(isNine, nil, time.After(time.Second))
		require.False(t, found)
		ops, _, _ := in.Take(nil, false)
		require.Equal(t, []int{0, 1, 2, 7, 8}, ops)
		in.Stop(errStopped)
		_, found = in.Await(isNine, nil, nil)
		require.False(t, found)
	})
}

// TestStop: accepted operations stay. Later operations are refused for the first reason, or with
// ErrClosed once the queue is closed.
func TestStop(t *testing.T) {
	in := owner.NewInbox(8, time.Now, func(int) bool { return false })
	require.NoError(t, in.Pass(1))
	in.Stop(errStopped)
	in.Stop(errors.New("again"))
	require.ErrorIs(t, in.Push(t.Context(), 2, nil), errStopped)
	ops, _, refused := in.Take(nil, true)
	require.Equal(t, []int{1}, ops)
	require.ErrorIs(t, refused, errStopped)
	in.Stop(base.ErrClosed)
	require.ErrorIs(t, in.Pass(3), base.ErrClosed)
}

// TestWithdraw: an operation that the owner has not taken can be withdrawn, and this makes room. An
// operation that got no room in time is not in the inbox.
func TestWithdraw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var limits base.Limits
		limits.Init(time.Second, func() uint64 { return 0 })
		in := owner.NewInbox(1, time.Now, func(int) bool { return false })
		require.NoError(t, in.Push(t.Context(), 1, nil))
		begun := time.Now()
		err := in.Push(t.Context(), 2, limits.New(begun))
		require.ErrorIs(t, err, base.ErrNotLeader)
		require.ErrorIs(t, err, base.ErrLate)
		require.Equal(t, time.Second, time.Since(begun))
		go func() { _ = in.Push(t.Context(), 3, nil) }()
		synctest.Wait()
		is := func(op int) func(int) bool { return func(o int) bool { return o == op } }
		require.False(t, in.Withdraw(is(2)))
		require.True(t, in.Withdraw(is(1)))
		synctest.Wait()
		ops, _, _ := in.Take(nil, false)
		require.Equal(t, []int{3}, ops)
		require.False(t, in.Withdraw(is(3)))
	})
}
