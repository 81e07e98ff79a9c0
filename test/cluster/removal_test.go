package cluster_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// TestRemovalBesideDeadNode: a node that the others need for a majority is not removed, at any node
// and by any method. A dead node is removed.
func TestRemovalBesideDeadNode(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, live := c.lead()
		dead := c.third(leader, live)
		leader.produce(t, 10)
		dead.crash(100)
		for _, by := range []*simNode{leader, live} {
			for _, removed := range []*simNode{leader, live} {
				err := simQueue(by).RemoveNode(ctx, removed.name)
				require.ErrorIs(t, err, codeq.ErrNoMajority)
				require.ErrorContains(t, err, "node "+dead.name)
				require.ErrorContains(t, err, "1 of the 2 that would be left")
			}
		}
		require.ErrorIs(t, simQueue(live).RemoveNode(ctx, ""), codeq.ErrInvalid)
		live.produce(t, 10) // no member has changed
		require.Equal(t, 20, leader.count(t))

		// With another node in its place, the others no longer need it.
		joined := c.node(true)
		c.net.Listen(joined.name).Close()
		joining := make(chan error, 1)
		go func() {
			joining <- simQueue(leader).ReplaceNode(ctx, live.name, codeq.Peer{Node: joined.name, Address: joined.name})
		}()
		time.Sleep(time.Second) // until it waits for the node
		joined.start()
		require.NoError(t, <-joining)
		joined.produce(t, 10)
		require.Equal(t, 30, leader.count(t))
		require.NoError(t, simQueue(leader).RemoveNode(ctx, dead.name))

		require.Len(t, statusOf(t, joined).Shards[0].Replicas, 2)
		live.stop()
		c.mu.Lock()
		c.nodes = []*simNode{leader, joined}
		c.mu.Unlock()
	})
}

// TestRemovalLooksAtAllShards: a node that one shard needs for its majority stays a member of all
// shards: all shards are asked before any change.
func TestRemovalLooksAtAllShards(t *testing.T) {
	t.Parallel()
	simNodes(t, 0, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.found(3)
		by, needed, broken := c.nodes[0], c.nodes[1], c.nodes[2]
		needed.leaves = true
		for _, n := range c.nodes {
			n.start()
		}
		c.spread()
		c.nodes[0].produce(t, 10)
		for shard := range 3 {
			require.NoError(t, simQueue(by).TransferLeadership(ctx, shard, needed.name))
		}
		inspect.Of(simQueue(broken)).Group(2).Fail(queuetest.ErrBroken)
		time.Sleep(time.Second)
		members := func() (all [][]string) {
			for shard := range 3 {
				all = append(all, membersOf(by, shard))
			}
			return all
		}
		before := members()
		refused := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, codeq.ErrNoMajority)
			require.NotErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorContains(t, err, "shard 2")
			require.ErrorContains(t, err, "node n2: its replica has failed")
			time.Sleep(time.Second)
			require.Equal(t, before, members())
		}
		refused(simQueue(by).RemoveNode(ctx, needed.name))
		// A new node at the address of the other one comes only after the removal of that one.
		refused(simQueue(by).ReplaceNode(ctx, needed.name, codeq.Peer{Node: "n9", Address: needed.name}))
		refused(needed.close())
		needed.leaves = false
		needed.start()
		require.ErrorIs(t, broken.close(), codeq.ErrFailed)
		broken.start()
	})
}

// TestReplaceAtItsAddress: a node replaces another one at the same address. The old node is removed
// first.
func TestReplaceAtItsAddress(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, old := c.lead()
		leader.produce(t, 10)
		c.drop(old)
		n := newSimNode(c, old.name, false)
		require.NoError(t, c.openWith(n, func(o *codeq.Options) { o.Cluster.Node = "n9" }))
		require.NoError(t, simQueue(leader).ReplaceNode(context.Background(), old.name, codeq.Peer{Node: "n9", Address: old.name}))
		addresses := make(map[string]string)
		for _, r := range statusOf(t, n).Shards[0].Replicas {
			require.True(t, r.Voter, r.Node)
			require.Empty(t, r.LastError, r.Node)
			addresses[r.Node] = r.Address
		}
		want := map[string]string{"n9": old.name}
		for _, m := range c.members() {
			want[m.name] = m.name
		}
		require.Equal(t, want, addresses)
		c.nodes = append(c.nodes, n)
		n.produce(t, 10)
		require.Equal(t, 20, leader.count(t))
	})
}

// TestReplacementsAtOnce: two replacements at the same time, on different nodes, run one after the
// other. The number of nodes stays the same, also if both replace the same node.
func TestReplacementsAtOnce(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{true, false} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			by := c.members()
			olds := []*simNode{by[0], by[0]}
			if !same {
				olds[1] = by[1]
			}
			by[2].produce(t, 10)
			outcomes := make([]chan error, 2)
			for i, old := range olds {
				n := c.blank()
				c.nodes = append(c.nodes, n)
				outcomes[i] = make(chan error, 1)
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					outcomes[i] <- simQueue(by[1+i]).ReplaceNode(ctx, old.name, codeq.Peer{Node: n.name, Address: n.name})
				}()
			}
			errs := []error{<-outcomes[0], <-outcomes[1]}
			if same {
				require.True(t, errors.Is(errs[0], codeq.ErrNotMember) != errors.Is(errs[1], codeq.ErrNotMember), "%v", errs)
			}
			left := membersOf(by[2], 0)
			// A removed node may leave its own change of members unfinished: a new node then has no
			// vote.
			voters := slices.DeleteFunc(slices.Clone(left), func(m string) bool { return strings.HasSuffix(m, raft.Nonvoter.String()) })
			require.Len(t, voters, 3, "%v", errs)
			for _, n := range c.members() {
				if !slices.ContainsFunc(left, func(m string) bool { return strings.HasPrefix(m, n.name+"/") }) {
					c.drop(n)
				}
			}
			require.Equal(t, 10, by[2].count(t))
		})
	}
}
