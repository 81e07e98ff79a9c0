package cluster_test

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestKindsInCluster: a follower without a handler of the kind leaves a task to a node that has
// one, over a change of the leader. The log of the handler travels to the leader.
func TestKindsInCluster(t *testing.T) {
	simCase(t, codeq.Options{Retention: time.Hour}, func(t *testing.T, c *simCluster) {
		leader, old := c.lead()
		other := c.third(leader, old)
		run := func(n *simNode, kind string, h func(context.Context, *codeq.Job[[]byte]) error) {
			mux := new(codeq.Mux)
			codeq.HandleKind(mux, "a", kind, h)
			q := simQueue(n)
			go func() {
				_ = q.Run(t.Context(), mux, &codeq.RunOptions{LeaseFor: 10 * time.Second, KeepLogs: slog.LevelInfo})
			}()
		}
		var wrong atomic.Int64
		run(old, "charge", func(context.Context, *codeq.Job[[]byte]) error { wrong.Add(1); return nil })
		ids := queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a", Kind: "ship", Group: "g"}, codeq.Task{Queue: "a", Kind: "charge", Group: "g"})
		unhandled := func() uint64 {
			infos, err := simQueue(other).Info(t.Context())
			require.NoError(t, err)
			return infos[0].Totals.Unhandled
		}
		c.until("tries without a handler", func() bool { return unhandled() >= 3 })
		c.transfer(other, 0, other)
		c.until("more of them", func() bool { return unhandled() >= 4 })
		require.Zero(t, wrong.Load())
		run(leader, "ship", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			codeq.LoggerFrom(ctx).Info("shipped", "by", "van")
			return nil
		})
		var info *codeq.TaskInfo
		c.until("the end of the tasks", func() bool {
			var err error
			if info, err = simQueue(old).Get(t.Context(), ids[1]); err != nil || info.State != codeq.Done {
				return false
			}
			info, err = simQueue(old).Get(t.Context(), ids[0])
			return err == nil && info.State == codeq.Done
		})
		require.EqualValues(t, 1, wrong.Load())
		require.Equal(t, 1, info.Attempts)
		require.Len(t, info.Logs, 1)
		require.Equal(t, "shipped by=van", info.Logs[0].Text)
		require.Equal(t, codeq.EventUnhandled, info.History[0].Outcome)
	})
}

// TestKindsOfNodes: with a handler of another kind on each node, all idle, each task soon comes to
// the node that has its handler, wherever the leader is, and however many queues a Run has.
func TestKindsOfNodes(t *testing.T) {
	for _, others := range []int{0, 40} {
		simCase(t, codeq.Options{Retention: time.Hour}, func(t *testing.T, c *simCluster) {
			leader, second := c.lead()
			nodes := []*simNode{leader, second, c.third(leader, second)}
			var handled atomic.Int64
			handle := func(context.Context, *codeq.Job[[]byte]) error { handled.Add(1); return nil }
			for i, n := range nodes {
				mux, q := new(codeq.Mux), simQueue(n)
				codeq.HandleKind(mux, "a", strconv.Itoa(i), handle)
				for other := range others {
					codeq.Handle(mux, fmt.Sprint("other ", other), handle)
				}
				go func() {
					_ = q.Run(t.Context(), mux, &codeq.RunOptions{LeaseFor: 10 * time.Second, UnhandledFor: 2 * time.Minute})
				}()
			}
			for i := range 4 * len(nodes) {
				queuetest.Produce(t, simQueue(second), codeq.Task{Queue: "a", Kind: strconv.Itoa(i % len(nodes)), LimitKey: strconv.Itoa(i)})
			}
			c.until("the end of the tasks", func() bool {
				n := queuetest.CountsOf(t, simQueue(second), "a")
				require.Zero(t, n.Dead)
				return n.Done == uint64(4*len(nodes))
			})
			require.EqualValues(t, 4*len(nodes), handled.Load())
		})
	}
}
