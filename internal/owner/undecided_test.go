package owner

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestUndecided: operations are decided in the order in which they have come; those that are
// deferred come first in the next group, and again after those that it has not come to.
func TestUndecided(t *testing.T) {
	t.Parallel()
	var u Undecided[int]
	u.Take(append(u.Spare(), 1, 20, 21, 2, 3))
	require.Equal(t, 1, u.Next())
	u.Decide(1)
	require.Equal(t, []int{1}, u.InHand())
	u.Defer(1)
	u.Decide(0)
	require.Equal(t, []int{20, 21, 2, 3}, u.Taken())
	for _, op := range []int{20, 21, 2, 3} {
		require.True(t, u.HasTaken())
		require.Equal(t, op, u.Next())
		u.Defer(op)
	}
	require.False(t, u.HasTaken())
	require.Equal(t, []int{1, 20, 21, 2, 3}, u.Waiting())

	require.Equal(t, 5, u.BeginRetry())
	require.Equal(t, 1, u.Retry(0))
	u.Defer(1)
	require.Equal(t, 20, u.Retry(1))
	require.Equal(t, []int{0, 0, 21, 2, 3, 0}, u.InHand())
	require.True(t, u.EndRetry(2))
	require.Equal(t, []int{21, 2, 3, 1}, u.Waiting())
	require.Equal(t, []int{0}, u.InHand())

	require.Equal(t, 4, u.BeginRetry())
	for i, op := range []int{21, 2, 3, 1} {
		require.Equal(t, op, u.Retry(i))
		u.Park(op)
	}
	require.False(t, u.EndRetry(4))
	require.False(t, u.HasDeferred())
	u.DropParked(func(op int) bool { return op == 2 })
	require.Equal(t, []int{21, 3, 1}, u.Waiting())
	u.Unpark()
	require.True(t, u.HasDeferred())
	require.Equal(t, []int{21, 3, 1}, u.Waiting())
}
