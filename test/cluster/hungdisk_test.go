package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// simStall leaves time for a second try within simCallTimeout.
const simStall = time.Second

// simElections is the length of an election that fails twice because candidates share the votes.
const simElections = 4 * time.Second

func always(string, string) bool { return true }

// stalledOn returns how long the disk of a node has been stalled, as ClusterStatus on another node
// says.
func stalledOn(t *testing.T, by, of *simNode) time.Duration {
	st := statusOf(t, by)
	for _, r := range st.Shards[0].Replicas {
		if r.Node == of.name {
			require.Empty(t, r.LastError)
			return r.Stalled
		}
	}
	t.Fatalf("no replica of node %s", of.name)
	return 0
}

// TestHungDiskOfLeader: the disk of a leader hangs, and another node leads. From then on calls
// succeed within HeartbeatTimeout on every node, also on the hung one, and so do those under way.
// Only a call whose CallTimeout ends before may be uncertain. The hung node reports its stall. It
// leads again when its disk answers, and waits longer after the second stall.
func TestHungDiskOfLeader(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{StallAfter: simStall}, func(t *testing.T, c *simCluster) {
		ctx := t.Context()
		time.Sleep(2 * time.Minute) // the leader is at home
		c.rest()
		leader, other := c.lead()
		q := simQueue(leader)
		produce := func(n *simNode) error {
			_, err := simQueue(n).Produce(ctx, codeq.Task{Queue: "a"})
			return err
		}
		require.NoError(t, produce(leader))
		require.NoError(t, q.Health(ctx))
		require.Zero(t, stalledOn(t, other, leader))

		produced, uncertain := 1, 0
		hang := func() (answer func(), next *simNode) {
			type outcome struct {
				err error
				at  time.Time
			}
			early, late := make(chan outcome, 2), make(chan outcome, 3)
			start := func(n *simNode, outcomes chan<- outcome) {
				produced++
				go func() {
					err := produce(n)
					outcomes <- outcome{err, time.Now()}
				}()
			}
			answer, began := leader.hang(always), time.Now()
			start(leader, early)
			start(other, early)
			next = c.newLeader(leader)
			leads := time.Now()
			took, known := leads.Sub(began), leads.Add(optionsOf(q).Cluster.HeartbeatTimeout)
			t.Logf("another node leads after %v", took)
			require.Greater(t, took, optionsOf(q).StallAfter)
			require.Less(t, took, optionsOf(q).StallAfter+simElections)
			for _, n := range c.members() {
				start(n, late)
			}
			for range cap(late) {
				o := <-late
				require.NoError(t, o.err)
				require.False(t, o.at.After(known), o.at.Sub(leads))
			}
			for range cap(early) {
				o := <-early
				require.False(t, o.at.After(known), "%v: it is tried again with the next leader", o.err)
				if o.err != nil {
					require.ErrorIs(t, o.err, codeq.ErrUncertain)
					require.WithinDuration(t, began.Add(simCallTimeout), o.at, 50*time.Millisecond)
					uncertain++
				}
			}
			return answer, next
		}
		answer, next := hang()
		term := inspect.Of(simQueue(next)).Group(0).Raft().CurrentTerm()
		require.True(t, !inspect.Of(q).Leads(0), "its owner has ended")
		err := q.Health(ctx)
		require.ErrorIs(t, err, codeq.ErrStalled)
		require.ErrorContains(t, err, "log")
		info, err := q.ProcessInfo(ctx)
		require.NoError(t, err)
		require.Greater(t, info.Stalled, optionsOf(q).StallAfter)
		for _, by := range []*simNode{leader, other} {
			require.Greater(t, stalledOn(t, by, leader), optionsOf(q).StallAfter)
		}
		require.NoError(t, simQueue(other).Health(ctx))
		require.NoError(t, q.WaitReady(ctx))
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.LessOrEqual(t, int(stats["a"].Ready), produced)
		require.GreaterOrEqual(t, int(stats["a"].Ready), produced-uncertain)
		require.ErrorIs(t, simQueue(next).TransferLeadership(ctx, 0, leader.name), codeq.ErrCannotLead)
		require.NoError(t, simQueue(next).TransferLeadership(ctx, 0, ""))
		time.Sleep(time.Minute)
		requireNode(t, next, c.newLeader(leader))
		require.Equal(t, term, inspect.Of(simQueue(next)).Group(0).Raft().CurrentTerm(), "nobody has stood for election")
		require.NoError(t, produce(leader))

		answer()
		c.rest()
		require.NoError(t, q.Health(ctx))
		require.Zero(t, stalledOn(t, other, leader))
		time.Sleep(time.Minute)
		require.True(t, inspect.Of(q).Leads(0), "it leads its share again")

		answer, _ = hang()
		answer()
		time.Sleep(40 * time.Second)
		require.True(t, !inspect.Of(q).Leads(0), "the second time within an hour it has to wait")
		time.Sleep(time.Minute)
		require.True(t, inspect.Of(q).Leads(0))
	})
}

