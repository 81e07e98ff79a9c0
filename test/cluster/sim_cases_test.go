package cluster_test

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// Each test here checks one guarantee of a cluster; TestSimulation combines them.

// simCase runs a story on three nodes, and checks at its end that all replicas are equal. The
// default is one shard. The race detector checks the same goroutines in TestSimulation.
func simCase(t *testing.T, opts codeq.Options, story func(t *testing.T, c *simCluster)) {
	simNodes(t, 3, opts, story)
}

// simNodes is simCase for any number of nodes; 0: the story begins the cluster.
func simNodes(t *testing.T, nodes int, opts codeq.Options, story func(t *testing.T, c *simCluster)) {
	simCaseOf(t, 1, nodes, opts, 0, story)
}

// simCaseOf is simNodes for any seed; newest is the newest format of the builds.
func simCaseOf(t *testing.T, seed uint64, nodes int, opts codeq.Options, newest int, story func(t *testing.T, c *simCluster)) {
	testbase.SkipUnderRace(t)
	opts.Shards = cmp.Or(opts.Shards, 1)
	synctest.Test(t, func(t *testing.T) {
		c := newSimClusterOf(t, seed, nodes, opts, newest)
		if nodes > 0 {
			c.awaitLeaders()
		}
		story(t, c)
		c.mend(true)
		c.rest()
		require.NoError(t, c.check())
		c.close()
	})
}

// lead returns the leader of the first shard, and another node.
func (c *simCluster) lead() (leader, other *simNode) {
	c.awaitLeaders()
	leader = c.leader(0)
	for _, n := range c.members() {
		if n != leader {
			other = n
		}
	}
	return leader, other
}

// third returns a member that is none of two others.
func (c *simCluster) third(a, b *simNode) *simNode {
	members := c.members()
	return members[slices.IndexFunc(members, func(n *simNode) bool { return n != a && n != b })]
}

func simQueue(n *simNode) *codeq.Queue {
	q, _ := n.queue()
	return q
}

// statusOf returns the status of the cluster, as a node knows it.
func statusOf(t *testing.T, n *simNode) *codeq.ClusterStatus {
	t.Helper()
	st, err := simQueue(n).ClusterStatus(context.Background())
	require.NoError(t, err)
	return st
}

// newLeader waits until another node than old leads.
func (c *simCluster) newLeader(old *simNode) (leader *simNode) {
	c.until("the election of another leader", func() bool {
		members := c.members()
		at := slices.IndexFunc(members, func(n *simNode) bool {
			q := simQueue(n)
			return n != old && q != nil && inspect.Of(q).Leads(0)
		})
		if at >= 0 {
			leader = members[at]
		}
		return at >= 0
	})
	return leader
}

// TestProduceIsTriedAgain: the answer to a produce is lost because the connection to the leader
// breaks or the leader ends. The task is stored once, and acknowledged.
func TestProduceIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, lost := range []string{"answer", "leader"} {
		t.Run(lost, func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
				defer cancel()
				for i := range 20 {
					leader, other := c.lead()
					_, err := simQueue(other).Produce(ctx, codeq.Task{Queue: "b"}) // there is a connection
					require.NoError(t, err)
					done := queuetest.Producing(simQueue(other), codeq.Task{Queue: "a"})
					time.Sleep(time.Duration(i) * time.Millisecond)
					if lost == "leader" {
						leader.crash(0)
						require.NoError(t, <-done)
						leader.start()
					} else {
						c.net.SetCut(leader.name, other.name, true)
						time.Sleep(time.Second)
						c.net.Heal(true)
						require.NoError(t, <-done)
					}
				}
				_, other := c.lead()
				require.EqualValues(t, 20, queuetest.CountsOf(t, simQueue(other), "a").Ready)
			})
		})
	}
}

