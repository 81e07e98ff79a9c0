package cluster_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestFullDiskOfLeader: only the disk of the leader of a shard counts, whichever node gets the
// call. The disk of a follower may be so full that a leader with that disk would refuse tasks.
func TestFullDiskOfLeader(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{MinFreeBytes: testkit.MinFree}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		leader, other := c.lead()
		nodes := []*codeq.Queue{simQueue(leader), simQueue(other)}
		ctx := context.Background()
		fill := func(n *simNode, free int64) {
			n.fill(free)
			time.Sleep(2 * store.LookEvery * time.Millisecond)
		}
		produce := func() (errs [2]error) {
			for i, q := range nodes {
				_, errs[i] = q.Produce(ctx, codeq.Task{Queue: "a"})
			}
			return errs
		}
		cycle := func() {
			for _, q := range nodes {
				queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "a"))
			}
		}
		for range 3 {
			require.Equal(t, [2]error{}, produce())
		}
		full := func() {
			for _, err := range produce() {
				require.ErrorIs(t, err, codeq.ErrDiskFull)
			}
		}

		fill(leader, testkit.MinFree-1)
		full()
		cycle()
		fill(leader, testkit.MinFree/2-1)
		full()
		l, err := nodes[1].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.ErrorIs(t, err, codeq.ErrDiskFull, "%v", l)
		requireNode(t, leader, c.leader(0))

		fill(leader, simtest.DiskSize)
		fill(other, testkit.MinFree/2-1)
		require.Equal(t, [2]error{}, produce())
		cycle()
		fill(other, simtest.DiskSize)
	})
}

// TestFollowerWithFullDisk: a follower with a full disk refuses the messages of its leader, and
// writes no part of them. The other nodes go on. The follower catches up when there is room, by the
// log if the leader still has it.
func TestFollowerWithFullDisk(t *testing.T) {
	t.Parallel()
	for _, truncated := range []bool{false, true} {
		t.Run(fmt.Sprint("truncated ", truncated), func(t *testing.T) {
			simCase(t, codeq.Options{MinFreeBytes: testkit.MinFree}, func(t *testing.T, c *simCluster) {
				time.Sleep(2 * time.Minute) // the leader is at home
				leader, victim := c.lead()
				produce := func(n int) {
					for range n {
						begun := time.Now()
						queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a", Payload: make([]byte, 8<<10)})
						require.Less(t, time.Since(begun), time.Second)
					}
				}
				truncate := func() {
					c.snapshot(leader, 0, 5)
					time.Sleep(time.Second)
				}
				produce(20)
				truncate()
				behind := inspect.Of(simQueue(victim)).Group(0)
				victim.fill(testkit.MinFree/4 - 1)
				time.Sleep(store.LookEvery * time.Millisecond)
				produce(1)
				victim.breakDisk(func(op, name string) bool { return op == "write" && strings.Contains(name, "/raft/") })
				produce(100)
				if truncated {
					truncate()
					produce(10)
				}
				var reads atomic.Int64 // of the log of the leader
				leader.breakDisk(func(op, name string) bool {
					if op == "read" {
						reads.Add(1)
					}
					return false
				})
				const tries = int64(10 * time.Minute / (250 * time.Millisecond))
				sent := c.net.Sent(leader.name, victim.name)
				time.Sleep(10 * time.Minute)
				produce(1)
				require.Less(t, reads.Load(), tries*(cluster.MaxAppend+6))
				require.Less(t, c.net.Sent(leader.name, victim.name)-sent, tries*(16<<10), "an entry at a time")
				require.NoError(t, behind.Failure())
				requireNode(t, leader, c.leader(0))
				ahead := inspect.Of(simQueue(leader)).Group(0)
				require.Greater(t, ahead.Applied(), behind.Applied()+100)

				victim.breakDisk(func(string, string) bool { return false })
				victim.fill(simtest.DiskSize)
				wait := 2 * time.Second
				if truncated {
					wait = 12 * time.Second // Raft waits as long before it tries a snapshot again
				}
				time.Sleep(wait)
				require.Equal(t, ahead.Applied(), behind.Applied())
				require.Equal(t, truncated, behind.Raft().Stats()["last_snapshot_index"] != "0")
			})
		})
	}
}

