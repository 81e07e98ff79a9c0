package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/call"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/test/queuetest"
)

// In these tests, messages of a produce come late: after the life of their node, or after its
// removal.

// lateProduce produces two tasks on a node. A copy of the message with the second task is still on
// its way to the leader when another leader has stored the task. deliver makes the old leader lead
// again, and delivers the copy.
func (c *simCluster) lateProduce(t *testing.T) (caller, leader *simNode, deliver func()) {
	old, caller := c.lead()
	queuetest.Produce(t, simQueue(caller), codeq.Task{Queue: "a"}) // there is a connection
	c.net.SetCut(caller.name, old.name, true)
	done := queuetest.Producing(simQueue(caller), codeq.Task{Queue: "a"})
	time.Sleep(100 * time.Millisecond)
	leader = c.third(old, caller)
	require.NoError(t, simQueue(old).TransferLeadership(t.Context(), 0, leader.name))
	require.NoError(t, <-done)
	requireNode(t, leader, c.leader(0))
	return caller, leader, func() {
		require.NoError(t, simQueue(leader).TransferLeadership(t.Context(), 0, old.name))
		requireNode(t, old, c.newLeader(leader))
		c.net.Heal(false)
		time.Sleep(time.Second)
	}
}

// lateMessages produces on a node while its messages do not reach the leader of a shard. When
// another node leads and has stored the tasks, the producing node is killed and opened again. The
// old leader gets the messages of both lives when it leads again.
func (s *schedule) lateMessages(caller, old, next *simNode, shard int) {
	defer s.net.SetCut(caller.name, old.name, false)
	lead := func(n *simNode) bool {
		q, _ := next.queue()
		if q == nil {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		return q.TransferLeadership(ctx, shard, n.name) == nil
	}
	const pause = 100 * time.Millisecond // messages travel, and some are stored
	end := s.rush(caller)
	time.Sleep(pause)
	led := lead(next)
	if end(); !led || !caller.crash(100) { // all tasks are stored by then
		return
	}
	caller.raise()
	defer s.rush(caller)()
	time.Sleep(pause)
	if !lead(old) {
		return
	}
	s.note("%s leads shard %d again, and hears %s", old.name, shard, caller.name)
	s.happened("late message")
	s.net.SetCut(caller.name, old.name, false)
	time.Sleep(pause)
}

// requireReady checks the number of stored tasks.
func (c *simCluster) requireReady(t *testing.T, n uint64) {
	leader, _ := c.lead()
	require.Equal(t, codeq.Counts{Ready: n}, queuetest.CountsOf(t, simQueue(leader), "a"))
}

// drop ends a removed node.
func (c *simCluster) drop(old *simNode) {
	c.mu.Lock()
	c.nodes = slices.DeleteFunc(c.nodes, func(n *simNode) bool { return n == old })
	c.mu.Unlock()
	old.stop()
}

// TestProduceOfEarlierLife: a node is opened again and produces. After that, a late message with a
// produce of its earlier life is refused.
func TestProduceOfEarlierLife(t *testing.T) {
	for _, end := range []string{"closed", "killed"} {
		t.Run(end, func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				caller, _, deliver := c.lateProduce(t)
				if end == "closed" {
					caller.stop()
				} else {
					caller.crash(100)
				}
				caller.start()
				queuetest.Produce(t, simQueue(caller), codeq.Task{Queue: "a"})
				deliver()
				c.requireReady(t, 3)
			})
		})
	}
}

// TestProduceOfRemovedNode: a node is removed without noticing it. It learns this from the answer
// to a produce, and its late messages are refused. When a node with its name is added again, its
// produces are stored, once each.
func TestProduceOfRemovedNode(t *testing.T) {
	for _, added := range []bool{false, true} {
		t.Run(fmt.Sprint("added again ", added), func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				ctx := t.Context()
				caller, leader, deliver := c.lateProduce(t)
				q := simQueue(caller)
				require.NoError(t, simQueue(leader).RemoveNode(ctx, caller.name))
				_, err := q.Produce(ctx, codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrNotMember)
				c.requireReady(t, 2)
				if !added {
					deliver()
					c.requireReady(t, 2)
					c.drop(caller)
					return
				}
				caller.stop()
				caller.machine.Wipe()
				caller.join = true
				all := c.nodes
				c.nodes = []*simNode{leader} // the only node that it asks
				caller.start()
				c.nodes = all
				queuetest.Produce(t, simQueue(caller), codeq.Task{Queue: "a"})
				c.requireReady(t, 3)
				deliver()
				c.requireReady(t, 3)
			})
		})
	}
}

// lostAnswer produces two tasks on a node. The second is stored, and its answer does not arrive.
func (c *simCluster) lostAnswer(t *testing.T) (leader, caller *simNode, outcome <-chan error) {
	leader, caller = c.lead()
	queuetest.Produce(t, simQueue(caller), codeq.Task{Queue: "a"})
	c.net.SetCut(leader.name, caller.name, true)
	outcome = queuetest.Producing(simQueue(caller), codeq.Task{Queue: "a"})
	time.Sleep(100 * time.Millisecond)
	return leader, caller, outcome
}

// TestProduceAmidRemoval: a produce is stored, its answer is lost, and the node is removed before
// it tries again: the outcome is unknown.
func TestProduceAmidRemoval(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, caller, done := c.lostAnswer(t)
		require.NoError(t, simQueue(leader).RemoveNode(t.Context(), caller.name))
		c.net.Heal(true)
		require.ErrorIs(t, <-done, codeq.ErrUncertain)
		c.requireReady(t, 2)
		c.drop(caller)
	})
}

// TestProduceAmidFullDisk: a produce is stored, its answer is lost, and the leader's disk is full
// at the next try: the outcome is unknown until there is room.
func TestProduceAmidFullDisk(t *testing.T) {
	for _, room := range []bool{false, true} {
		t.Run(fmt.Sprint("room later ", room), func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				leader, _, done := c.lostAnswer(t)
				leader.fill(0)
				time.Sleep(store.LookEvery * time.Millisecond)
				_, err := simQueue(leader).Produce(context.Background(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrDiskFull)
				c.net.Heal(true)
				if time.Sleep(simCallTimeout / 3); room {
					leader.fill(simtest.DiskSize)
					require.NoError(t, <-done)
				} else {
					err = <-done
					require.ErrorIs(t, err, codeq.ErrUncertain)
					require.NotErrorIs(t, err, codeq.ErrDiskFull)
					leader.fill(simtest.DiskSize)
				}
				c.requireReady(t, 2)
			})
		})
	}
}

// TestLivesOfNodes: a late removal, after the node is a member again, ends no session. A node that
// has a smaller life number than before begins another life.
func TestLivesOfNodes(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		for i, caller := range []*simNode{leader, other} {
			q := simQueue(caller)
			queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint(i)})
			lifeOf := func() uint64 {
				numbers := *inspect.Of(q).Numbers(0)
				call := numbers.Begin()
				defer numbers.End(call.Seq)
				return call.Incarnation
			}
			life := lifeOf()
			require.NotZero(t, life)
			require.NoError(t, inspect.Of(simQueue(leader)).Leaders().Forget(t.Context(), 0, caller.name))
			queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint(i)})
			require.Equal(t, life, lifeOf())
			*inspect.Of(q).Numbers(0) = call.NewSession(life - 1)
			queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint(i)})
			require.Greater(t, lifeOf(), life)
			require.Equal(t, codeq.Counts{Ready: 3}, queuetest.CountsOf(t, q, fmt.Sprint(i)))
		}
	})
}
