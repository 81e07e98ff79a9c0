package cluster_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// ended is the outcome of a call.
type ended struct {
	name string
	took time.Duration
	err  error
}

// TestCallsOfStuckShard: an entry of each shard is stuck, because the disks of a majority are full.
// Every call that waits only for the shard ends after CallTimeout, on every node, and returns the
// reason. Calls that wait on purpose end with their ctx. The test covers new methods of Queue
// without changes.
func TestCallsOfStuckShard(t *testing.T) {
	t.Parallel()
	withFullMajority(t, hidingRoom(codeq.Options{StallAfter: 2 * time.Second}), func(t *testing.T, _ *simCluster, nodes []*codeq.Queue, fill func(int64)) {
		live := queuetest.Produce(t, nodes[0], codeq.Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		var m codeq.Mux
		codeq.Handle(&m, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		fill(testkit.MinFree/4 - 1)
		var calls sync.WaitGroup
		results := make(chan ended, 1000)
		call := func(name string, verb func(context.Context) error) {
			calls.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 10*simCallTimeout)
				defer cancel()
				begun := time.Now()
				err := verb(ctx)
				results <- ended{name, time.Since(begun), err}
			})
		}
		stick := func(context.Context) error { // an entry in each of two shards, others behind it
			_, err := nodes[0].Produce(t.Context(), codeq.Task{Queue: "a"})
			return err
		}
		for range 16 { // enough for each shard
			call("stuck", stick)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(simCallTimeout / 4)
		for range 8 {
			call("behind", stick)
		}
		for _, q := range nodes {
			for name, verb := range queuetest.VerbsOf(t, q, &m, []codeq.Task{{Queue: "verbs"}, {Queue: "verbs"}}, []codeq.ID{live, live}) {
				switch name {
				case "ServeLocal": // serves until ctx ends
				case "Drain", "Undrain", "AddNode", "ReplaceNode": // later: they change the nodes
				case "Claim", "ClaimBatch":
					for what, noWait := range map[string]bool{name + ", waiting": false, name + ", NoWait": true} {
						call(what, func(ctx context.Context) error {
							_, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"none"}, NoWait: noWait})
							return err
						})
					}
				default:
					if queuetest.TakesContext(name) {
						call(name, verb)
					}
				}
			}
		}
		calls.Wait()
		close(results)
		uncertain := 0
		for r := range results {
			t.Logf("%-22s %8v %v", r.name, r.took.Round(time.Millisecond), r.err)
			switch r.name {
			case "Claim, waiting", "ClaimBatch, waiting", "Await", "WaitIdle", "WaitReady":
				require.ErrorIs(t, r.err, context.DeadlineExceeded, r.name)
				require.Equal(t, 10*simCallTimeout, r.took, r.name)
				continue
			case "Run":
				require.NoError(t, r.err)
				continue
			case "ClusterStatus", "Workers", "QuietWorkers", "ResumeWorkers": // of no shard
				continue
			case "ProcessInfo", "Health": // of this node
				require.NoError(t, r.err)
			case "Checkpoint": // waits three times for a leader
				require.LessOrEqual(t, r.took, 3*simCallTimeout+simCallTimeout/10)
				require.Error(t, r.err)
				continue
			case "Apply", "Configure", "Pause", "Resume": // which wait for each other, and may ask at the end
				require.ErrorIs(t, r.err, codeq.ErrNotLeader, r.name)
				require.LessOrEqual(t, r.took, simCallTimeout*5/4, r.name)
				continue
			case "stuck":
				if errors.Is(r.err, codeq.ErrUncertain) {
					uncertain++
				}
				fallthrough
			default:
				require.Error(t, r.err, r.name)
				require.Regexp(t, `shard \d.*node "n0" leads`, r.err.Error(), r.name)
				require.Regexp(t, `node "n1" has no room.*node "n2" has no room`, r.err.Error(), r.name)
				if r.name != "stuck" {
					require.ErrorIs(t, r.err, codeq.ErrNotLeader, r.name)
				}
			}
			require.LessOrEqual(t, r.took, simCallTimeout+simCallTimeout/10, r.name)
		}
		require.GreaterOrEqual(t, uncertain, 2, "one of each shard was proposed")
		for _, q := range nodes {
			verbs := queuetest.VerbsOf(t, q, &m, nil, []codeq.ID{live, live})
			for _, name := range []string{"AddNode", "ReplaceNode", "Drain", "Undrain"} {
				ctx, cancel := context.WithTimeout(t.Context(), 2*simCallTimeout)
				begun := time.Now()
				err := verbs[name](ctx)
				took := time.Since(begun)
				cancel()
				t.Logf("%-22s %8v %v", name, took.Round(time.Millisecond), err)
				require.LessOrEqual(t, took, 2*simCallTimeout+simCallTimeout/10, name)
				if name == "AddNode" || name == "ReplaceNode" {
					require.Error(t, err, name)
				}
			}
		}
		fill(simtest.DiskSize)
		before := time.Now()
		require.NoError(t, nodes[1].WaitReady(t.Context()))
		require.Less(t, time.Since(before), simCallTimeout)
		queuetest.Produce(t, nodes[1], codeq.Task{Queue: "a"})
		require.EqualValues(t, uncertain+1, queuetest.CountsOf(t, nodes[0], "a").Ready, "what was uncertain is stored once, and nothing that was behind it")
	})
}

