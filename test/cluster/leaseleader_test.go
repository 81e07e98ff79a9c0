package cluster_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/test/queuetest"
)

// reclaim claims the leased task of a queue, and returns when it gets the task.
func reclaim(t *testing.T, n *simNode, queue string) (at time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), simPatience)
	defer cancel()
	for {
		l, err := simQueue(n).Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
		if err != nil && ctx.Err() == nil { // the leader of the call has lost its leadership
			continue
		}
		at = time.Now()
		if err == nil {
			err = simQueue(n).Complete(ctx, l.Receipt, nil)
		}
		if err != nil {
			t.Error(queue, err)
		}
		return at
	}
}

// TestLeasesEndAmidTransfers: the leader changes often. The tasks of dead workers are delivered
// again in time. A Run that lives loses no task, although its handlers take much longer than a
// lease.
func TestLeasesEndAmidTransfers(t *testing.T) {
	const leaseFor, runLeaseFor = 30 * time.Second, 10 * time.Second
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		first, second, dying := c.nodes[0], c.nodes[1], c.nodes[2]
		for _, queue := range []string{"healthy", "healthy", "healthy", "dead", "left"} {
			task, err := codeq.NewTask(queue, 1)
			require.NoError(t, err)
			queuetest.Produce(t, simQueue(first), task)
		}

		var runs sync.WaitGroup
		run := func(n *simNode, queue string, opts codeq.RunOptions, handle func(context.Context, *codeq.Job[int]) error) {
			mux := new(codeq.Mux)
			codeq.Handle(mux, queue, handle)
			runs.Go(func() { _ = simQueue(n).Run(ctx, mux, &opts) })
		}
		var handled sync.WaitGroup
		handled.Add(3)
		run(second, "healthy", codeq.RunOptions{
			LeaseFor: runLeaseFor, OnError: func(_ *codeq.Lease, err error) { t.Error("a healthy handler:", err) },
		}, func(ctx context.Context, j *codeq.Job[int]) error {
			select {
			case <-time.After(8 * runLeaseFor):
			case <-ctx.Done():
				t.Error("a healthy handler is cancelled:", context.Cause(ctx))
			}
			if j.Attempt != 1 {
				t.Error("a healthy handler has its task again")
			}
			handled.Done()
			return nil
		})
		started := make(chan struct{})
		run(dying, "dead", codeq.RunOptions{LeaseFor: leaseFor}, func(ctx context.Context, _ *codeq.Job[int]) error {
			close(started)
			<-ctx.Done()
			return ctx.Err()
		})
		<-started
		_, err := simQueue(dying).Claim(ctx, codeq.ClaimRequest{Queues: []string{"left"}, LeaseFor: leaseFor})
		require.NoError(t, err)
		left := time.Now()

		lead := func(n *simNode) {
			for c.leader(0) != n {
				c.transfer(first, 0, n)
				time.Sleep(time.Second)
			}
		}
		time.Sleep(leaseFor / 2)
		lead(dying)
		dying.crash(0)
		died := time.Now()

		var over atomic.Bool
		var claims sync.WaitGroup
		claim := func(queue string, since time.Time) {
			claims.Go(func() {
				took := reclaim(t, first, queue).Sub(since)
				if took > leaseFor+4*time.Second { // a vote may be split
					t.Errorf("task %s is delivered again after %v", queue, took)
				}
				if queue == "left" && took < leaseFor {
					t.Errorf("task %s is delivered again after %v only", queue, took)
				}
			})
		}
		claim("left", left)
		claim("dead", died)
		transfers := 0
		runs.Go(func() {
			for !over.Load() {
				for _, n := range []*simNode{first, second} {
					lead(n)
					transfers++
					time.Sleep(10 * time.Second)
				}
			}
		})
		claims.Wait()
		handled.Wait()
		over.Store(true)
		cancel()
		runs.Wait()
		require.Greater(t, transfers, 5)
	})
}

// TestLeasesEndAfterRestart: the process of a leader has just begun. The leader extends leases by a
// few seconds at most, and by the time without a leader.
func TestLeasesEndAfterRestart(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := t.Context()
		first := c.nodes[0]
		queuetest.Produce(t, simQueue(first), codeq.Task{Queue: "left"})
		begin := time.Now()
		_, err := simQueue(first).Claim(ctx, codeq.ClaimRequest{Queues: []string{"left"}, LeaseFor: 30 * time.Second})
		require.NoError(t, err)
		for range 2 {
			time.Sleep(9 * time.Second)
			each(c.members(), func(n *simNode) { n.crash(0) })
			each(c.members(), (*simNode).start)
			stopped := time.Now()
			c.awaitLeaders()
			begin = begin.Add(time.Since(stopped)) // the time without a leader does not count
		}
		took := reclaim(t, first, "left").Sub(begin)
		require.GreaterOrEqual(t, took, 28*time.Second)
		require.LessOrEqual(t, took, (30+2*5+1)*time.Second)
	})
}

// TestRenewalsPassOtherCalls: a lease is extended at once, although a large call and many smaller
// ones go to the same node over a slow link.
func TestRenewalsPassOtherCalls(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		time.Sleep(2 * time.Minute)
		leader, other := c.lead()
		q := simQueue(other)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: 5 * time.Second})
		require.NoError(t, err)
		c.net.SetBandwidth(other.name, leader.name, slowLink)
		var calls errgroup.Group
		for _, payloads := range append(slices.Repeat([][]int{{200 << 10}}, 10), []int{1 << 20, 1 << 20}) {
			calls.Go(func() error {
				var batch []codeq.Task
				for _, size := range payloads {
					batch = append(batch, codeq.Task{Queue: "large", Payload: make([]byte, size)})
				}
				_, err := q.ProduceBatch(ctx, batch)
				return err
			})
		}
		produced := make(chan error, 1)
		go func() { produced <- calls.Wait() }()
		extended := 0
		for begun := time.Now(); len(produced) == 0; extended++ {
			time.Sleep(time.Second)
			at := time.Now()
			require.NoError(t, q.Extend(ctx, l.Receipt, 5*time.Second))
			require.Less(t, time.Since(at), time.Second)
			require.Less(t, time.Since(begun), time.Minute)
		}
		require.NoError(t, errors.Join(<-produced, q.Complete(ctx, l.Receipt, nil)))
		require.GreaterOrEqual(t, extended, 5)
	})
}
