package codeq

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// TestHeadsOfWhatCannotBeClaimed: a queue that is paused, or has no room, attracts no claims
// and ends no batches, and is found when it has room again.
func TestHeadsOfWhatCannotBeClaimed(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		words := func(queue string) (heads []bool) {
			synctest.Wait()
			for shard := range 2 {
				heads = append(heads, q.heads.Has(queue, shard))
			}
			return heads
		}
		produce(t, q.startingAt(0), Task{Queue: "a"})
		produce(t, q.startingAt(1), Task{Queue: "a"}, Task{Queue: "a"})
		require.Equal(t, []bool{true, true}, words("a"))
		require.NoError(t, q.Pause(t.Context(), "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		require.NoError(t, q.Resume(t.Context(), "a"))
		require.Equal(t, []bool{true, true}, words("a"))
		configure(t, q, "a", func(s *Settings) { s.Concurrency = 1 })
		l := claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		complete(t, q, l)
		require.Contains(t, words("a"), true)
		requireNextAny(t, q, "a", 2)
		require.Equal(t, []bool{false, false}, words("a"))
		configure(t, q, "a", func(s *Settings) { s.Concurrency, s.Rate, s.Burst = 0, 1, 1 })
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"}, Task{Queue: "a"})
		claimNow(t, q, "a")
		require.Nil(t, claimNow(t, q, "a"))
		require.Equal(t, []bool{false, false}, words("a"))
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		for range 2 {
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
		}
		requireSettled(t, q)
	})
}

// requireNextAny claims and completes so many tasks, in any order, one by one.
func requireNextAny(t *testing.T, q *Queue, queue string, n int) {
	t.Helper()
	for range n {
		complete(t, q, claimNow(t, q, queue))
	}
}