// TestLeaderWithFullDisk: a node with a full disk leads no shard for long.
func TestLeaderWithFullDisk(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{MinFreeBytes: testkit.MinFree}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		leader, victim := c.lead()
		victim.fill(testkit.MinFree/4 - 1)
		time.Sleep(store.LookEvery * time.Millisecond)
		require.NoError(t, inspect.Of(simQueue(leader)).Group(0).Raft().LeadershipTransferToServer(
			inspect.Of(simQueue(victim)).Node().Self().ServerID(), raft.ServerAddress(victim.name)).Error())
		require.Eventually(t, func() bool { // the node may win more than one election
			_, err := simQueue(victim).Produce(context.Background(), codeq.Task{Queue: "a"})
			return err == nil
		}, simPatience, 10*time.Millisecond)
		require.NotEqual(t, victim.name, c.leader(0).name)
		require.NoError(t, inspect.Of(simQueue(victim)).Group(0).Failure())
		victim.fill(simtest.DiskSize)
	})
}

// TestMembersOnFullDisk: on a full disk the members of a shard do not change. Raft stores a change
// that it has begun: the leader acts on it in any case.
func TestMembersOnFullDisk(t *testing.T) {
	simCase(t, codeq.Options{MinFreeBytes: testkit.MinFree}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		group := inspect.Of(simQueue(leader)).Group(0)
		leader.fill(testkit.MinFree/4 - 1)
		time.Sleep(2 * store.LookEvery * time.Millisecond)
		change := func(how cluster.Change) error {
			done := make(chan error, 1)
			group.Change(how, cluster.Peer{Node: other.name}, nil, func(err error) { done <- err })
			return <-done
		}
		require.NoError(t, change(cluster.CheckMember))
		require.ErrorIs(t, change(cluster.GiveVote), codeq.ErrDiskFull)
		node := cluster.Peer{Node: "n9", ID: manifest.NewID()}
		require.NoError(t, group.Raft().AddNonvoter(node.ServerID(), "nowhere", 0, time.Second).Error())
		require.NoError(t, group.Raft().RemoveServer(node.ServerID(), 0, time.Second).Error())
		requireNode(t, leader, c.leader(0))
		leader.fill(simtest.DiskSize)
		time.Sleep(2 * store.LookEvery * time.Millisecond)
		queuetest.Produce(t, simQueue(other), codeq.Task{Queue: "a"})
	})
}

// hidingRoom makes the nodes hide from each other how full their disks are. An entry of a leader is
// then stuck while the disks of the others are full.
func hidingRoom(opts codeq.Options) codeq.Options {
	return *inspect.With(&opts, inspect.Private{HidesRoom: true})
}

// withFullMajority runs a story with three nodes. The first node leads both shards, and fill leaves
// free bytes on the disk of each other node.
func withFullMajority(
	t *testing.T, opts codeq.Options, story func(t *testing.T, c *simCluster, nodes []*codeq.Queue, fill func(free int64)),
) {
	opts.Shards, opts.MinFreeBytes = 2, testkit.MinFree
	simCase(t, opts, func(t *testing.T, c *simCluster) {
		var nodes []*codeq.Queue
		for _, n := range c.members() {
			nodes = append(nodes, simQueue(n))
		}
		time.Sleep(2 * time.Minute) // the leaders are at home
		for shard := range opts.Shards {
			require.NoError(t, nodes[0].TransferLeadership(t.Context(), shard, "n0"))
		}
		c.awaitLeaders()
		story(t, c, nodes, func(free int64) {
			for _, n := range c.members()[1:] {
				n.fill(free)
			}
			time.Sleep(2 * store.LookEvery * time.Millisecond)
		})
	})
}

