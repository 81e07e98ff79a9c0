package cluster_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/inspect"
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

// TestObserverOfCluster: only the node that leads the shard reports a change. Only the node that
// runs a handler reports the handler, with the time that its task was ready.
func TestObserverOfCluster(t *testing.T) {
	var mu sync.Mutex
	sum := make(map[string]codeq.QueueDelta)
	var handlers []codeq.HandlerSample
	observe := func(o *codeq.Observation) {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range o.Queues {
			to := sum[d.Queue]
			to.Produced, to.Claimed, to.Completed = to.Produced+d.Produced, to.Claimed+d.Claimed, to.Completed+d.Completed
			sum[d.Queue] = to
		}
		handlers = append(handlers, o.Handlers...)
	}
	simCase(t, codeq.Options{Observer: observe}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		time.Sleep(time.Minute)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { time.Sleep(time.Second); return nil })
		handle := func(n *simNode) {
			stop := queuetest.Run(simQueue(n), &m, codeq.RunOptions{Concurrency: 1})
			require.NoError(t, simQueue(n).WaitIdle(t.Context(), "a"))
			require.NoError(t, stop())
		}
		handle(other)
		require.NoError(t, simQueue(other).TransferLeadership(t.Context(), 0, other.name))
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
		handle(leader)
		time.Sleep(guard.TellPause)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]codeq.QueueDelta{"a": {Totals: codeq.Totals{Produced: 3, Claimed: 3, Completed: 3}}}, sum)
		require.Len(t, handlers, 3)
		for i, waited := range []time.Duration{time.Minute, time.Minute + time.Second, 0} {
			require.InDelta(t, waited, handlers[i].Wait, float64(time.Second), i)
			require.Equal(t, time.Second, handlers[i].Took)
			require.Equal(t, codeq.VerdictCompleted, handlers[i].Verdict)
		}
	})
}

// TestClusterProcessInfo: only the leader of a shard counts it, also after a change of the leader.
func TestClusterProcessInfo(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		for shard := range 3 {
			queuetest.Produce(t, simQueue(c.nodes[0]), codeq.Task{Queue: "a", LimitKey: queuetest.KeyOf("a", shard, 3)})
		}
		require.NoError(t, simQueue(c.nodes[1]).TransferLeadership(t.Context(), 0, "n2"))
		c.awaitReady()
		for i, leads := range [][]int{{}, {1}, {0, 2}} {
			p, err := simQueue(c.nodes[i]).ProcessInfo(t.Context())
			require.NoError(t, err)
			require.Equal(t, c.nodes[i].name, p.Node)
			for shard, s := range p.Shards {
				require.Equal(t, slices.Contains(leads, shard), s.Leads)
				if !s.Leads {
					require.Empty(t, s.Queues)
					continue
				}
				require.Len(t, s.Queues, 1)
				require.EqualValues(t, 1, s.Queues[0].Counts.Ready)
			}
		}
	})
}

// TestInterestsEnd: the last subscription of a cluster ends, by its Close or with its node. Some
// seconds later no entry carries events any more. A subscription that begins meanwhile misses
// nothing.
func TestInterestsEnd(t *testing.T) {
	simCase(t, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		wanted := func() (all engine.KindSet) {
			for _, n := range c.members() {
				q := simQueue(n)
				if q == nil {
					continue // it is down
				}
				for shard := range inspect.Of(q).Shards() {
					if inspect.Of(q).Leads(shard) {
						require.NoError(t, inspect.Of(q).Owner(shard, func(o *inspect.Owner) error { all |= o.Rules.Mail.Interested; return nil }))
					}
				}
			}
			return all
		}
		subscribe := func(n int) *codeq.Subscription {
			sub, err := simQueue(c.members()[n]).Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProduced}})
			require.NoError(t, err)
			return sub
		}
		require.Zero(t, wanted())
		first, second := subscribe(0), subscribe(1)
		require.Equal(t, engine.KindSet(1<<codeq.EventProduced), wanted())
		first.Close()
		time.Sleep(time.Minute)
		require.NotZero(t, wanted(), "another node has one")
		second.Close()
		for range 30 {
			time.Sleep(time.Second)
			sub := subscribe(2)
			queuetest.Produce(t, simQueue(c.members()[0]), codeq.Task{Queue: "a"})
			time.Sleep(time.Second)
			require.Len(t, queuetest.Buffered(sub), 1)
			sub.Close()
		}
		time.Sleep(time.Minute)
		require.Zero(t, wanted())

		subscribe(2)
		require.NotZero(t, wanted())
		require.NoError(t, c.members()[2].close())
		c.members()[2].start()
		c.awaitLeaders()
		require.NotZero(t, wanted())
		time.Sleep(time.Minute)
		require.Zero(t, wanted(), "an earlier life wanted them")

		// The process is killed, and the leaders change.
		for _, n := range c.members() {
			go subscribe(slices.Index(c.members(), n)).Next(t.Context())
			n.crash(100)
			c.awaitLeaders()
			require.NotZero(t, wanted())
			n.start()
			c.awaitLeaders()
		}
		for i := range 20 { // at about the time when the interests end
			time.Sleep(500 * time.Millisecond)
			sub := subscribe(i % 3)
			if i%5 == 0 {
				_ = simQueue(c.members()[1]).TransferLeadership(t.Context(), i%2, "")
				c.awaitLeaders()
			}
			queuetest.Produce(t, simQueue(c.members()[0]), codeq.Task{Queue: "a"})
			time.Sleep(time.Second)
			require.Len(t, queuetest.Buffered(sub), 1)
			sub.Close()
		}
		time.Sleep(time.Minute)
		require.Zero(t, wanted(), "killed processes wanted them")
	})
}

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