// TestHungDisksOfAll: a leader with a hung disk goes on leading while no majority is better off.
func TestHungDisksOfAll(t *testing.T) {
	t.Parallel()
	for _, hung := range []int{2, 3} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			time.Sleep(2 * time.Minute)
			c.rest()
			leader, _ := c.lead()
			q := simQueue(leader)
			group := inspect.Of(q).Group(0).Raft()
			term, answers := group.CurrentTerm(), []func(){leader.hang(always)}
			for _, n := range c.members() {
				if n != leader && len(answers) < hung {
					answers = append(answers, n.hang(always))
					// The node has something to store.
					go func() { _ = inspect.Of(simQueue(n)).Node().Undrain(t.Context()) }()
					go func() { _ = inspect.Of(simQueue(n)).Node().Drain(t.Context()) }()
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := q.Produce(ctx, codeq.Task{Queue: "a"})
			<-ctx.Done()
			cancel()
			require.ErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorIs(t, q.Health(t.Context()), codeq.ErrStalled)
			for _, answer := range answers {
				answer()
			}
			time.Sleep(10 * time.Second)
			require.Equal(t, term, group.CurrentTerm())
			for _, n := range c.members() {
				require.NoError(t, simQueue(n).Undrain(t.Context()))
			}
		})
	}
}

// TestHungStoreOfLeader: the store of a leader does not answer, but its log does. This is a stall
// as well. If the disk hangs when the node has to store the term of the next leader, calls on the
// node go to that leader nevertheless.
func TestHungStoreOfLeader(t *testing.T) {
	t.Parallel()
	for _, hangs := range []func(op, name string) bool{
		func(_, name string) bool { return strings.Contains(name, "shard-000/") },
		func(_, name string) bool { return strings.Contains(name, "shard-000/") || name == "votes" },
	} {
		simCase(t, codeq.Options{StallAfter: simStall, MemTableBytes: 256 << 10}, func(t *testing.T, c *simCluster) {
			time.Sleep(2 * time.Minute)
			c.rest()
			leader, other := c.lead()
			answer := leader.hang(hangs)
			defer answer()
			began := time.Now()
			for c.leader(0) == leader && time.Since(began) < time.Minute {
				_, err := simQueue(other).Produce(t.Context(), codeq.Task{Queue: "a", Payload: make([]byte, 64<<10)})
				if !errors.Is(err, codeq.ErrUncertain) { // the leader ended after the proposal
					require.NoError(t, err)
				}
			}
			require.NotEqual(t, leader.name, c.newLeader(leader).name)
			err := simQueue(leader).Health(t.Context())
			require.ErrorIs(t, err, codeq.ErrStalled)
			require.ErrorContains(t, err, "shard 0")
			require.NotContains(t, err.Error(), "log")
			began = time.Now()
			_, err = simQueue(leader).Produce(t.Context(), codeq.Task{Queue: "a"})
			require.NoError(t, err)
			require.LessOrEqual(t, time.Since(began), optionsOf(simQueue(leader)).Cluster.HeartbeatTimeout)
		})
	}
}

