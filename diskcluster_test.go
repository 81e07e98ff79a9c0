package codeq

import (
	"context"
	"sync"
	"sync/atomic"
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

		for range 3 {
			require.Equal(t, [2]error{}, produce())
		}
		claim := ClaimRequest{Queues: []string{"a"}, NoWait: true, LeaseFor: 10 * time.Second}
		held, err := nodes[1].Claim(ctx, claim)
		require.NoError(t, err)
		before, err := nodes[0].Stats(ctx)
		require.NoError(t, err)
		var started sync.WaitGroup
		started.Add(2)
		goOn := make(chan struct{})
		ended := make(chan error, 2)
		runs, stop := context.WithCancel(ctx)
		for _, q := range nodes { // of the handlers, some succeed and some do not
			mux := new(Mux)
			var calls atomic.Int64
			Handle(mux, "a", func(_ context.Context, j *Job[[]byte]) error {
				if calls.Add(1) == 1 {
					started.Done()
				}
				<-goOn
				if j.ID[15]%2 == 0 {
					return Snooze(time.Hour)
				}
				j.FollowUp(Task{Queue: "next"})
				return nil
			})
			go func() {
				ended <- q.Run(runs, mux, &RunOptions{
					Concurrency: 2, LeaseFor: 10 * time.Second, OnError: func(_ *Lease, err error) { t.Error(err) },
				})
			}()
		}
		started.Wait()
		fill(leader, diskTestFree/2-1)
		close(goOn)
		time.Sleep(time.Minute)
		fill(leader, simFree)
		require.NoError(t, nodes[1].Complete(ctx, held.Receipt, nil), "no lease has run out")
		time.Sleep(10 * time.Second)
		stats, err := nodes[0].Stats(ctx)
		require.NoError(t, err)
		require.Zero(t, stats["a"].Ready+stats["a"].Leased)
		require.EqualValues(t, before["a"].Ready, stats["a"].Scheduled+stats["next"].Ready)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, <-ended)
	})
}
