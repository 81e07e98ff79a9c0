package cluster

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// TestStandIn: a leader removes itself, and the other member has not heard of it when their
// connection is cut. Afterwards the other one leads, alone.
func TestStandIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 1)
		a, b := nodes[0].Group(0), nodes[1].Group(0)
		require.NoError(t, a.raft.RemoveServer(nodes[2].self.ServerID(), 0, 0).Error())
		network.Isolate("a", trioNames)
		require.Error(t, a.raft.RemoveServer(nodes[0].self.ServerID(), 0, 0).Error())
		require.Greater(t, a.raft.LastIndex(), b.raft.LastIndex())
		network.Heal(true)
		for healed := time.Now(); !b.leads(); time.Sleep(10 * time.Millisecond) {
			require.Less(t, time.Since(healed), time.Minute)
		}
		members, err := b.members()
		require.NoError(t, err)
		require.Equal(t, []raft.Server{{Suffrage: raft.Voter, ID: nodes[1].self.ServerID(), Address: "b"}}, members)
		closeAll(t, nodes)
	})
}

// TestStandInForNobody: a node that was removed, and knows that, does not disturb the others when
// one of them, which is cut off from the leader, asks for its vote; not even when it is cut off
// together with that one.
func TestStandInForNobody(t *testing.T) {
	for _, together := range []bool{false, true} {
		t.Run(fmt.Sprint("together=", together), func(t *testing.T) { standInForNobody(t, together) })
	}
}

func standInForNobody(t *testing.T, together bool) {
	synctest.Test(t, func(t *testing.T) {
		nodes, network := openTrio(t, 1)
		a, c := nodes[0].Group(0), nodes[2].Group(0)
		require.NoError(t, a.raft.RemoveServer(nodes[2].self.ServerID(), 0, 0).Error())
		for removed := time.Now(); c.raft.LastIndex() < a.raft.LastIndex(); time.Sleep(time.Millisecond) {
			require.Less(t, time.Since(removed), time.Second)
		}
		term := a.raft.CurrentTerm()
		if network.Isolate("a", []string{"b"}); together {
			network.Isolate("a", trioNames)
		}
		c.standIn(0, 0) // as b asks
		for c.standing.Load() {
			time.Sleep(time.Millisecond)
		}
		require.Equal(t, raft.Follower, c.raft.State())
		require.Equal(t, term, c.raft.CurrentTerm())
		network.Heal(true)
		closeAll(t, nodes)
	})
}

// TestLacksLeader: if a majority of the members has answered, and none of them leads or has contact
// with a leader, there is none.
func TestLacksLeader(t *testing.T) {
	const lately = time.Second
	silent, alone := ReplicaStatus{Voter: true, LastError: "it does not answer"}, ReplicaStatus{Voter: true, LastContact: time.Minute}
	follows, learns := ReplicaStatus{Voter: true, LastContact: lately / 2}, ReplicaStatus{LastContact: time.Minute}
	for want, all := range map[bool][]ShardStatus{
		true:  {{Replicas: []ReplicaStatus{alone}}, {Replicas: []ReplicaStatus{alone, silent, alone}}, {Replicas: []ReplicaStatus{alone, {Voter: true}}}},
		false: {{}, {Replicas: []ReplicaStatus{alone, silent}}, {Replicas: []ReplicaStatus{alone, follows, silent}}, {Replicas: []ReplicaStatus{alone, silent, learns}}, {Leader: "a", Replicas: []ReplicaStatus{alone}}},
	} {
		for i := range all {
			require.Equal(t, want, all[i].lacksLeader(lately), "%v", all[i])
		}
	}
}

// TestTransferExcludesChanges: no change of the members is decided while a shard is handed over,
// and a hand-over waits until one is.
func TestTransferExcludesChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		a, b := nodes[0].Group(0), nodes[1].Group(0)
		none := func() raft.Future { t.Error("the change is proposed"); return nil }
		_, begun, err := a.beginOffer()
		require.NoError(t, err)
		require.True(t, begun)
		require.ErrorIs(t, a.reconfigure(none), base.ErrNotLeader)
		a.endOffer(false, nil)
		time.Sleep(offerPause)

		require.NoError(t, a.beginReform())
		handed := make(chan error, 1)
		go func() {
			handed <- a.transfer(raft.Server{Suffrage: raft.Voter, ID: nodes[1].self.ServerID(), Address: "b"})
		}()
		time.Sleep(nodes[0].c.ElectionTimeout)
		require.True(t, a.leads())
		a.endReform()
		require.NoError(t, <-handed)
		for !b.leads() {
			time.Sleep(time.Millisecond)
		}
		closeAll(t, nodes)
	})
}
