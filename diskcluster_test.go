package codeq

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFullDiskOfLeader: what counts for a shard is the disk of the node that leads it, on
// whichever node it is asked; a follower's may be as full as the leader's must not be.
func TestFullDiskOfLeader(t *testing.T) {
	simCase(t, Options{MinFreeBytes: diskTestFree}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		leader, other := c.lead()
		nodes := []*Queue{simQueue(leader), simQueue(other)}
		ctx := context.Background()
		fill := func(n *simNode, free int64) {
			n.fill(free)
			time.Sleep(2 * lookEvery * time.Millisecond)
		}
		produce := func() (errs [2]error) {
			for i, q := range nodes {
				_, errs[i] = q.Produce(ctx, Task{Queue: "a"})
			}
			return errs
		}
		cycle := func() {
			for _, q := range nodes {
				l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
				require.NoError(t, err)
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			}
		}
		for range 3 {
			require.Equal(t, [2]error{}, produce())
		}
		full := func() {
			for _, err := range produce() {
				require.ErrorIs(t, err, ErrDiskFull)
			}
		}

		fill(leader, diskTestFree-1)
		full()
		cycle()
		fill(leader, diskTestFree/2-1)
		full()
		l, err := nodes[1].Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.ErrorIs(t, err, ErrDiskFull, "%v", l)
		require.Equal(t, leader, c.leader(0))

		fill(leader, simFree)
		fill(other, diskTestFree/2-1)
		require.Equal(t, [2]error{}, produce())
		cycle()
		fill(other, simFree)
	})
}
