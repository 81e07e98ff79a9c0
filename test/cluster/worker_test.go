package cluster_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestWorkersOfCluster: any node lists the workers of all nodes and makes them quiet, also workers
// with claims that wait at other nodes. It returns the names of nodes that do not answer, after a
// short wait.
func TestWorkersOfCluster(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := t.Context()
		leader, other := c.lead()
		handled := make(chan string, 100) // names of workers
		goOn := make(chan struct{})
		runs := make(map[string]chan error)
		run, stop := context.WithCancel(ctx)
		for _, n := range c.members() {
			var m codeq.Mux
			codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
				handled <- "of " + n.name
				<-goOn
				return nil
			})
			ended := make(chan error, 1)
			runs[n.name] = ended
			go func() { ended <- simQueue(n).Run(run, &m, &codeq.RunOptions{Name: "of " + n.name, Concurrency: 3}) }()
		}
		time.Sleep(time.Second)
		list := func(by *simNode) (quiet []string, failed map[string]string) {
			failed = make(map[string]string)
			workers, err := simQueue(by).Workers(ctx)
			require.NoError(t, err)
			require.Len(t, workers, 3)
			for i, w := range workers {
				require.Equal(t, c.names()[i], w.Node, "in their order")
				if w.LastError != "" {
					failed[w.Node] = w.LastError
					require.Equal(t, codeq.WorkerInfo{Node: w.Node, LastError: w.LastError}, w)
					continue
				}
				require.Equal(t, "of "+w.Node, w.Name)
				require.Equal(t, []string{"a"}, w.Queues)
				require.Equal(t, 3, w.Concurrency)
				require.InDelta(t, 0, time.Since(w.Since), float64(time.Hour))
				if w.Quiet {
					quiet = append(quiet, w.Node)
				}
			}
			return quiet, failed
		}
		take := func(n int) map[string]int {
			by := make(map[string]int)
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Len(t, handled, n)
			for range n {
				by[<-handled]++
			}
			return by
		}
		quiet, failed := list(other)
		require.Empty(t, quiet)
		require.Empty(t, failed)

		// All workers but one are quiet: this one gets all tasks.
		require.NoError(t, simQueue(other).QuietWorkers(ctx, "of "+leader.name))
		require.NoError(t, simQueue(leader).QuietWorkers(ctx, "of "+other.name))
		require.ErrorIs(t, simQueue(leader).QuietWorkers(ctx, "of nobody"), codeq.ErrNotFound)
		quiet, _ = list(leader)
		require.ElementsMatch(t, []string{leader.name, other.name}, quiet)
		tasks := []codeq.Task{{Queue: "a"}, {Queue: "a"}, {Queue: "a"}, {Queue: "a"}}
		queuetest.Produce(t, simQueue(leader), tasks...)
		by := take(3)
		require.Len(t, by, 1)
		require.NotContains(t, by, "of "+leader.name)
		require.NotContains(t, by, "of "+other.name)

		// The fourth task waits: its worker is busy, and then quiet.
		require.NoError(t, simQueue(other).QuietWorkers(ctx, ""))
		close(goOn)
		take(0)
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, simQueue(leader), "a"))
		require.NoError(t, simQueue(other).ResumeWorkers(ctx, "of "+other.name))
		require.Equal(t, map[string]int{"of " + other.name: 1}, take(1))

		// A node that does not answer.
		c.net.Pause(other.name, true)
		begun := time.Now()
		quiet, failed = list(leader)
		require.Len(t, quiet, 2)
		require.Contains(t, failed, other.name)
		require.Contains(t, failed[other.name], other.name)
		require.LessOrEqual(t, time.Since(begun), simCallTimeout)
		err := simQueue(leader).ResumeWorkers(ctx, "")
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.ErrorContains(t, err, other.name)
		c.net.Pause(other.name, false)
		c.awaitLeaders()
		quiet, failed = list(leader)
		require.Empty(t, failed)
		require.Empty(t, quiet, "those that have answered have resumed")

		// A removed node can no longer quiet workers.
		require.NoError(t, simQueue(leader).RemoveNode(ctx, other.name))
		err = simQueue(other).QuietWorkers(ctx, "")
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.ErrorContains(t, err, "removed")
		workers, err := simQueue(leader).Workers(ctx)
		require.NoError(t, err)
		require.Len(t, workers, 2)
		for _, w := range workers {
			require.False(t, w.Quiet, w.Node)
		}
		stop()
		for name, ended := range runs {
			if err := <-ended; name != other.name {
				require.NoError(t, err)
			}
		}
		other.stop()
		c.mu.Lock()
		c.nodes = slices.DeleteFunc(c.nodes, func(n *simNode) bool { return n == other })
		c.mu.Unlock()
	})
}