// TestRoomOfMajority: the leader of a shard knows the free space of the other nodes. It refuses a
// call before its entry is stuck, if a majority cannot store it; the error has the names of the
// nodes. Other calls work, and all calls work when there is room.
func TestRoomOfMajority(t *testing.T) {
	t.Parallel()
	withFullMajority(t, codeq.Options{}, func(t *testing.T, _ *simCluster, nodes []*codeq.Queue, fill func(int64)) {
		ctx := t.Context()
		refused := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, codeq.ErrDiskFull)
			require.ErrorContains(t, err, `node "n1": `)
			require.ErrorContains(t, err, `node "n2": `)
			require.False(t, strings.Contains(err.Error(), `node "n0"`), err)
		}
		for range 6 * len(nodes) {
			queuetest.Produce(t, nodes[0], codeq.Task{Queue: "a"})
		}
		for level, free := range testkit.FreeAt {
			fill(free)
			for _, q := range nodes {
				begun := time.Now()
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
				if level > 1 {
					refused(err)
				} else {
					require.NoError(t, err)
					fill(testkit.FreeAt[3])
					queuetest.Complete(t, q, l)
					fill(free)
				}
				_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
				if level > 0 {
					refused(err)
				} else {
					require.NoError(t, err)
				}
				require.Positive(t, queuetest.CountsOf(t, q, "a").Ready)
				_, err = q.Info(ctx)
				require.NoError(t, err)
				for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
					require.NoError(t, err)
				}
				require.Less(t, time.Since(begun), simCallTimeout+20*time.Second)
			}
		}
		refused(nodes[0].RemoveNode(ctx, "n2"))
		fill(simtest.DiskSize)
		for _, q := range nodes {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
	})
}

// TestWaitsOutlastLeaders: calls that wait on purpose go on while there is no leader, also if they
// begin in that time, and end with their ctx.
func TestWaitsOutlastLeaders(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		_, other := c.lead()
		q := simQueue(other)
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		outcomes := make(chan error, 6)
		wait := func(ctx context.Context) {
			for _, verb := range []func() error{
				func() error { _, err := q.Await(ctx, id); return err },
				func() error { return q.WaitIdle(ctx) },
				func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"later"}}); return err },
			} {
				go func() { outcomes <- verb() }()
			}
		}
		wait(t.Context())
		synctest.Wait()
		pause := func(paused bool) {
			for _, n := range c.members() {
				if n != other {
					c.net.Pause(n.name, paused)
				}
			}
		}
		pause(true)
		time.Sleep(2 * simCallTimeout)
		wait(t.Context())
		time.Sleep(4 * simCallTimeout)
		require.Empty(t, outcomes)

		ctx, cancel := context.WithTimeout(t.Context(), 2*simCallTimeout)
		defer cancel()
		wait(ctx)
		for range 3 {
			require.ErrorIs(t, <-outcomes, context.DeadlineExceeded)
		}
		require.Equal(t, context.DeadlineExceeded, ctx.Err())
		require.Empty(t, outcomes)

		pause(false)
		require.NoError(t, q.WaitReady(t.Context()))
		queuetest.Complete(t, q, queuetest.Claim(t, q, "a"))
		for range 4 { // Await, WaitIdle
			require.NoError(t, <-outcomes)
		}
		for range 2 {
			queuetest.Produce(t, q, codeq.Task{Queue: "later"})
			require.NoError(t, <-outcomes)
		}
	})
}
