package cluster_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
)

// TestClusterRun: a worker ends its tasks, whichever node leads their shards by then.
func TestClusterRun(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	qs := threeNodes(t, codeq.Options{Shards: 1}, nil)
	_, err := qs[0].Stats(ctx) // the shard has a leader
	require.NoError(t, err)
	// leader waits until another node than not leads the shard.
	leader := func(not *codeq.Queue) *codeq.Queue {
		for {
			change := make([]<-chan struct{}, len(qs))
			for i, q := range qs {
				change[i] = inspect.Of(q).Node().Changed()
			}
			for _, q := range qs {
				if q != not && inspect.Of(q).Leads(0) {
					return q
				}
			}
			select {
			case <-change[0]:
			case <-change[1]:
			case <-change[2]:
			case <-ctx.Done():
				require.NoError(t, ctx.Err())
			}
		}
	}

	const tasks = 20
	var begun, handled, uncertain atomic.Int64
	all, ready := make(chan struct{}), make(chan struct{})
	mux := new(codeq.Mux)
	codeq.Handle(mux, "held", func(context.Context, *codeq.Job[int]) error {
		if begun.Add(1) == tasks {
			close(ready)
		}
		<-all
		handled.Add(1)
		return nil
	})
	codeq.Handle(mux, "quick", func(context.Context, *codeq.Job[int]) error {
		handled.Add(1)
		return nil
	})
	worker := leader(nil)
	ended := make(chan error, 1)
	runCtx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		ended <- worker.Run(runCtx, mux, &codeq.RunOptions{
			Concurrency: tasks,
			LeaseFor:    5 * time.Second,
			OnError: func(_ *codeq.Lease, err error) {
				if errors.Is(err, codeq.ErrUncertain) { // the leader was lost before the commit
					uncertain.Add(1)
					return
				}
				t.Error(err)
			},
		})
	}()
	produce := func(queue string, tasks int) {
		for n := range tasks {
			task, err := codeq.NewTask(queue, n)
			require.NoError(t, err)
			_, err = qs[n%len(qs)].Produce(ctx, task)
			require.NoError(t, err)
		}
	}
	produce("held", tasks)
	<-ready
	require.Eventually(t, func() bool { // the transfer may take too long
		return inspect.Of(worker).Group(0).Raft().LeadershipTransfer().Error() == nil
	}, 20*time.Second, 10*time.Millisecond)
	leader(worker)
	close(all)
	require.NoError(t, qs[1].WaitIdle(ctx))
	require.EqualValues(t, tasks, handled.Load())

	produce("quick", tasks) // claimed and completed from afar
	require.NoError(t, qs[1].WaitIdle(ctx))
	require.EqualValues(t, 2*tasks, handled.Load(), "each task is handled once")
	require.Zero(t, uncertain.Load())

	const many = 10 // times, while the leader changes
	for range many {
		from := leader(nil)
		var transfer sync.WaitGroup
		transfer.Go(func() { _ = inspect.Of(from).Group(0).Raft().LeadershipTransfer().Error() }) // refused if the leader has changed
		produce("quick", tasks)
		transfer.Wait()
	}
	require.NoError(t, qs[1].WaitIdle(ctx))
	again := handled.Load() - (2+many)*tasks
	require.GreaterOrEqual(t, again, int64(0), "no task is lost")
	require.LessOrEqual(t, again, uncertain.Load(), "no task is handled again whose completion was stored")
	stop()
	require.NoError(t, <-ended)
}

// TestRunClosedWithoutLeader: Close ends a Run that waits for leaders. The ctx of the Run goes on.
func TestRunClosedWithoutLeader(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		left, _ := c.lead()
		for _, n := range c.members() {
			if n != left {
				n.crash(100)
			}
		}
		mux := new(codeq.Mux)
		codeq.Handle(mux, "a", func(context.Context, *codeq.Job[int]) error { return nil })
		q, ran := simQueue(left), make(chan error)
		go func() { ran <- q.Run(context.Background(), mux, nil) }()
		synctest.Wait()
		go left.stop()
		err := <-ran
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.NotErrorIs(t, err, context.Canceled)
		synctest.Wait()
	})
}