// TestLeaseOutlivesItsLeader: a lease stays in force under the next leader for its whole length,
// however much the clocks of the two leaders differ.
func TestLeaseOutlivesItsLeader(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{0, time.Hour, -time.Hour} {
		t.Run(ahead.String(), func(t *testing.T) {
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				old, other := c.lead()
				old.produce(t, 2)
				begin := time.Now()
				request := codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: 10 * time.Second, NoWait: true}
				kept, err := simQueue(other).Claim(ctx, request)
				require.NoError(t, err)
				left, err := simQueue(other).Claim(ctx, request)
				require.NoError(t, err)

				for _, n := range c.members() {
					if n != old {
						n.machine.Wall.Set(ahead)
					}
				}
				old.crash(0)
				c.newLeader(old)
				request.NoWait = false
				again, err := simQueue(other).Claim(ctx, request)
				require.NoError(t, err)
				require.GreaterOrEqual(t, time.Since(begin), 10*time.Second)
				require.Less(t, time.Since(begin), 14*time.Second, "the lease goes on under the next leader")
				require.Contains(t, []codeq.ID{kept.ID, left.ID}, again.ID)
				require.Equal(t, 2, again.Attempt)
				require.Greater(t, again.Receipt.Token, left.Receipt.Token)
			})
		})
	}
	t.Run("completed", func(t *testing.T) {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			ctx := context.Background()
			old, other := c.lead()
			queuetest.Produce(t, simQueue(old), codeq.Task{Queue: "a"})
			l, err := simQueue(old).Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: 10 * time.Second})
			require.NoError(t, err)
			old.crash(0)
			time.Sleep(8 * time.Second)
			other.machine.Wall.Set(time.Hour)
			queuetest.Complete(t, simQueue(other), l)
			require.ErrorIs(t, simQueue(other).Complete(ctx, l.Receipt, nil), codeq.ErrLeaseLost)
		})
	})
}

// TestTimersOfADeposedLeaderDoNothing: a leader that is cut off sees leases expire. Its decisions
// about them have no effect: its successor keeps the lease alive. The old leader acknowledges no
// call and grants no lease.
func TestTimersOfADeposedLeaderDoNothing(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		old, other := c.lead()
		queuetest.Produce(t, simQueue(old), slices.Repeat([]codeq.Task{{Queue: "a"}}, 10)...)
		queuetest.Produce(t, simQueue(old), codeq.Task{Queue: "b"})
		var held []*codeq.Lease
		for range 10 {
			l, err := simQueue(other).Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: 400 * time.Millisecond})
			require.NoError(t, err)
			held = append(held, l)
		}
		// The other nodes notice only after the leases have expired on the old leader.
		c.net.Isolate(old.name, c.names())
		cut, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		answers := make(chan error, 3)
		for _, call := range []func() error{
			func() error {
				_, err := simQueue(old).Claim(cut, codeq.ClaimRequest{Queues: []string{"b"}})
				return err
			},
			func() error { _, err := simQueue(old).Produce(cut, codeq.Task{Queue: "a"}); return err },
			func() error { _, err := simQueue(old).Stats(cut); return err }, // what it has read may be old
		} {
			go func() { answers <- call() }()
		}
		next := c.newLeader(old)
		for _, l := range held {
			require.NoError(t, simQueue(next).Extend(ctx, l.Receipt, time.Minute), "leases last for a moment under the next leader")
		}
		for range cap(answers) {
			require.Error(t, <-answers)
		}
		require.Equal(t, 1, queuetest.ClaimNow(t, simQueue(next), "b").Attempt)
		time.Sleep(10 * time.Second)
		c.net.Heal(false)
		time.Sleep(10 * time.Second)
		for _, l := range held {
			queuetest.Complete(t, simQueue(old), l)
		}
		require.Zero(t, queuetest.CountsOf(t, simQueue(old), "a"))
	})
}

// TestLateAnswerOfAClaim: the answer with a lease arrives long after another worker has completed
// the task. No newer claim gets that lease.
func TestLateAnswerOfAClaim(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		req := codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Second}
		first, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		go func() { _, _ = simQueue(other).Claim(first, req) }()
		time.Sleep(time.Second)
		c.net.Isolate(other.name, c.names())
		queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
		l, err := simQueue(leader).Claim(ctx, req)
		require.NoError(t, err)
		require.Equal(t, 2, l.Attempt, "the first one is on its way")
		queuetest.Complete(t, simQueue(leader), l)

		late, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		claimed := make(chan error, 1)
		go func() {
			_, err := simQueue(other).Claim(late, req)
			claimed <- err
		}()
		synctest.Wait()
		c.net.Heal(false)
		require.ErrorIs(t, <-claimed, context.DeadlineExceeded)
	})
}