// TestSlowCommitKeepsOwner: a commit takes longer than CallTimeout, but not as long as StallAfter.
// Its callers get an error, but the owner goes on, and so do the other decisions of its group.
func TestSlowCommitKeepsOwner(t *testing.T) {
	t.Parallel()
	withFullMajority(t, hidingRoom(codeq.Options{StallAfter: 4 * simCallTimeout}), func(t *testing.T, _ *simCluster, nodes []*codeq.Queue, fill func(int64)) {
		q := nodes[0]
		terms := func() (of [2]uint64) {
			for i := range of {
				of[i] = inspect.Of(q).Group(i).Raft().CurrentTerm()
			}
			return of
		}
		before := terms()
		fill(testkit.MinFree/4 - 1)
		begun := time.Now()
		_, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.Less(t, time.Since(begun), 2*simCallTimeout)
		time.Sleep(simCallTimeout)
		require.True(t, inspect.Of(q).Leads(0) && inspect.Of(q).Leads(1))
		require.Equal(t, before, terms())
		fill(simtest.DiskSize)
		time.Sleep(simCallTimeout)
		require.True(t, inspect.Of(q).Leads(0) && inspect.Of(q).Leads(1))
		require.Equal(t, before, terms())
		require.EqualValues(t, 1, queuetest.CountsOf(t, nodes[1], "a").Ready)
	})
}

// TestCloseOfLeaderOfFullDisks: a leader can be closed although the disks of its followers have no
// room for its entries. It waits neither for a produce, nor until the tasks of a claim without a
// caller are given back.
func TestCloseOfLeaderOfFullDisks(t *testing.T) {
	t.Parallel()
	withFullMajority(t, hidingRoom(codeq.Options{StallAfter: 2 * time.Second}), func(t *testing.T, c *simCluster, nodes []*codeq.Queue, fill func(int64)) {
		const n = 32
		_, err := nodes[0].ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "a"}}, 4*n))
		require.NoError(t, err)
		fill(testkit.MinFree/4 - 1)
		produced := queuetest.Producing(nodes[0], codeq.Task{Queue: "b"})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = nodes[0].ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: n})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		begun := time.Now()
		require.NoError(t, c.nodes[0].close())
		require.LessOrEqual(t, time.Since(begun), 4*simCallTimeout)
		require.ErrorIs(t, <-produced, codeq.ErrUncertain)
	})
}

// TestReplicasReclaim: in a cluster, leaders and followers get the space of ended tasks back.
func TestReplicasReclaim(t *testing.T) {
	t.Parallel()
	opts := queuetest.ReclaimTest()
	opts.Shards, inspect.Options(&opts).FS = 0, nil
	simCase(t, opts, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, _ := c.lead()
		q := simQueue(leader)
		const tasks = 512
		queuetest.ProduceMuch(t, q, tasks, func(i int) codeq.Task { return codeq.Task{Queue: "a"} })
		held := 0
		queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
			if held++; held == 100 {
				return nil
			}
			return q.Complete(context.Background(), l.Receipt, nil)
		})
		time.Sleep(30 * time.Second)
		c.rest()
		for _, n := range c.members() {
			require.Less(t, queuetest.StoresOf(t, simQueue(n)).TableBytes, int64(tasks*queuetest.ReclaimPayload/4), n)
		}
	})
}

// TestFullDiskOfFollowerIsReclaimed: a follower with little free disk space gets its space back
// within seconds. Its leader works during that time.
func TestFullDiskOfFollowerIsReclaimed(t *testing.T) {
	t.Parallel()
	const low, tasks = 8 << 20, 512
	opts := queuetest.ReclaimTest()
	opts.Shards, inspect.Options(&opts).FS, opts.MinFreeBytes = 0, nil, low
	simCase(t, opts, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, other := c.lead()
		q := simQueue(leader)
		ids := queuetest.ProduceMuch(t, q, tasks, func(int) codeq.Task { return codeq.Task{Queue: "a"} })
		time.Sleep(time.Minute)
		full := queuetest.StoresOf(t, simQueue(other)).TableBytes
		look := func() { other.fill(low/2 + full - queuetest.StoresOf(t, simQueue(other)).TableBytes) }
		look()
		queuetest.CancelMost(t, q, ids)
		for range 30 {
			time.Sleep(100 * time.Millisecond)
			look()
			queuetest.Produce(t, q, codeq.Task{Queue: "b"})
		}
		require.Less(t, queuetest.StoresOf(t, simQueue(other)).TableBytes, int64(tasks*queuetest.ReclaimPayload/4))
		other.fill(simtest.DiskSize)
	})
}
