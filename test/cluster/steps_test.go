package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestStepsInCluster: the leader of a task's shard changes between its steps, and then the node of
// its handler dies. Finished steps are not run again, there or elsewhere.
func TestStepsInCluster(t *testing.T) {
	const steps = 6
	simCase(t, codeq.Options{Retention: time.Hour}, func(t *testing.T, c *simCluster) {
		leader, dying := c.lead()
		other := c.third(leader, dying)
		var mu sync.Mutex
		calls := make(map[string]int)
		reached := make(chan int, steps)
		handler := func(stopAt int) func(context.Context, *codeq.Job[[]byte]) error {
			return func(ctx context.Context, _ *codeq.Job[[]byte]) error {
				for i := range steps {
					if i == stopAt {
						reached <- i
						<-ctx.Done()
						return ctx.Err()
					}
					name := fmt.Sprint("step ", i)
					got, err := codeq.Step(ctx, name, func(context.Context) (string, error) {
						mu.Lock()
						defer mu.Unlock()
						calls[name]++
						return name, nil
					})
					if err != nil {
						return err
					}
					if got != name {
						t.Errorf("%s returned %q", name, got)
					}
					if stopAt < steps {
						reached <- i
						time.Sleep(time.Second) // the leader changes meanwhile
					}
				}
				return codeq.Sleep(ctx, "pause", time.Minute)
			}
		}
		run := func(n *simNode, stopAt int) {
			mux := new(codeq.Mux)
			codeq.Handle(mux, "a", handler(stopAt))
			q := simQueue(n)
			go func() { _ = q.Run(t.Context(), mux, &codeq.RunOptions{LeaseFor: 10 * time.Second}) }()
		}
		run(dying, steps-1)
		id := queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"})[0]
		for next := range steps - 1 {
			require.Equal(t, next, <-reached)
			to := other
			if c.leader(0) == other {
				to = leader
			}
			c.transfer(to, 0, to)
		}
		require.Equal(t, steps-1, <-reached)
		info, err := simQueue(other).Get(t.Context(), id)
		require.NoError(t, err)
		require.Len(t, info.Steps, steps-1)
		dying.crash(0)
		run(other, steps)
		c.until("the end of the task", func() bool {
			info, err = simQueue(other).Get(t.Context(), id)
			return err == nil && info.State == codeq.Done
		})
		require.Len(t, info.Steps, steps+1)
		require.Len(t, calls, steps)
		for name, n := range calls {
			require.Equal(t, 1, n, name)
		}
	})
}

// TestSignalsInCluster: signals come from any node, before and after the leader of the task's shard
// has changed or died, and a task that waits goes on at each.
func TestSignalsInCluster(t *testing.T) {
	simCase(t, codeq.Options{Retention: time.Hour}, func(t *testing.T, c *simCluster) {
		leader, dying := c.lead()
		other := c.third(leader, dying)
		names := []string{"a", "b", "c", "d"}
		for _, n := range []*simNode{leader, dying, other} {
			mux := new(codeq.Mux)
			codeq.Handle(mux, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				for _, name := range names {
					got, err := codeq.WaitSignal[string](ctx, name, time.Hour)
					if err != nil {
						return err
					}
					if got != name {
						t.Errorf("signal %s is %q", name, got)
					}
				}
				return nil
			})
			q := simQueue(n)
			go func() { _ = q.Run(t.Context(), mux, &codeq.RunOptions{LeaseFor: 10 * time.Second}) }()
		}
		id := queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"})[0]
		waits := func(steps int) {
			c.until("the wait for a signal", func() bool {
				info, err := simQueue(other).Get(t.Context(), id)
				return err == nil && info.State == codeq.Scheduled && len(info.Steps) == steps
			})
		}
		signal := func(n *simNode, name string) {
			require.NoError(t, simQueue(n).Signal(t.Context(), id, name, name))
			require.ErrorIs(t, simQueue(other).Signal(t.Context(), id, name, name), codeq.ErrDuplicate)
		}
		waits(1)
		signal(leader, "c") // early
		signal(dying, "a")
		waits(2)
		c.transfer(dying, 0, dying)
		c.until("the other leader", func() bool { return c.leader(0) == dying })
		require.ErrorIs(t, simQueue(other).Signal(t.Context(), id, "c", "again"), codeq.ErrDuplicate)
		signal(other, "b")
		waits(4) // it has taken "c"
		dying.crash(0)
		c.until("another leader", func() bool {
			err := simQueue(other).Signal(t.Context(), id, "c", "again")
			return errors.Is(err, codeq.ErrDuplicate)
		})
		require.NoError(t, simQueue(other).Signal(t.Context(), id, "d", "d"))
		c.until("the end of the task", func() bool {
			info, err := simQueue(other).Get(t.Context(), id)
			return err == nil && info.State == codeq.Done
		})
	})
}
