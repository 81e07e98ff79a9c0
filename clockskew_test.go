package codeq

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestClockAheadDeletesNothing: what is kept for a time is kept for as long, whichever node's clock
// is set an hour forward: kept results, and idempotency keys. The node is told of.
func TestClockAheadDeletesNothing(t *testing.T) {
	t.Parallel()
	const keep = 2 * time.Minute
	for _, wrong := range []string{"leader", "next leader", "follower"} {
		t.Run(wrong, func(t *testing.T) {
			t.Parallel()
			simCase(t, Options{}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				time.Sleep(2 * time.Minute) // the leader is at home
				leader, other := c.lead()
				q := simQueue(other)
				task := Task{Queue: "a", Unique: Unique{Key: "k", For: keep}, Retention: keep}
				id, err := q.Produce(ctx, task)
				require.NoError(t, err)
				begun := time.Now()
				l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
				require.NoError(t, err)
				require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result")))

				victim := leader
				if wrong != "leader" {
					victim = other
				}
				victim.ahead.Store(int64(time.Hour))
				if wrong == "next leader" {
					require.NoError(t, q.TransferLeadership(ctx, 0, other.name))
				}
				for time.Since(begun) < keep-time.Second { // a round takes some milliseconds
					info, err := q.Get(ctx, id)
					require.NoError(t, err, time.Since(begun))
					require.Equal(t, "result", string(info.Result))
					var duplicate *DuplicateError
					_, err = q.Produce(ctx, task)
					require.ErrorAs(t, err, &duplicate, time.Since(begun))
					require.Equal(t, id, duplicate.ID)
					time.Sleep(time.Second)
				}
				st, err := q.ClusterStatus(ctx)
				require.NoError(t, err)
				for _, r := range st.Shards[0].Replicas {
					ahead := time.Duration(0)
					if r.Node == victim.name {
						ahead = time.Hour
					}
					require.InDelta(t, ahead.Seconds(), r.ClockAhead.Seconds(), 0.1, r.Node)
				}
				time.Sleep(keep/8 + time.Minute + time.Second)
				_, err = q.Get(ctx, id)
				require.ErrorIs(t, err, ErrNotFound)
				_, err = q.Produce(ctx, task)
				require.NoError(t, err)
			})
		})
	}
}
