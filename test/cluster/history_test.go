package cluster_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestHistoryInCluster: all nodes show the worker of a task and the progress from its handler,
// whichever node leads the shard and whichever runs the handler. The last progress is stored with
// the outcome.
func TestHistoryInCluster(t *testing.T) {
	simCase(t, codeq.Options{Retention: time.Hour}, func(t *testing.T, c *simCluster) {
		q := func(n int) *codeq.Queue { return simQueue(c.nodes[n]) }
		var fails error
		steps := make(chan int64)
		mux := func() *codeq.Mux {
			m := new(codeq.Mux)
			codeq.Handle(m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				for n := range steps {
					if n == 0 {
						break
					}
					if err := errors.Join(codeq.ReportProgress(ctx, n, 9, "step"), codeq.SetMetadata(ctx, "found", j.Metadata["found"]+"x")); err != nil {
						return err
					}
				}
				return fails
			})
			return m
		}
		// attempt makes a node work on a task, and calls look while its handler runs.
		attempt := func(by int, look func()) {
			stop := queuetest.Run(q(by), mux(), codeq.RunOptions{Name: c.nodes[by].name, Concurrency: 1})
			steps <- 1
			steps <- 2
			time.Sleep(3 * time.Second)
			look()
			steps <- 3
			steps <- 0
			time.Sleep(time.Second)
			require.NoError(t, stop())
		}
		leader, follower := 0, 1
		for c.leader(0) != c.nodes[leader] {
			leader, follower = leader+1, leader
		}
		id := queuetest.Produce(t, q(0), codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})[0]
		fails = codeq.RetryAfter(time.Hour, errors.New("no"))
		other := (follower + 1) % 3
		sub, err := q(other).Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProgress}})
		require.NoError(t, err)
		for by := range c.nodes {
			require.NoError(t, q(by).SetRunAt(t.Context(), id, time.Time{}))
			if by == 2 {
				fails = nil
			}
			attempt(by, func() {
				for n := range c.nodes {
					info := queuetest.InfoOf(t, q(n), id)
					require.Equal(t, codeq.Leased, info.State)
					require.Equal(t, c.nodes[by].name, info.History[len(info.History)-1].Worker)
					require.EqualValues(t, 2, info.Progress.Done)
				}
			})
			for done := int64(0); done < 3; { // the first two reports may be one
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				e, err := sub.Next(ctx)
				cancel()
				require.NoError(t, err)
				require.Greater(t, e.Progress.Done, done)
				require.Equal(t, id, e.ID)
				done = e.Progress.Done
			}
			info := queuetest.InfoOf(t, q(by), id)
			require.EqualValues(t, 3, info.Progress.Done)
			require.Len(t, info.Metadata["found"], by+1)
		}
	})
}