// TestNewLeaderHasAppliedEverything: a node wins an election when it has stored an entry but not
// applied it. Its answers show the effect of the entry.
func TestNewLeaderHasAppliedEverything(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		for range 30 {
			leader, _ := c.lead()
			id := queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})[0]
			l := queuetest.ClaimNow(t, simQueue(leader), "a")
			require.Equal(t, id, l.ID)
			leader.crash(0)
			next := c.newLeader(leader)
			require.Nil(t, queuetest.ClaimNow(t, simQueue(next), "a"))
			queuetest.Complete(t, simQueue(next), l)
			leader.start()
		}
	})
}

// TestLogIsDeterministic applies the log of a shard to other stores: to one as a whole, to others
// up to some entry and then again from an earlier one. All stores end with the same bytes.
func TestLogIsDeterministic(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		q := simQueue(leader)
		for i := range 40 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte{byte(i)}, Retention: time.Hour, RunAt: time.Now().Add(time.Duration(i%3) * time.Second)})
		}
		for i := range 20 {
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Second})
			require.NoError(t, err)
			switch i % 4 {
			case 0:
				require.NoError(t, q.Complete(ctx, l.Receipt, []byte("done"), codeq.Task{Queue: "b", Unique: codeq.Unique{Key: "k"}}))
			case 1:
				require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{}))
			case 2:
				require.NoError(t, q.Release(ctx, l.Receipt, 0))
			}
		}
		time.Sleep(5 * time.Second)
		c.rest()
		want, err := dump(q, 0)
		require.NoError(t, err)
		log := readLog(t, other, 0)
		require.Greater(t, len(log), 60)
		require.NoError(t, sameEntries(want, applyLog(t, c, log)))
		for until := 0; until <= len(log); until += 1 + len(log)/40 {
			got := applyLog(t, c, log[:until], log[max(until-8, 0):])
			require.NoError(t, sameEntries(want, got), "after those before %d came again", until)
		}
	})
}

// readLog returns the log of a shard on a node. It stops the node first.
func readLog(t *testing.T, n *simNode, shard uint32) (log []*raft.Log) {
	n.stop()
	store, err := raftlog.Open("queue/raft", raftlog.Options{FS: n.machine.Disk()})
	require.NoError(t, err)
	logs, err := store.Group(shard)
	require.NoError(t, err)
	first, err := logs.FirstIndex()
	require.NoError(t, err)
	last, err := logs.LastIndex()
	require.NoError(t, err)
	for i := first; i <= last; i++ {
		l := new(raft.Log)
		require.NoError(t, logs.GetLog(i, l))
		log = append(log, l)
	}
	require.NoError(t, store.Close())
	n.start()
	return log
}

// applyLog applies some logs to a new store, one after the other, and returns its entries.
func applyLog(t *testing.T, c *simCluster, logs ...[]*raft.Log) []simEntry {
	shared := store.NewCaches(c.opts.CacheBytes, c.opts.MemTableBytes, 1)
	defer shared.Close()
	st, err := store.Open("store", store.Config{
		FS: crashfs.New(), Log: slog.New(slog.DiscardHandler), Durability: store.Replicated, MemTableBytes: c.opts.MemTableBytes,
		Format: manifest.PebbleFormat(manifest.Format),
	}, shared, true)
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	apply := inspect.Apply(st)
	applied := uint64(0)
	for _, log := range logs {
		for _, l := range log {
			if l.Type == raft.LogCommand && l.Index > applied && binary.BigEndian.Uint64(l.Data) == l.Term { // as a group does
				applied = l.Index
				require.NoError(t, apply(cluster.Entry{Index: l.Index, Term: l.Term, Data: l.Data[cluster.EntryHeader:], Replayed: true}))
			}
		}
		require.NoError(t, st.Flush(t.Context()))
	}
	require.NoError(t, st.DB().Compact(context.Background(), []byte{0}, []byte{0xff}, false)) // removes by SINGLEDEL
	entries, err := dumpStore(st.DB())
	require.NoError(t, err)
	return entries
}

