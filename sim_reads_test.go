package codeq

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// TestDeposedLeaderAnswersNoReads: an answer to a heartbeat reaches a leader after its sender has
// elected another one, which has completed a task and stored others. It says nothing of reads that
// have begun since.
func TestDeposedLeaderAnswersNoReads(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		old, _ := c.lead()
		var others []*simNode
		for _, n := range c.members() {
			if n != old {
				others = append(others, n)
			}
		}
		voter, heir := others[0], others[1]
		done := produce(t, simQueue(heir), Task{Queue: "a", Payload: []byte("done")})[0]
		lease := claimNow(t, simQueue(heir), "a")
		countsOf(t, simQueue(voter), "a") // there is a connection
		c.net.SetCut(voter.name, old.name, true)
		time.Sleep(100 * time.Millisecond) // the voter has answered a heartbeat
		c.net.SetCut(old.name, voter.name, true)
		// So early another node is elected only if it is told to, by a message that may be late.
		simQueue(old).replicas[0].group.Raft().LeadershipTransferToServer(raft.ServerID(heir.name), raft.ServerAddress(heir.name))
		for simQueue(heir).replicas[0].group.Raft().State() == raft.Follower {
			time.Sleep(10 * time.Microsecond)
		}
		c.net.SetCut(heir.name, old.name, true)
		require.Equal(t, heir, c.newLeader(old))
		require.NoError(t, simQueue(heir).Complete(t.Context(), lease.Receipt, nil))
		produce(t, simQueue(heir), Task{Queue: "a", Payload: []byte("new")}, Task{Queue: "b"})
		q := simQueue(old)
		require.NotNil(t, q.shard(0), "it knows of no other leader")

		var reads sync.WaitGroup
		reads.Go(func() {
			if counts := countsOf(t, q, "a"); counts != (Counts{Ready: 1}) {
				t.Errorf("Stats of queue a: %+v", counts)
			}
		})
		reads.Go(func() {
			if info, err := q.Get(t.Context(), done); err == nil {
				t.Errorf("Get of a completed task: %v", info.State)
			}
		})
		reads.Go(func() {
			if listed := collect(t, q.List(t.Context(), ListOptions{State: Ready, Queue: "a"})); len(listed) != 1 || listed[0] != "new" {
				t.Errorf("List of queue a: %q", listed)
			}
		})
		reads.Go(func() {
			if claimNow(t, q, "b") == nil {
				t.Error("Claim has found nothing in queue b")
			}
		})
		synctest.Wait()
		c.net.SetCut(voter.name, old.name, false)
		time.Sleep(20 * time.Millisecond)
		c.net.Heal(false)
		reads.Wait()
	})
}

// confirming counts how often an owner has made sure that it decides.
type confirming struct {
	committer
	count *atomic.Int32
}

func (c confirming) Confirm() error {
	c.count.Add(1)
	return c.committer.Confirm()
}

// TestEmptyIsConfirmed: a claim finds nothing only if every shard has made sure of it.
func TestEmptyIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const shards = 3
		c := newSimCluster(t, 1, 1, Options{Shards: shards})
		c.awaitLeaders()
		q := simQueue(c.members()[0])
		var confirmed [shards]atomic.Int32
		for i := range shards {
			goOn := standStill(q.shard(i))
			q.shard(i).commit = confirming{q.shard(i).commit, &confirmed[i]}
			goOn()
			synctest.Wait()
			confirmed[i].Store(0)
		}
		require.Nil(t, claimNow(t, q, "a"))
		for i := range shards {
			require.EqualValues(t, 1, confirmed[i].Load(), "shard %d", i)
		}
		_, err := q.node.claims.askAll(t.Context(), &ClaimRequest{Queues: []string{"a"}}, nil, nil)
		require.ErrorIs(t, err, ErrNotLeader, "the shards were led elsewhere when the claim began, and were not asked")
		c.close()
	})
}