// boundedCalls makes calls on all nodes, one after the other on each, until stop is called. Each
// call must end within twice CallTimeout, with any outcome: it ends after CallTimeout, or later if
// the shard has made progress meanwhile. Calls about the state of a node end earlier.
func boundedCalls(t *testing.T, c *simCluster) (stop func()) {
	ctx := t.Context()
	var ended sync.WaitGroup
	over := make(chan struct{})
	for _, n := range c.members() {
		q := simQueue(n)
		calls := []struct {
			name string
			most time.Duration
			call func() error
		}{
			{"Produce", 2 * simCallTimeout, func() error {
				_, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 8<<10)})
				return err
			}},
			{"Claim", 2 * simCallTimeout, func() error {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
				if err == nil {
					err = q.Complete(ctx, l.Receipt, nil)
				}
				return err
			}},
			{"Stats", 2 * simCallTimeout, func() error { _, err := q.Stats(ctx); return err }},
			{"List", 10 * simCallTimeout, func() error { // several calls
				for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
					if err != nil {
						return err
					}
				}
				return nil
			}},
			{"Health", 0, func() error { return q.Health(ctx) }},
			{"ProcessInfo", 2 * simCallTimeout, func() error { _, err := q.ProcessInfo(ctx); return err }},
			{"StorageStats", time.Second, func() error { _, err := q.StorageStats(); return err }},
			{"ClusterStatus", simCallTimeout, func() error { _, err := q.ClusterStatus(ctx); return err }},
		}
		ended.Go(func() {
			for {
				for _, call := range calls {
					began := time.Now()
					err := call.call()
					if took, most := time.Since(began), call.most; took > most && (call.name != "Claim" || took > 2*most) {
						t.Errorf("%s on %s took %v: %v", call.name, n.name, took, err)
					}
				}
				select {
				case <-over:
					return
				case <-time.After(300 * time.Millisecond):
				}
			}
		})
	}
	return func() {
		close(over)
		ended.Wait()
	}
}

// TestHungParts: some part of a leader's disk hangs. After a moment another node leads, and goes on
// leading. Calls end in time on every node. The log says when the stall begins and ends.
func TestHungParts(t *testing.T) {
	t.Parallel()
	parts := []struct {
		name  string
		hangs func(op, name string) bool
	}{
		{"log", func(_, name string) bool { return strings.Contains(name, "/raft/") }},
		{"votes", func(_, name string) bool { return name == "votes" }},
		{"store", func(_, name string) bool { return strings.Contains(name, "shard-000/") }},
		{"syncs", func(op, _ string) bool { return op == "sync" }},
		{"statfs", func(op, _ string) bool { return op == "statfs" }},
		{"reads", func(op, _ string) bool { return op == "read" }},
		{"snapshots", func(_, name string) bool { return strings.Contains(name, ".raft") }},
		{"directories", func(op, name string) bool {
			return op == "open directory" || op == "sync" && !strings.Contains(name, ".")
		}},
		{"removals", func(op, _ string) bool { return op == "remove" }},
	}
	for _, part := range parts[:testkit.Sized(6, len(parts))] {
		t.Run(part.name, func(t *testing.T) {
			log := testkit.NewUserHandler(func(string) {})
			simCase(t, codeq.Options{StallAfter: simStall, MemTableBytes: 256 << 10, Logger: slog.New(log)}, func(t *testing.T, c *simCluster) {
				time.Sleep(2 * time.Minute)
				c.rest()
				leader, other := c.lead()
				stop := boundedCalls(t, c)
				time.Sleep(5 * time.Second)
				require.Empty(t, log.About("disk does not answer"))
				answer, began := leader.hang(part.hangs), time.Now()
				c.snapshot(leader, 0, 1)
				if part.name == "votes" {
					time.Sleep(time.Minute)
					require.Zero(t, stalledOn(t, other, leader), "a leader stores no vote")
					requireNode(t, leader, c.leader(0))
				} else {
					for stalledOn(t, other, leader) == 0 {
						require.Less(t, time.Since(began), 2*simStall)
						time.Sleep(100 * time.Millisecond)
					}
					next := c.newLeader(leader)
					t.Logf("another node leads after %v", time.Since(began))
					require.Less(t, time.Since(began), simStall+simElections)
					time.Sleep(20 * time.Second)
					requireNode(t, next, c.leader(0))
					require.ErrorIs(t, simQueue(leader).Health(t.Context()), codeq.ErrStalled)
				}
				answer()
				time.Sleep(10 * time.Second)
				stop()
				require.NoError(t, simQueue(leader).Health(t.Context()))
				require.Equal(t, len(log.About("disk does not answer")), len(log.About("disk answers again")))
				require.LessOrEqual(t, len(log.About("disk does not answer")), 2, "of the log and the store")
				c.rest()
			})
		})
	}
}

