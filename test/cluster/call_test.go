package cluster_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

type callResult struct {
	result string
	err    error
}

// beginCall calls a task of queue a on a node.
func beginCall(n *simNode) <-chan callResult {
	done := make(chan callResult, 1)
	q := simQueue(n)
	go func() {
		s, err := codeq.Call[[]byte](context.Background(), q, codeq.Task{Queue: "a"})
		done <- callResult{string(s), err}
	}()
	return done
}

// completeA waits on a node for a task of queue a, and completes it.
func completeA(t *testing.T, n *simNode, result string) {
	t.Helper()
	l, err := simQueue(n).Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, simQueue(n).Complete(t.Context(), l.Receipt, []byte(result)))
}

// TestCallInCluster: any node calls a task that another one works on, and goes on waiting while the
// leader changes.
func TestCallInCluster(t *testing.T) {
	simCase(t, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		third := c.third(leader, other)
		for _, n := range []*simNode{leader, other, third} {
			for range 3 {
				done := beginCall(n)
				completeA(t, other, "before")
				require.Equal(t, callResult{"before", nil}, <-done)
			}
			done := beginCall(n)
			l, err := simQueue(other).Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			for shard := range 2 {
				to := other
				if c.leader(shard) == other {
					to = third
				}
				c.transfer(to, shard, to)
			}
			require.NoError(t, simQueue(other).Complete(t.Context(), l.Receipt, []byte("after")))
			require.Equal(t, callResult{"after", nil}, <-done)
		}
	})
}

// TestCallOverLostLeader: the answer to the produce is lost, the task ends, and the leader dies,
// which alone knew how. The caller learns it by its own log.
func TestCallOverLostLeader(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, caller := c.lead()
		third := c.third(leader, caller)
		first := beginCall(caller)
		completeA(t, third, "first")
		require.Equal(t, callResult{"first", nil}, <-first)

		c.net.SetCut(leader.name, caller.name, true)
		done := beginCall(caller)
		completeA(t, third, "second")
		leader.crash(0)
		c.net.Heal(true)
		require.Equal(t, callResult{"second", nil}, <-done)
		c.until("all is done", func() bool {
			counts, err := simQueue(third).Stats(t.Context())
			return err == nil && counts["a"].Total() == 0
		})
	})
}
