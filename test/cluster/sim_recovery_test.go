package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// receiveCheckpoint crashes a node that has just received its store from a leader: the store is
// ahead of the node's log.
func receiveCheckpoint(t *testing.T, c *simCluster) *simNode {
	time.Sleep(2 * time.Minute) // until the leader is the home node
	c.rest()
	leader, victim := c.lead()
	victim.crash(100)
	leader.produce(t, 100)
	c.snapshot(leader, 0, 5)
	time.Sleep(time.Second)
	for range 100 { // the checkpoint is ahead of the snapshot
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
	}
	victim.start()
	g := inspect.Of(simQueue(victim)).Group(0)
	for g.Applied() < 200 || g.Applied() <= g.Raft().LastIndex() {
		time.Sleep(100 * time.Microsecond)
	}
	victim.crash(100)
	return victim
}

// TestRecoverClusterAfterCheckpoint: a node with a store ahead of its log goes on alone. It keeps
// the state of the store and every later acknowledged change, however often it is opened.
func TestRecoverClusterAfterCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 3, *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{MaxAppend: 4}))
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
				require.EqualValues(t, want, queuetest.CountsOf(t, simQueue(n), "a").Ready)
				n.produce(t, 100)
				want += 100
				require.NoError(t, c.check())
				n.stop()
			}
		}
		c.close()
	})
}

// TestRecoverClusterReconciles: a shard has lost its last messages to the other shards, and its
// settings are older. After RecoverCluster, or when a queue without a cluster becomes a node with
// these shards, no shard confuses a new message with a lost one, and the newest settings hold
// everywhere.
func TestRecoverClusterReconciles(t *testing.T) {
	t.Parallel()
	for _, alone := range []bool{false, true} {
		t.Run(fmt.Sprint("alone=", alone), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, n := firstNode(t, 1, codeq.Options{Shards: 3})
				// follow completes tasks; each produces a task of another group, mostly in another
				// shard.
				follow := func(q *codeq.Queue) {
					t.Helper()
					const tasks = 24
					for i := range tasks {
						queuetest.Produce(t, q, codeq.Task{Queue: "a"})
						l := queuetest.ClaimNow(t, q, "a")
						require.NoError(t, q.Complete(t.Context(), l.Receipt, nil, codeq.Task{Queue: "b", Group: fmt.Sprint(i)}))
					}
					for range tasks {
						ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
						l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"b"}})
						cancel()
						require.NoError(t, err)
						queuetest.Complete(t, q, l)
					}
					require.NoError(t, q.WaitIdle(t.Context()))
				}
				var q *codeq.Queue
				if alone {
					q = n.alone(t)
				} else {
					c.begin(n)
					q = simQueue(n)
				}
				follow(q)
				for weight := range 3 {
					queuetest.Configure(t, q, "a", func(s *codeq.Settings) { s.TenantWeights = map[string]int{"x": weight + 1} })
				}
				time.Sleep(time.Second)
				if alone {
					require.NoError(t, q.Close())
				} else {
					n.stop()
				}
				simtest.AlterStore(t, n.machine.Disk(), func(db *pebble.DB) {
					for _, prefix := range []byte{keys.Sent, keys.Settings} {
						require.NoError(t, db.DeleteRange([]byte{prefix}, []byte{prefix + 1}, nil))
					}
				})
				if !alone {
					require.NoError(t, c.recover(n))
				}
				c.begin(n)
				follow(simQueue(n))
				set, err := simQueue(n).Settings("a")
				require.NoError(t, err)
				require.Equal(t, 3, set.TenantWeights["x"])
				require.NoError(t, c.check())
				c.close()
			})
		})
	}
}

// logLoss is a cluster of three number of nodes with a loss lost the ends of their logs, at random.
// Their stores may still have the lost entries.
type logLoss struct {
	*simCluster
	ids  []codeq.ID // of acknowledged tasks
	lost int        // nodes that have
}

// newLogLoss crashes all nodes at a level where a power loss takes the ends of their logs, and
// starts them again. Without notice, they do not detect the loss: the disks had confirmed the lost
// data.
func newLogLoss(t *testing.T, seed uint64, odds []int, notice bool) *logLoss {
	rng := rand.New(rand.NewPCG(seed, 4))
	l := &logLoss{simCluster: newSimCluster(t, seed, 3, *inspect.With(&codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess}, inspect.Private{MaxAppend: 4}))}
	// A part of the log is safe, as if the operating system had written it back.
	l.awaitLeaders()
	for _, n := range l.members() {
		require.NoError(t, l.produce(n, rng.IntN(10)))
		n.stop()
		n.start()
		l.awaitLeaders()
	}
	require.NoError(t, l.produce(l.members()[0], 20+rng.IntN(80)))
	for _, n := range l.members() {
		percent := odds[rng.IntN(len(odds))]
		if n.crash(percent); percent < 100 {
			l.lost++
		}
		if !notice {
			n.machine.HideBoots()
		}
	}
	for _, i := range rng.Perm(3) {
		l.members()[i].start()
		time.Sleep(time.Duration(rng.IntN(4)) * time.Second)
	}
	time.Sleep(10 * time.Second)
	return l
}

