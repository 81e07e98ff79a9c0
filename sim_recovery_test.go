package codeq

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testkit"
)

// receiveCheckpoint crashes a node at the moment at which its store has come from a leader, and is
// ahead of its log.
func receiveCheckpoint(t *testing.T, c *simCluster) *simNode {
	time.Sleep(2 * time.Minute) // the leader is at home
	c.rest()
	leader, victim := c.lead()
	victim.crash(100)
	for range 100 {
		produce(t, simQueue(leader), Task{Queue: "a"})
	}
	c.snapshot(leader, 0, 5)
	time.Sleep(time.Second)
	for range 100 { // the checkpoint is ahead of the snapshot
		produce(t, simQueue(leader), Task{Queue: "a"})
	}
	victim.start()
	for end := time.Now().Add(simPatience); ; time.Sleep(100 * time.Microsecond) {
		g := simQueue(victim).replicas[0].group
		if g.Applied() >= 200 && g.Applied() > g.Raft().LastIndex() {
			break
		}
		if time.Now().After(end) {
			c.hangs("the checkpoint")
		}
	}
	victim.crash(100)
	return victim
}

// TestRecoverClusterAfterCheckpoint: a node whose store is ahead of its log goes on by itself. It
// keeps what the store has, and what is acknowledged from then on, however often it is opened.
func TestRecoverClusterAfterCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, Options{Shards: 1, maxAppend: 4})
		n := receiveCheckpoint(t, c)
		for _, other := range c.members() {
			if other != n {
				other.stop()
			}
		}
		want := 200
		for range 3 {
			require.NoError(t, c.recover(n))
			for range 2 {
				n.start()
				c.awaitLeaders()
				require.EqualValues(t, want, countsOf(t, simQueue(n), "a").Ready)
				for range 100 {
					_, err := simQueue(n).Produce(context.Background(), Task{Queue: "a"})
					require.NoError(t, err)
				}
				want += 100
				require.NoError(t, c.check())
				n.stop()
			}
		}
		c.close()
	})
}

// TestPowerLossOfAllNodes: all nodes lose power at once, at a level at which the ends of their logs
// are lost then, and perhaps not what their stores have of them. What is acknowledged afterwards is
// stored. Either a majority goes on from what it has, or no shard does; whoever contradicts the
// others has failed, and says so. The furthest node goes on after RecoverCluster, and others join it.
func TestPowerLossOfAllNodes(t *testing.T) {
	var diverged, wedged int
	for i := range uint64(testkit.Sized(3, 5, 200)) {
		synctest.Test(t, func(t *testing.T) {
			failed, led := powerLossOfAllNodes(t, 6+i)
			diverged += failed
			if !led {
				wedged++
			}
		})
	}
	t.Logf("%d replicas have diverged; %d shards were left without a majority", diverged, wedged)
	require.Positive(t, diverged)
}

func powerLossOfAllNodes(t *testing.T, seed uint64) (diverged int, led bool) {
	rng := rand.New(rand.NewPCG(seed, 4))
	c := newSimCluster(t, seed, 3, Options{Shards: 1, Durability: DurabilityProcess, maxAppend: 4})
	produceSome := func(n *simNode, count int) (ids []ID) {
		for range count {
			id, err := simQueue(n).Produce(t.Context(), Task{Queue: "a", Payload: make([]byte, 8<<10)})
			if err != nil {
				require.True(t, errors.Is(err, ErrNotLeader) || errors.Is(err, ErrFailed) || errors.Is(err, ErrUncertain), "%v", err)
				return ids
			}
			ids = append(ids, id)
		}
		return ids
	}
	// A part of the log is safe, as when the operating system has written it back.
	c.awaitLeaders()
	for _, n := range c.members() {
		produceSome(n, rng.IntN(10))
		n.stop()
		n.start()
		c.awaitLeaders()
	}
	produceSome(c.members()[0], 20+rng.IntN(80))
	for _, n := range c.members() {
		n.crash([]int{0, 0, 50, 100}[rng.IntN(4)])
	}
	for _, i := range rng.Perm(3) {
		c.members()[i].start()
		time.Sleep(time.Duration(rng.IntN(4)) * time.Second)
	}
	time.Sleep(10 * time.Second)
	ids := make(map[ID]bool)
	for _, n := range c.members() {
		for _, id := range produceSome(n, 10) {
			ids[id] = true
		}
	}
	time.Sleep(time.Minute)

	stored := func(n *simNode) (missing int) {
		v := simQueue(n).peek(simQueue(n).shard(0))
		defer v.close()
		tasks := make(map[ID]*TaskInfo)
		require.NoError(t, v.addAll(tasks))
		for id := range ids {
			if tasks[id] == nil {
				missing++
			}
		}
		return missing
	}
	furthest := c.members()[0]
	var sound []simEntry
	for _, n := range c.members() {
		r := simQueue(n).replicas[0]
		if r.group.Applied() > simQueue(furthest).replicas[0].group.Applied() {
			furthest = n
		}
		if err := r.group.Failure(); err != nil {
			require.ErrorIs(t, err, ErrDiverged)
			require.ErrorContains(t, err, "RecoverCluster")
			require.ErrorContains(t, err, "ReplaceNode")
			diverged++
		} else if entries, err := r.dump(); c.leader(0) != nil {
			require.NoError(t, err)
			if sound == nil {
				sound = entries
			}
			require.NoError(t, sameEntries(sound, entries))
		}
	}
	if l := c.leader(0); l != nil {
		led, furthest = true, l
		require.Zero(t, stored(l), "acknowledged and not stored")
	} else {
		require.GreaterOrEqual(t, diverged, 2, "nobody leads, and says why")
		require.Empty(t, ids)
	}
	for _, n := range c.members() {
		if err := n.close(); err != nil {
			require.ErrorIs(t, err, ErrDiverged)
		}
	}
	require.NoError(t, c.recover(furthest))
	furthest.start()
	c.awaitLeaders()
	for _, id := range produceSome(furthest, 10) {
		ids[id] = true
	}
	require.Zero(t, stored(furthest))
	require.NoError(t, c.check())
	for range 2 {
		n := c.node(true)
		require.NoError(t, c.open(n))
		c.mu.Lock()
		c.nodes = append(c.nodes, n)
		c.mu.Unlock()
	}
	require.Len(t, produceSome(c.members()[2], 10), 10)
	c.rest()
	require.NoError(t, c.check())
	c.close()
	return diverged, led
}

// TestPowerLossOfNewCluster: what a new cluster has stored may be lost with the power of all nodes,
// below DurabilityDisk; with whom it began is not.
func TestPowerLossOfNewCluster(t *testing.T) {
	simCase(t, Options{Durability: DurabilityProcess}, func(t *testing.T, c *simCluster) {
		for _, n := range c.members() {
			n.crash(0)
		}
		for _, n := range c.members() {
			n.start()
		}
		c.awaitLeaders()
		produce(t, simQueue(c.members()[0]), Task{Queue: "a"})
	})
}
