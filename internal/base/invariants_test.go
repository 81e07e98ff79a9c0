package base

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAssertions(t *testing.T) {
	require.PanicsWithValue(t, `codeq: invariant violated: queue "a" has -1 leases`, func() {
		Violated("queue %q has %d leases", "a", -1)
	})
	var mu sync.Mutex
	mu.Lock()
	AssertHeld(&mu, "mu")
	mu.Unlock()
	require.PanicsWithValue(t, "codeq: invariant violated: mu is not locked", func() { AssertHeld(&mu, "mu") })
}