// produce stores tasks on a node until a call fails.
func (l *logLoss) produce(n *simNode, count int) error {
	for range count {
		id, err := simQueue(n).Produce(l.t.Context(), codeq.Task{Queue: "a", Payload: make([]byte, 8<<10)})
		if err != nil {
			return err
		}
		l.ids = append(l.ids, id)
	}
	return nil
}

// missing counts the acknowledged tasks that a leader lacks.
func (l *logLoss) missing(n *simNode) (missing int) {
	tasks, err := queuetest.Tasks(simQueue(n), 0)
	require.NoError(l.t, err)
	for _, id := range l.ids {
		if tasks[id] == nil {
			missing++
		}
	}
	return missing
}

// goOn makes a node go on alone with its own state, and others join it. REQUIRES: all are closed.
func (l *logLoss) goOn(n *simNode) (missing int) {
	require.NoError(l.t, l.recover(n))
	n.start()
	l.awaitLeaders()
	missing = l.missing(n)
	require.NoError(l.t, l.produce(n, 10))
	for range 2 {
		l.another()
	}
	require.NoError(l.t, l.produce(l.members()[2], 10))
	l.rest()
	require.NoError(l.t, l.check())
	require.Equal(l.t, missing, l.missing(l.leader(0)))
	l.close()
	return missing
}

// TestPowerLossOfAllNodes: each node loses power or is killed, all at once. If a majority was only
// killed, it goes on, and no acknowledged task is missing. Otherwise the nodes acknowledge nothing,
// and all report it: the furthest node goes on after RecoverCluster with its own state, and others
// join it.
func TestPowerLossOfAllNodes(t *testing.T) {
	t.Parallel()
	var wedged, missing int
	for i := range uint64(testkit.Sized(3, 200)) {
		synctest.Test(t, func(t *testing.T) {
			l := newLogLoss(t, 6+i, []int{0, 0, 50, 100, 100}, true)
			for _, n := range l.members() {
				if err := l.produce(n, 10); l.lost <= 1 {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, codeq.ErrPowerLost)
					require.ErrorContains(t, err, "RecoverCluster")
				}
			}
			time.Sleep(time.Minute)
			if l.lost <= 1 {
				l.rest()
				require.Zero(t, l.missing(l.leader(0)))
				require.NoError(t, l.check())
				l.close()
				return
			}
			require.Nil(t, l.leader(0))
			furthest := l.furthest(l.members()...)
			each(l.members(), (*simNode).stop)
			wedged++
			missing += l.goOn(furthest)
		})
	}
	t.Logf("%d clusters were left without a majority, and %d acknowledged tasks were lost with it", wedged, missing)
	require.Positive(t, wedged)
}

// TestDisksThatLose: disks lose data that they had confirmed, and no node detects it. Later
// acknowledged tasks are stored. Either a majority goes on from its own state, or no shard goes on;
// a node that contradicts the others has failed, and reports it. The furthest node goes on after
// RecoverCluster.
func TestDisksThatLose(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	var diverged, wedged int
	for i := range uint64(testkit.Sized(3, 200)) {
		synctest.Test(t, func(t *testing.T) {
			failed, led := disksThatLose(t, 6+i)
			diverged += failed
			if !led {
				wedged++
			}
		})
	}
	t.Logf("%d replicas have diverged; %d shards were left without a majority", diverged, wedged)
	require.Positive(t, diverged)
}

func disksThatLose(t *testing.T, seed uint64) (diverged int, led bool) {
	l := newLogLoss(t, seed, []int{0, 0, 50, 100}, false)
	l.ids = nil
	for _, n := range l.members() {
		if err := l.produce(n, 10); err != nil {
			require.True(t, errors.Is(err, codeq.ErrNotLeader) || errors.Is(err, codeq.ErrFailed) || errors.Is(err, codeq.ErrUncertain), "%v", err)
		}
	}
	time.Sleep(time.Minute)
	var sound []simEntry
	for _, n := range l.members() {
		if err := inspect.Of(simQueue(n)).Group(0).Failure(); err != nil {
			require.ErrorIs(t, err, codeq.ErrDiverged)
			require.ErrorContains(t, err, "RecoverCluster")
			require.ErrorContains(t, err, "ReplaceNode")
			diverged++
		} else if entries, err := dump(simQueue(n), 0); l.leader(0) != nil {
			require.NoError(t, err)
			if sound == nil {
				sound = entries
			}
			require.NoError(t, sameEntries(sound, entries))
		}
	}
	furthest := l.furthest(l.members()...)
	if n := l.leader(0); n != nil {
		led, furthest = true, n
		require.Zero(t, l.missing(n), "acknowledged and not stored")
	} else {
		require.GreaterOrEqual(t, diverged, 2, "nobody leads, and says why")
		require.Empty(t, l.ids)
	}
	for _, n := range l.members() {
		if err := n.close(); err != nil {
			require.ErrorIs(t, err, codeq.ErrDiverged)
		}
	}
	require.Zero(t, l.goOn(furthest))
	return diverged, led
}

// TestPowerLossOfNewCluster: below DurabilityDisk, a node of a new cluster may lose its stored
// state in a power loss. It keeps the list of first members, so that it can ask them.
func TestPowerLossOfNewCluster(t *testing.T) {
	simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		n := c.members()[0]
		n.crash(0)
		c.peers = nil // it does not ask the peers of Options
		n.start()
		c.awaitVotes()
		n.produce(t, 1)
	})
}
