package cluster_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

const (
	slowLink   = 512 << 10 // bytes per second
	largeEntry = 6 << 20   // takes longer than Raft's time limit of a message
)

// fallBehind cuts a node off until it lacks large entries, and then gives it slow links. It returns
// the number of missing bytes.
func (c *simCluster) fallBehind(leader, victim *simNode) (lacks int64) {
	c.net.Isolate(victim.name, c.names())
	produce := func(tasks int) {
		batch := make([]codeq.Task, tasks)
		for i := range batch {
			batch[i] = codeq.Task{Queue: "a", Payload: make([]byte, 1<<20)}
		}
		_, err := simQueue(leader).ProduceBatch(context.Background(), batch)
		require.NoError(c.t, err)
		lacks += int64(tasks) << 20
	}
	for range 8 {
		produce(1)
	}
	produce(largeEntry >> 20)
	for range 3 {
		produce(1)
	}
	c.net.Heal(true)
	for _, n := range c.members() {
		c.net.SetBandwidth(n.name, victim.name, slowLink)
	}
	return lacks
}

// heldFor is the length of a lease without renewals. It is shorter than the transfer.
const heldFor = 4 * time.Second

// holdLease starts a Run of the node that works on a task until end is called. end checks that the
// lease was kept.
func (n *simNode) holdLease(t *testing.T) (end func()) {
	var m codeq.Mux
	began, release := make(chan bool, 10), make(chan bool)
	codeq.Handle(&m, "held", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
		began <- true
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	queuetest.Produce(t, simQueue(n), codeq.Task{Queue: "held", Payload: []byte("held")})
	stop := queuetest.Run(simQueue(n), &m, codeq.RunOptions{LeaseFor: heldFor})
	<-began
	return func() {
		t.Helper()
		counts := queuetest.CountsOf(t, simQueue(n), "held")
		close(release)
		require.NoError(t, stop())
		require.Equal(t, codeq.Counts{Leased: 1}, counts)
		require.Empty(t, began, "it is delivered once")
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, simQueue(n), "held"))
	}
}

// requireContact checks that the node had contact with its leader within some HeartbeatTimeouts.
func (n *simNode) requireContact(t *testing.T, timeouts time.Duration) {
	t.Helper()
	q := simQueue(n)
	last := inspect.Of(q).Group(0).Raft().LastContact()
	require.Less(t, time.Since(last), timeouts*optionsOf(q).Cluster.HeartbeatTimeout)
}

// TestBehindOverSlowLink: a node that lacks large entries catches up over a slow link: a message of
// all entries, or even of one, would take too long. Each entry is sent once. The leader has few of
// them in memory, stays leader, and its callers do not wait. The node has contact with its leader
// during the transfer, and a Run on it keeps its lease.
func TestBehindOverSlowLink(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		leader, victim := c.lead()
		behind, ahead := inspect.Of(simQueue(victim)).Group(0), inspect.Of(simQueue(leader)).Group(0)
		term := ahead.Raft().CurrentTerm()
		lacks := c.fallBehind(leader, victim)
		before := c.net.Sent(leader.name, victim.name)
		var loaded, most atomic.Int64
		leader.machine.WatchReads(func(bytes int) {
			held := loaded.Add(int64(bytes)) - (c.net.Sent(leader.name, victim.name) - before)
			most.Store(max(most.Load(), held))
		})
		release := victim.holdLease(t)
		begun := time.Now()
		for behind.Applied() < ahead.Applied() {
			victim.requireContact(t, 2)
			at := time.Now()
			queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "b"})
			require.Less(t, time.Since(at), 100*time.Millisecond)
			time.Sleep(200 * time.Millisecond)
			require.Less(t, time.Since(begun), time.Duration(lacks/slowLink)*time.Second*5/4)
		}
		require.Greater(t, time.Since(begun), 4*heldFor)
		release()
		require.Less(t, c.net.Sent(leader.name, victim.name)-before, lacks*5/4)
		require.Less(t, most.Load(), int64(largeEntry+1<<20))
		require.Greater(t, loaded.Load(), lacks, "reads are seen")
		require.Equal(t, term, ahead.Raft().CurrentTerm())
	})
}

