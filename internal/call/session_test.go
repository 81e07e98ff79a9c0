package call

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestCalls: a retry of a call has the first outcome, as long as its caller may ask. For this, each
// call has a number, and Low is the oldest call under way. A new incarnation is later than all
// before it.
func TestCalls(t *testing.T) {
	t.Parallel()
	calls := NewSession(5)
	one, two := calls.Begin(), calls.Begin()
	require.Equal(t, keys.CallNumber{Incarnation: 5, Seq: 1, Low: 1}, one)
	require.Equal(t, keys.CallNumber{Incarnation: 5, Seq: 2, Low: 1}, two)
	calls.End(two.Seq)
	require.EqualValues(t, 1, calls.Begin().Low, "the first is still open")
	calls.End(one.Seq)
	require.EqualValues(t, 3, calls.Begin().Low)
	calls.Outlive(4)
	require.EqualValues(t, 5, calls.Begin().Incarnation)
	calls.Outlive(5)
	require.Greater(t, calls.Begin().Incarnation, uint64(5))
}
