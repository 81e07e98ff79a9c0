package guard

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWithin: a call is found at any depth of the stack, and only on the stack of its own
// goroutine.
func TestWithin(t *testing.T) {
	var deep func(n int) bool
	deep = func(n int) bool {
		if n == 0 {
			return InCallback()
		}
		return deep(n - 1)
	}
	for _, n := range []int{0, 1, 63, 64, 65, 1000} {
		require.False(t, deep(n))
		CallBack(func() { require.True(t, deep(n), "%d", n) })
	}
	CallBack(func() {
		other := make(chan bool)
		go func() { other <- InCallback() }()
		require.False(t, <-other)
	})
	require.False(t, InCallback())
}
