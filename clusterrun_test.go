package codeq

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A worker ends its tasks wherever their shards are led by then.
func TestClusterRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	qs := threeNodes(t, Options{Shards: 1})
	_, err := qs[0].Stats(ctx) // the shard has a leader
	require.NoError(t, err)
	leader := func(other *Queue) *Queue {
		for {
			for _, q := range qs {
				if q != other && q.shard(0) != nil {
					return q
				}
			}
			select {
			case <-qs[0].node.routes.next():
			case <-time.After(10 * time.Millisecond): // it may be another's that has changed
			}
			require.NoError(t, ctx.Err())
		}
	}

	const tasks = 20
	var begun, handled atomic.Int64
	all, ready := make(chan struct{}), make(chan struct{})
	mux := new(Mux)
	Handle(mux, "held", func(context.Context, *Job[int]) error {
		if begun.Add(1) == tasks {
			close(ready)
		}
		<-all
		handled.Add(1)
		return nil
	})
	Handle(mux, "quick", func(context.Context, *Job[int]) error {
		handled.Add(1)
		return nil
	})
	worker := leader(nil)
	ended := make(chan error, 1)
	runCtx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		ended <- worker.Run(runCtx, mux, &RunOptions{
			Concurrency: tasks,
			OnError:     func(_ *Lease, err error) { t.Error(err) },
		})
	}()
	produce := func(queue string) {
		for n := range tasks {
			task, err := NewTask(queue, n)
			require.NoError(t, err)
			_, err = qs[n%len(qs)].Produce(ctx, task)
			require.NoError(t, err)
		}
	}
	produce("held")
	<-ready
	require.NoError(t, worker.replicas[0].raft.LeadershipTransfer().Error())
	leader(worker)
	close(all)
	require.NoError(t, qs[1].WaitIdle(ctx))
	require.EqualValues(t, tasks, handled.Load())

	produce("quick") // claimed and completed from afar
	require.NoError(t, qs[1].WaitIdle(ctx))
	require.EqualValues(t, 2*tasks, handled.Load(), "each task is handled once")
	stop()
	require.NoError(t, <-ended)
}