// TestSnapshotIsAdopted: a node receives the state of a shard, and crashes at each of its disk
// operations in turn: before the state is there, before it is put in place, or after. The node
// always comes back with the state of the others.
func TestSnapshotIsAdopted(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		burnt, step := 0, int64(testkit.Sized(2, 1))
		for operation := int64(1); operation <= 45; operation += step {
			leader, other := c.lead()
			before := inspect.Of(simQueue(other)).Group(0).Raft().Stats()["last_snapshot_index"]
			other.crash(0)
			for range 20 {
				queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a"})
				queuetest.Complete(t, simQueue(leader), queuetest.Claim(t, simQueue(leader), "a"))
			}
			time.Sleep(time.Second) // until all nodes have applied it
			for _, n := range c.members() {
				c.snapshot(n, 0, 8)
			}
			time.Sleep(time.Second)
			other.start()
			other.crashAfter(operation, int(operation%3)*50)
			time.Sleep(2 * time.Second)
			if simQueue(other) == nil {
				burnt++
			}
			c.mend(true)
			c.rest()
			require.NoError(t, c.check(), "operation %d", operation)
			now := inspect.Of(simQueue(other)).Group(0).Raft().Stats()["last_snapshot_index"]
			require.NotEqual(t, before, now, "the state was not sent")
		}
		require.Greater(t, burnt, int(20/step))
	})
}

// TestCloseDuringEverything: a node is closed while all kinds of calls run. All of them end, and
// every acknowledged change stays.
func TestCloseDuringEverything(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		for round := range 12 {
			leader, n := c.lead()
			if round%2 == 0 {
				n = leader
			}
			q := simQueue(n)
			var calls sync.WaitGroup
			var acknowledged, completed atomic.Int64
			refused := func(err error) bool {
				return err != nil && !errors.Is(err, codeq.ErrClosed) && !errors.Is(err, codeq.ErrUncertain) && !errors.Is(err, codeq.ErrNotLeader)
			}
			for range 10 {
				calls.Go(func() {
					for {
						_, err := q.Produce(ctx, codeq.Task{Queue: fmt.Sprint(round)})
						if err != nil {
							if refused(err) {
								t.Error(err)
							}
							return
						}
						acknowledged.Add(1)
					}
				})
				calls.Go(func() {
					for {
						l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{fmt.Sprint(round)}, LeaseFor: time.Second})
						if err == nil {
							err = q.Complete(ctx, l.Receipt, nil)
						}
						if err != nil {
							if refused(err) {
								t.Error(err)
							}
							return
						}
						completed.Add(1)
					}
				})
				calls.Go(func() {
					_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"empty"}})
					if !errors.Is(err, codeq.ErrClosed) {
						t.Error(err)
					}
				})
			}
			time.Sleep(time.Duration(round*7) * time.Millisecond)
			n.stop()
			calls.Wait()
			n.start()
			time.Sleep(5 * time.Second) // until leases have expired
			_, other := c.lead()
			stats, err := simQueue(other).Stats(ctx)
			require.NoError(t, err)
			left := stats[fmt.Sprint(round)]
			require.GreaterOrEqual(t, int64(left.Ready+left.Leased)+completed.Load()+10, acknowledged.Load(), "of ten completions the outcome may be unknown")
		}
	})
}

// TestLateCommitOfDeposedLeader: while an owner commits a group, another node leads its shard for a
// moment, and then its own node again. The group has no effect, and its calls do not wait for ever.
func TestLateCommitOfDeposedLeader(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		c.rest()
		leader, other := c.lead()
		move := func(from, to *simNode) {
			r := inspect.Of(simQueue(from)).Group(0).Raft()
			require.NoError(t, r.LeadershipTransferToServer(inspect.Of(simQueue(to)).Node().Self().ServerID(), raft.ServerAddress(to.name)).Error())
		}
		q := simQueue(leader)
		var deposed inspect.Committer
		queuetest.WrapCommits(t, q, 0, func(next inspect.Committer) inspect.Committer {
			deposed = next
			return next
		})
		goOn := queuetest.Hold(q, 0)
		produced := queuetest.Producing(q, codeq.Task{Queue: "a"})
		synctest.Wait()
		move(leader, other)
		requireNode(t, other, c.newLeader(leader))
		time.Sleep(100 * time.Millisecond) // until its first entry is there
		move(other, leader)
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, raft.Leader, inspect.Of(q).Group(0).Raft().State())
		require.ErrorIs(t, deposed.Confirm(), codeq.ErrNotLeader)
		require.ErrorIs(t, deposed.Commit(nil), codeq.ErrNotLeader)
		goOn()
		require.NoError(t, <-produced)
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, simQueue(other), "a"))
	})
}