// TestShortStalls: a disk hangs again and again for less than StallAfter, or is slow. Neither
// changes the leader.
func TestShortStalls(t *testing.T) {
	t.Parallel()
	for name, disturb := range map[string]func(nodes []*simNode){
		"short": func(nodes []*simNode) {
			for range 60 {
				answer := nodes[0].hang(always)
				time.Sleep(simStall * 9 / 10)
				answer()
				time.Sleep(50 * time.Millisecond)
			}
		},
		"slow": func(nodes []*simNode) {
			answer := nodes[0].hang(func(op, name string) bool { time.Sleep(simStall * 9 / 10); return false })
			time.Sleep(time.Minute)
			answer()
		},
		"all slow": func(nodes []*simNode) {
			for _, n := range nodes {
				answer := n.hang(func(op, name string) bool { time.Sleep(simStall * 9 / 10); return false })
				defer answer()
			}
			time.Sleep(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			log := testkit.NewUserHandler(func(string) {})
			simCase(t, codeq.Options{StallAfter: simStall, Logger: slog.New(log)}, func(t *testing.T, c *simCluster) {
				time.Sleep(2 * time.Minute)
				c.rest()
				leader, _ := c.lead()
				nodes := append([]*simNode{leader}, slices.DeleteFunc(c.members(), func(n *simNode) bool { return n == leader })...)
				group := inspect.Of(simQueue(leader)).Group(0).Raft()
				term := group.CurrentTerm()
				stop := boundedCalls(t, c)
				disturb(nodes)
				stop()
				require.Empty(t, log.About("disk does not answer"))
				require.Equal(t, term, group.CurrentTerm())
			})
		})
	}
}

// TestDisksHangInTurn: a second node hangs as soon as it leads. While two of three disks hang, no
// node leads for long, and calls end in time. When one of the disks answers, there is a leader
// again.
func TestDisksHangInTurn(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{StallAfter: simStall}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, _ := c.lead()
		stop := boundedCalls(t, c)
		first := leader.hang(always)
		next := c.newLeader(leader)
		second := next.hang(always)
		time.Sleep(20 * time.Second)
		for _, n := range []*simNode{leader, next} {
			require.ErrorIs(t, simQueue(n).Health(t.Context()), codeq.ErrStalled)
		}
		first()
		began := time.Now()
		last := c.newLeader(next)
		require.Less(t, time.Since(began), 20*time.Second)
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
			_, err := simQueue(last).Produce(t.Context(), codeq.Task{Queue: "b"})
			if err == nil {
				break
			}
			require.True(t, time.Now().Before(end), err)
		}
		second()
		time.Sleep(10 * time.Second)
		stop()
		for _, n := range c.members() {
			require.NoError(t, simQueue(n).Health(t.Context()))
			queuetest.Produce(t, simQueue(n), codeq.Task{Queue: "b"})
		}
	})
}

// TestLeaderHangsAmidChange: the disk of the leader hangs during a transfer, and during a change of
// members. On any node each call ends with its ctx at the latest, and the change is possible
// afterwards.
func TestLeaderHangsAmidChange(t *testing.T) {
	t.Parallel()
	const patience = 40 * time.Second
	for name, change := range map[string]func(ctx context.Context, by *codeq.Queue, other string) error{
		"TransferLeadership": func(ctx context.Context, by *codeq.Queue, other string) error {
			return by.TransferLeadership(ctx, 0, other)
		},
		"Drain": func(ctx context.Context, by *codeq.Queue, _ string) error { return by.Drain(ctx) },
		"AddNode": func(ctx context.Context, by *codeq.Queue, _ string) error {
			return by.AddNode(ctx, codeq.Peer{Node: "n9", Address: "n9"})
		},
		"ReplaceNode": func(ctx context.Context, by *codeq.Queue, other string) error {
			return by.ReplaceNode(ctx, other, codeq.Peer{Node: "n9", Address: "n9"})
		},
		"WaitReady": func(ctx context.Context, by *codeq.Queue, _ string) error { return by.WaitReady(ctx) },
		"SetSchedule": func(ctx context.Context, by *codeq.Queue, _ string) error {
			return by.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Hour, Task: codeq.Task{Queue: "s"}})
		},
	} {
		for _, on := range []string{"leader", "other"} {
			t.Run(name+" on "+on, func(t *testing.T) {
				simCase(t, codeq.Options{StallAfter: simStall}, func(t *testing.T, c *simCluster) {
					time.Sleep(2 * time.Minute)
					c.rest()
					leader, other := c.lead()
					by := simQueue(leader)
					if on == "other" {
						by = simQueue(other)
					}
					var operations atomic.Int64
					answer := leader.hang(func(string, string) bool { return operations.Add(1) > 2 })
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					began := time.Now()
					err := change(ctx, by, other.name)
					took := time.Since(began)
					require.Less(t, took, patience+100*time.Millisecond, err)
					began = time.Now()
					for ; ; time.Sleep(100 * time.Millisecond) {
						_, err := simQueue(other).Produce(t.Context(), codeq.Task{Queue: "b"})
						if err == nil {
							break
						}
						require.Less(t, time.Since(began), 20*time.Second, err)
					}
					answer()
					time.Sleep(time.Minute)
					require.NoError(t, simQueue(leader).Undrain(t.Context()))
				})
			})
		}
	}
}