// TestVoteBesideLargeEntry: a node votes while it receives a large entry.
func TestVoteBesideLargeEntry(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		leader, victim := c.lead()
		c.fallBehind(leader, victim)
		time.Sleep(20 * time.Second) // 8 MiB take 16 s
		leader.crash(0)
		c.requireElection(t, leader)
	})
}

// requireElection checks that the others elect a leader within seconds.
func (c *simCluster) requireElection(t *testing.T, old *simNode) {
	t.Helper()
	begun := time.Now()
	c.until("an election", func() bool {
		return slices.ContainsFunc(c.members(), func(n *simNode) bool {
			q := simQueue(n)
			return n != old && q != nil && inspect.Of(q).Group(0).Raft().State() == raft.Leader
		})
	})
	require.Less(t, time.Since(begun), 5*time.Second)
}

// TestVoteAwaitsCatchUp: a node that is added over a slow link gets a vote when it lacks no more
// than four messages, even if these have few entries.
func TestVoteAwaitsCatchUp(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		leader, other := c.lead()
		const entries, close = 24, 4 * 4 // entries of 1 MiB; a message has at most 4 MiB
		for range entries {
			queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a", Payload: make([]byte, 1<<20)})
		}
		added := c.node(false)
		for _, m := range c.members() {
			c.net.SetBandwidth(m.name, added.name, slowLink)
		}
		added.start()
		outcome := make(chan error, 1)
		go func() {
			outcome <- simQueue(other).AddNode(context.Background(), codeq.Peer{Node: added.name, Address: added.name})
		}()
		ahead, behind := inspect.Of(simQueue(leader)).Group(0), inspect.Of(simQueue(added)).Group(0)
		for begun := time.Now(); !leader.knowsAll([]*simNode{added}); time.Sleep(10 * time.Millisecond) {
			require.Less(t, time.Since(begun), time.Duration(2*entries<<20/slowLink)*time.Second)
		}
		require.LessOrEqual(t, ahead.Applied(), behind.Applied()+close)
		require.NoError(t, <-outcome)
		c.nodes = append(c.nodes, added)
	})
}

// TestVoteAwaitsFiles: a cluster began as a queue by itself. A node that is added to it gets a vote
// only when it has the files of the store: the log does not have their content.
func TestVoteAwaitsFiles(t *testing.T) {
	t.Parallel()
	simNodes(t, 0, codeq.Options{}, func(t *testing.T, c *simCluster) {
		c.found(1)
		first := c.nodes[0]
		q := first.alone(t)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		require.NoError(t, q.Close())
		c.begin(first)
		added := c.node(false)
		c.net.SetBandwidth(first.name, added.name, 1<<10)
		added.start()
		outcome := make(chan error, 1)
		go func() {
			outcome <- simQueue(first).AddNode(context.Background(), codeq.Peer{Node: added.name, Address: added.name})
		}()
		behind := inspect.Of(simQueue(added)).Group(0)
		for !first.knowsAll([]*simNode{added}) {
			time.Sleep(time.Millisecond)
		}
		require.NotZero(t, behind.Applied())
		require.NoError(t, <-outcome)
		c.nodes = append(c.nodes, added)
	})
}

// TestJoinLastsWhileItGetsFurther: a node that joins over a slow link gets its files, however long
// that takes.
func TestJoinLastsWhileItGetsFurther(t *testing.T) {
	t.Parallel()
	simNodes(t, 0, codeq.Options{}, func(t *testing.T, c *simCluster) {
		const tasks, rate = 12, 32 << 10 // tasks of 1 MiB; bytes per second
		c.found(1)
		first := c.nodes[0]
		q := first.alone(t)
		queuetest.Produce(t, q, chanceBatch(c.rng, tasks, 1<<20)...)
		require.NoError(t, q.Close())
		c.begin(first)
		c.net.SetBandwidth(first.name, "n1", rate)
		begun := time.Now()
		c.another()
		require.Greater(t, time.Since(begun), tasks<<20/rate*time.Second)
		require.Greater(t, time.Since(begun), 6*time.Minute)
	})
}