// TestSnapshotForDeposedLeader: while an owner commits a group, its node receives the state of
// another leader. The group is refused, and the state is put in place.
func TestSnapshotForDeposedLeader(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute) // until the leader is the home node
		c.rest()
		old, _ := c.lead()
		q := simQueue(old)
		goOn := queuetest.Hold(q, 0)
		read := make(chan error, 1)
		go func() {
			_, err := q.Stats(t.Context())
			read <- err
		}()
		synctest.Wait()
		c.net.Isolate(old.name, c.names())
		leader := c.newLeader(old)
		for range 20 {
			queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "b"})
		}
		c.snapshot(leader, 0, 5)
		time.Sleep(time.Second)
		c.net.Heal(false)
		time.Sleep(20 * time.Second)
		goOn()
		require.ErrorIs(t, <-read, codeq.ErrNotLeader)
		time.Sleep(time.Second)
		ahead, behind := inspect.Of(simQueue(leader)).Group(0), inspect.Of(q).Group(0)
		require.Equal(t, ahead.Applied(), behind.Applied())
		require.NotEqual(t, "0", behind.Raft().Stats()["last_snapshot_index"])
	})
}

// TestCallsEndWithTheirNode: calls that wait for another node end when their own node is closed,
// before CallTimeout.
func TestCallsEndWithTheirNode(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		q := simQueue(other)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}) // connects them
		c.net.SetDelay(leader.name, other.name, time.Minute)
		done := queuetest.Producing(q, codeq.Task{Queue: "a"})
		time.Sleep(100 * time.Millisecond)
		other.stop()
		closed := time.Now()
		require.ErrorIs(t, <-done, codeq.ErrUncertain)
		require.Less(t, time.Since(closed), 200*time.Millisecond)
		c.net.SetDelay(leader.name, other.name, 0)
		other.start()
	})
}

// TestSuspectsOfANode: a task kills the process of its worker, a node that leads no shard. The task
// is dead-lettered after its attempts and a few more starts; no other task is.
func TestSuspectsOfANode(t *testing.T) {
	t.Parallel()
	const good, maxAttempts = 7, 3
	simCase(t, codeq.Options{MaxAttempts: maxAttempts, Retention: codeq.Forever}, func(t *testing.T, c *simCluster) {
		_, worker := c.lead()
		var poison codeq.ID
		for i := range good + 1 {
			id := queuetest.Produce(t, simQueue(worker), codeq.Task{Queue: "a", Payload: []byte{byte(i)}})[0]
			if i == good/2 {
				poison = id
			}
		}
		over := make(chan struct{})
		defer close(over)
		crashes := 0
		for settled := false; !settled; {
			q, killed := simQueue(worker), make(chan struct{}, 1)
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				wait := time.After(100 * time.Millisecond)
				if j.ID == poison {
					killed <- struct{}{}
					wait = nil
				}
				select {
				case <-wait:
				case <-ctx.Done():
				case <-over:
				}
				return ctx.Err()
			})
			ended := make(chan error, 1)
			go func() {
				ended <- q.Run(t.Context(), &m, &codeq.RunOptions{Name: fmt.Sprint("life ", crashes), LeaseFor: 2 * time.Second, Concurrency: 8})
			}()
			idle := make(chan error, 1)
			go func() { idle <- q.WaitIdle(t.Context(), "a") }()
			select {
			case <-killed:
				worker.crash(0)
				crashes++
				worker.start()
				for simQueue(worker) == nil || simQueue(worker) == q {
					time.Sleep(10 * time.Millisecond)
				}
			case err := <-idle:
				require.NoError(t, err)
				settled = true
			}
		}
		q := simQueue(worker)
		info := queuetest.InfoOf(t, q, poison)
		require.Equal(t, codeq.Dead, info.State)
		require.Equal(t, maxAttempts, info.Attempts)
		done := 0
		for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Done}) {
			require.NoError(t, err)
			require.NotEqual(t, poison, info.ID)
			done++
		}
		require.Equal(t, good, done)
		require.LessOrEqual(t, crashes, maxAttempts+5)
		t.Logf("%d crashes", crashes)
	})
}