// TestDiskHangsAmidSnapshot: a disk hangs while a node that lags behind gets a snapshot. If the
// disk of the receiver hangs, nothing else stops. If the disk of the sender hangs, another node
// leads. In the end the receiver has all entries.
func TestDiskHangsAmidSnapshot(t *testing.T) {
	t.Parallel()
	for _, whose := range []string{"receiver", "sender"} {
		for _, after := range []int64{20, 2}[:testkit.Sized(1, 2)] {
			t.Run(fmt.Sprint(whose, " after ", after), func(t *testing.T) {
				behindCase(t, func(t *testing.T, c *simCluster, leader, behind *simNode, _ codeq.ID) {
					hung := map[string]*simNode{"receiver": behind, "sender": leader}[whose]
					stop := boundedCalls(t, c)
					behind.fill(simtest.DiskSize)
					var sent atomic.Bool
					var operations atomic.Int64
					answer := hung.hang(func(_, name string) bool {
						if strings.Contains(name, ".raft") {
							sent.Store(true)
						}
						return sent.Load() && operations.Add(1) > after
					})
					time.Sleep(30 * time.Second)
					require.True(t, sent.Load())
					if whose == "receiver" {
						requireNode(t, leader, c.leader(0))
					} else {
						require.NotEqual(t, leader.name, c.leader(0).name)
					}
					answer()
					time.Sleep(30 * time.Second)
					stop()
					c.rest()
					require.NoError(t, simQueue(behind).Health(t.Context()))
					require.Equal(t, inspect.Of(simQueue(leader)).Group(0).Applied(), inspect.Of(simQueue(behind)).Group(0).Applied())
				})
			})
		}
	}
}

// TestDrainOfHungNode: verbs that must write on a hung disk end with their ctx, or after
// CallTimeout. Verbs of other nodes work.
func TestDrainOfHungNode(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{StallAfter: simStall}, func(t *testing.T, c *simCluster) {
		time.Sleep(2 * time.Minute)
		c.rest()
		leader, _ := c.lead()
		answer := leader.hang(always)
		for _, verb := range []func(context.Context) error{simQueue(leader).Drain, simQueue(leader).Undrain} {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			require.ErrorIs(t, verb(ctx), context.DeadlineExceeded)
			cancel()
			require.Equal(t, time.Second, time.Since(began))
			require.ErrorIs(t, verb(t.Context()), codeq.ErrStalled)
			require.LessOrEqual(t, time.Since(began), simCallTimeout+time.Second)
		}
		next := c.newLeader(leader)
		other := c.third(leader, next)
		require.NoError(t, simQueue(leader).TransferLeadership(t.Context(), 0, other.name), "a verb of the hung node reaches the leader")
		require.NoError(t, simQueue(other).TransferLeadership(t.Context(), 0, ""))
		require.NoError(t, simQueue(next).RemoveNode(t.Context(), leader.name))
		answer()
		c.drop(leader)
	})
}

