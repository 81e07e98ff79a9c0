package cluster_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

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