// TestCloseOfHungNode: Close returns although the disk hangs. The directory stays locked until the
// disk answers.
func TestCloseOfHungNode(t *testing.T) {
	t.Parallel()
	close := func(t *testing.T, q *codeq.Queue, o *codeq.Options, life *simtest.Life) {
		require.True(t, life.Hang(always))
		defer life.Answer()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := q.Produce(ctx, codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrUncertain)
		for range 2 {
			began := time.Now()
			require.ErrorIs(t, q.Close(), codeq.ErrStalled)
			require.LessOrEqual(t, time.Since(began), 2*optionsOf(q).StallAfter)
		}
		_, err = codeq.Open("queue", o)
		require.ErrorContains(t, err, "LOCK", "it is locked")
		life.Answer()
		require.NoError(t, q.Close())
	}
	synctest.Test(t, func(t *testing.T) {
		m := simtest.NewMachine()
		life := m.Start()
		o := *inspect.With(&codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk}, inspect.Private{FS: life.FS()})
		q, err := codeq.Open("queue", &o)
		require.NoError(t, err)
		inspect.Options(&o).FS = m.Disk() // the disk knows the lock, too
		close(t, q, &o, life)
	})
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 1, codeq.Options{Shards: 1})
		c.awaitLeaders()
		n := c.leader(0)
		q, life := simQueue(n), n.life
		o := *optionsOf(q)
		inspect.Options(&o).FS = n.machine.Disk()
		close(t, q, &o, life)
		c.close()
	})
}

// TestStorageStatsAfterClose: after Close has returned, no call asks the disk for its free space.
func TestStorageStatsAfterClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		life := simtest.NewMachine().Start()
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: life.FS()}))
		require.NoError(t, err)
		require.NoError(t, q.Close())
		var asked atomic.Bool
		life.Hang(func(op, _ string) bool { asked.Store(true); return op == "statfs" })
		defer life.Answer()
		st, err := q.StorageStats()
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.Nil(t, st)
		p, err := q.ProcessInfo(t.Context())
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.Nil(t, p)
		require.False(t, asked.Load())
	})
}

// TestCloseBesideHungCheckpoint: Close returns although a checkpoint hangs, and no other operation
// runs on the disk.
func TestCloseBesideHungCheckpoint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		life := simtest.NewMachine().Start()
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: life.FS()}))
		require.NoError(t, err)
		life.Hang(func(_, name string) bool { return !strings.HasPrefix(name, "queue/") })
		defer life.Answer()
		copied := make(chan error, 1)
		go func() { copied <- q.Checkpoint(context.Background(), "copy") }()
		synctest.Wait()
		for range 2 {
			began := time.Now()
			err := q.Close()
			require.ErrorIs(t, err, codeq.ErrStalled)
			require.ErrorContains(t, err, "checkpoint")
			require.LessOrEqual(t, time.Since(began), 3*optionsOf(q).StallAfter)
		}
		life.Answer()
		require.ErrorIs(t, <-copied, codeq.ErrClosed)
		require.NoError(t, q.Close())
	})
}

// TestHungDisk: a queue by itself reports that its disk hangs, and logs the begin and the end. Its
// calls end with their ctx, and work again when the disk answers.
func TestHungDisk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		life, log := simtest.NewMachine().Start(), testkit.NewUserHandler(func(string) {})
		q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1, Durability: codeq.DurabilityDisk, Logger: slog.New(log)}, inspect.Private{FS: life.FS()}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		require.NoError(t, q.Health(t.Context()))
		life.Hang(func(op, _ string) bool { return op == "sync" })
		defer life.Answer()
		begun := time.Now()
		late := queuetest.Producing(q, codeq.Task{Queue: "a"})
		time.Sleep(optionsOf(q).StallAfter - 1)
		require.NoError(t, q.Health(t.Context()))
		time.Sleep(2 * time.Nanosecond)
		err = q.Health(t.Context())
		require.ErrorIs(t, err, codeq.ErrStalled)
		require.ErrorContains(t, err, "shard 0")
		synctest.Wait()
		require.NotEmpty(t, log.About("disk does not answer"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		info, err := q.ProcessInfo(ctx)
		require.NoError(t, err)
		require.Positive(t, info.Shards[0].Stalled)
		require.NotEmpty(t, info.Shards[0].LastError)
		for name, call := range map[string]func() error{
			"Produce": func() error { _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); return err },
			"Claim":   func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err },
			"Stats":   func() error { _, err := q.Stats(ctx); return err },
			"Info":    func() error { _, err := q.Info(ctx); return err },
			"List": func() error {
				for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
					return err
				}
				return errors.New("no tasks")
			},
		} {
			require.ErrorIs(t, call(), context.DeadlineExceeded, name)
		}
		require.LessOrEqual(t, time.Since(begun), optionsOf(q).StallAfter+2*time.Second)
		life.Answer()
		require.NoError(t, <-late)
		require.NoError(t, q.Health(t.Context()))
		synctest.Wait()
		require.NotEmpty(t, log.About("disk answers again"))
	})
}
