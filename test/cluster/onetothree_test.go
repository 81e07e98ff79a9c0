package cluster_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/platform"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// alone opens the queue on a node's disk without a cluster.
func (n *simNode) alone(t *testing.T) *codeq.Queue {
	o := n.cluster.opts
	inspect.Options(&o).FS, o.Logger = n.machine.Disk(), n.log()
	q, err := codeq.Open("queue", &o)
	require.NoError(t, err)
	return q
}

// firstNode returns a cluster without nodes, and its first node, which is still closed.
func firstNode(t *testing.T, seed uint64, opts codeq.Options) (*simCluster, *simNode) {
	c := newSimCluster(t, seed, 0, opts)
	c.peers = []codeq.Peer{{Node: "n0", Address: "n0"}}
	return c, c.node(false)
}

// begin starts a node as the first node of the cluster.
func (c *simCluster) begin(n *simNode) {
	n.start()
	c.nodes = []*simNode{n}
	c.awaitLeaders()
}

// another starts a node that joins.
func (c *simCluster) another() *simNode {
	n := c.node(true)
	n.start()
	n.join = false
	c.mu.Lock()
	c.nodes = append(c.nodes, n)
	c.mu.Unlock()
	return n
}

// TestOneToThreeAndBack: a queue by itself becomes the first node of a cluster. Two nodes join
// under load while nodes are killed. They are then removed, and the first node is a queue by itself
// again. No acknowledged task is lost, and none is there twice.
func TestOneToThreeAndBack(t *testing.T) {
	t.Parallel()
	for range testkit.Sized(1, 100) {
		seed := testkit.Seed()
		t.Logf("seed %d", seed)
		synctest.Test(t, func(t *testing.T) { oneToThreeAndBack(t, seed) })
	}
}

func oneToThreeAndBack(t *testing.T, seed uint64) {
	ctx := context.Background()
	c, first := firstNode(t, seed, codeq.Options{Shards: 3, Retention: time.Hour})
	q := first.alone(t)
	before := queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 50)...)
	queuetest.Produce(t, q, codeq.Task{Queue: "keyed", Unique: codeq.Unique{Key: "k"}})
	err := q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: 24 * time.Hour, Task: codeq.Task{Queue: "ticks"}})
	require.NoError(t, err)
	held, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
	require.NoError(t, err)
	require.NoError(t, q.Close())

	c.begin(first)
	require.NoError(t, simQueue(first).Complete(ctx, held.Receipt, []byte("done")), "a lease goes on")
	stop := c.load("beside")
	second := c.another()
	second.crash(100)
	time.Sleep(time.Second)
	second.start()
	third := c.another()
	c.awaitLeaders()
	first.crash([]int{0, 50, 100}[c.rng.IntN(3)])
	c.awaitLeaders()
	time.Sleep(3 * time.Second)
	first.start()
	time.Sleep(time.Second)
	payloads := stop()
	c.rest()
	require.NoError(t, c.check())
	for _, n := range []*simNode{second, third} {
		require.NoError(t, simQueue(first).RemoveNode(ctx, n.name))
		c.drop(n)
	}
	c.awaitLeaders()
	require.NoError(t, simQueue(first).Checkpoint(ctx, "copy"))
	first.stop()

	requireAll := func(q *codeq.Queue) {
		found := make(map[string]int)
		require.NoError(t, queuetest.CheckAll(q))
		tasks, err := queuetest.List(q)
		require.NoError(t, err)
		for id, info := range tasks {
			if info.Queue == "a" && info.State == codeq.Ready {
				found[id.String()]++
				found[string(info.Payload)]++
			}
		}
		for _, id := range before {
			require.True(t, id == held.ID || found[id.String()] == 1, "task %s is lost", id)
		}
		for _, payload := range payloads {
			require.Equal(t, 1, found[payload], payload)
		}
		o := queuetest.InfoOf(t, q, held.ID)
		require.Equal(t, "done", string(o.Result))
		_, err = q.Produce(ctx, codeq.Task{Queue: "keyed", Unique: codeq.Unique{Key: "k"}})
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		var names []string
		schedules, err := q.Schedules(ctx)
		require.NoError(t, err)
		for _, s := range schedules {
			names = append(names, s.Name)
		}
		require.Equal(t, []string{"s"}, names)
	}
	last := first.alone(t)
	requireAll(last)
	requireAlone(t, last)
	require.NoError(t, last.Close())
	report, err := codeq.Verify("queue", inspect.With(&codeq.VerifyOptions{}, inspect.Private{FS: first.machine.Disk()}))
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	names, err := first.machine.Disk().List("queue")
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"CODEQ", "LOCK", "shard-000", "shard-001", "shard-002"}, names)

	// A cluster again, from the directory and from the copy, with any name.
	for dir, name := range map[string]string{"queue": first.name, "copy": "another"} {
		first.machine.Put(first.machine.Disk(), simtest.NewVotes())
		o, _ := c.options(first)
		o.Cluster.Node, o.Cluster.Peers = name, nil
		q, err := codeq.Open(dir, o)
		require.NoError(t, err)
		require.NoError(t, q.WaitReady(ctx))
		requireAll(q)
		require.NoError(t, q.Close())
	}
	c.nodes = nil
	c.close()
}

// load produces tasks on all members that are up, until stop is called. Each task has its own
// payload. stop returns the payloads of the acknowledged tasks.
func (c *simCluster) load(name string) (stop func() (acknowledged []string)) {
	var over atomic.Bool
	var producing sync.WaitGroup
	var all [3][]string
	for i := range all {
		producing.Go(func() {
			for n := 0; !over.Load(); n++ {
				members, payload := c.members(), fmt.Sprint(name, i, "-", n)
				if q, _ := members[(n+i)%len(members)].queue(); q != nil {
					if _, err := q.Produce(context.Background(), codeq.Task{Queue: "a", Payload: []byte(payload)}); err == nil {
						all[i] = append(all[i], payload)
					}
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	return func() []string {
		over.Store(true)
		producing.Wait()
		return slices.Concat(all[:]...)
	}
}

// TestCheckpointBecomesCluster: a checkpoint is made under load, of a queue by itself or of a
// cluster of three nodes. It becomes a new cluster of three nodes, under load and while a node is
// killed. Each task that was acknowledged before the checkpoint, or by the new cluster, is there
// once.
func TestCheckpointBecomesCluster(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, nodes := range []int{0, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { checkpointBecomesCluster(t, nodes) })
		})
	}
}

func checkpointBecomesCluster(t *testing.T, nodes int) {
	ctx := context.Background()
	old, from := firstNode(t, 1, codeq.Options{Shards: 3})
	if nodes == 0 {
		from.q = from.alone(t)
		old.nodes = []*simNode{from}
	} else {
		old.begin(from)
		for range nodes - 1 {
			from = old.another()
		}
	}
	stop := old.load("before")
	time.Sleep(2 * time.Second)
	want := stop()
	require.NotEmpty(t, want)
	stop = old.load("beside")
	time.Sleep(time.Second)
	require.NoError(t, simQueue(from).Checkpoint(ctx, "copy"))
	time.Sleep(time.Second)
	stop()
	old.close()

	c, first := firstNode(t, 2, codeq.Options{Shards: 3})
	first.machine.Put(from.machine.Disk(), first.machine.Votes())
	require.NoError(t, first.machine.Disk().RemoveAll("queue"))
	require.NoError(t, first.machine.Disk().Rename("copy", "queue"))
	c.begin(first)
	stop = c.load("after")
	c.another()
	killed := c.another()
	c.awaitLeaders()
	killed.crash(100)
	time.Sleep(3 * time.Second)
	killed.start()
	time.Sleep(time.Second)
	want = append(want, stop()...)
	c.rest()
	require.NoError(t, c.check())
	found := make(map[string]int)
	for {
		l := queuetest.ClaimNow(t, simQueue(killed), "a")
		if l == nil {
			break
		}
		found[string(l.Payload)]++
		require.Equal(t, 1, found[string(l.Payload)], "%s", l.Payload)
	}
	for _, payload := range want {
		require.Equal(t, 1, found[payload], payload)
	}
	c.close()
}

// TestConversionIsInterrupted: a queue becomes the first node of a cluster, or a node becomes a
// queue by itself. A crash interrupts that at any point. The next Open finishes it, and nothing is
// lost.
func TestConversionIsInterrupted(t *testing.T) {
	t.Parallel()
	for range testkit.Sized(6, 1000) {
		seed := testkit.Seed()
		synctest.Test(t, func(t *testing.T) { conversionIsInterrupted(t, seed) })
	}
}

func conversionIsInterrupted(t *testing.T, seed uint64) {
	t.Logf("seed %d", seed)
	c, n := firstNode(t, seed, codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk})
	q := n.alone(t)
	queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
	require.NoError(t, q.Close())
	// interrupt opens the queue. The disk afterwards is one after a crash during that Open.
	interrupt := func(o *codeq.Options) {
		left, percent, rng := 1+c.rng.IntN(90), []int{0, 50, 100}[c.rng.IntN(3)], rand.New(rand.NewPCG(seed, 4))
		disk, votes := n.machine.Disk(), n.machine.Votes()
		var mu sync.Mutex // guards left and the disk after the crash
		inspect.Options(o).FS = &testkit.HookFS{FS: inspect.Options(o).FS, Before: func(string, string) error {
			mu.Lock()
			defer mu.Unlock()
			if left--; left == 0 {
				n.machine.Put(disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng}), votes.Clone())
			}
			return nil
		}}
		q, err := codeq.Open("queue", o)
		require.NoError(t, err)
		require.NoError(t, q.Close())
	}
	for range 2 {
		o, _ := c.options(n)
		interrupt(o)
		if c.rng.IntN(2) == 0 {
			c.begin(n)
			require.Equal(t, 3, n.count(t))
			n.stop()
			alone := c.opts
			inspect.Options(&alone).FS = n.machine.Disk()
			interrupt(&alone)
		}
	}
	o := c.opts
	inspect.Options(&o).FS = n.machine.Disk()
	q, err := codeq.Open("queue", &o)
	require.NoError(t, err)
	require.EqualValues(t, 3, queuetest.CountsOf(t, q, "a").Ready)
	require.NoError(t, queuetest.CheckAll(q))
	require.NoError(t, q.Close())
	c.nodes = nil
	c.close()
}

// TestKilledNodeBecomesAlone: the process of a node was killed, while its machine ran on. The node
// is a queue by itself again, with the tasks that it acknowledged below DurabilityDisk.
func TestKilledNodeBecomesAlone(t *testing.T) {
	if platform.BootID() == "" {
		t.Skip("the system does not tell one boot from another")
	}
	synctest.Test(t, func(t *testing.T) {
		c, n := firstNode(t, 1, codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess})
		o, _ := c.options(n)
		inspect.Options(o).Boot = "" // that of this machine
		q, err := codeq.Open("queue", o)
		require.NoError(t, err)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		time.Sleep(time.Second) // until the cluster has begun
		n.machine.Put(n.machine.Disk().Clone(), n.machine.Votes())
		require.NoError(t, q.Close())
		q = n.alone(t)
		require.EqualValues(t, 2, queuetest.CountsOf(t, q, "a").Ready)
		require.NoError(t, q.Close())
		c.close()
	})
}

// TestNodeWithoutPowerBecomesAlone: below DurabilityDisk the only node of a cluster may lose, with
// its power, the fact that others had joined it. It is a queue by itself again only after
// RecoverCluster.
func TestNodeWithoutPowerBecomesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := firstNode(t, 1, codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess})
		c.begin(n)
		n.produce(t, 2)
		time.Sleep(time.Second) // until the cluster has begun
		n.crash(100)
		inspect.Options(&c.opts).Boot = "another"
		for range 2 {
			_, err := codeq.Open("queue", inspect.With(&codeq.Options{}, inspect.Private{FS: n.machine.Disk(), Boot: "another"}))
			require.ErrorIs(t, err, codeq.ErrPowerLost)
		}
		require.NoError(t, c.recover(n))
		q := n.alone(t)
		require.EqualValues(t, 2, queuetest.CountsOf(t, q, "a").Ready)
		require.NoError(t, q.Close())
		c.nodes = nil
		c.close()
	})
}

// TestFailedFoundingIsUndone: Open could not make a queue by itself the first node of a cluster.
// Open without a cluster then works again.
func TestFailedFoundingIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := firstNode(t, 1, codeq.Options{Shards: 2})
		q := n.alone(t)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		require.NoError(t, q.Close())
		o, _ := c.options(n)
		require.NoError(t, o.Cluster.Listener.Close())
		o.Cluster.Listener, o.Cluster.Listen, o.Cluster.Advertise = nil, "127.0.0.1:99999", n.name
		_, err := codeq.Open("queue", o)
		require.ErrorContains(t, err, "99999")
		q = n.alone(t)
		require.EqualValues(t, 2, queuetest.CountsOf(t, q, "a").Ready)
		require.NoError(t, q.Close())
		c.close()
	})
}

// TestOneDoesNotBecomeAnother: a queue by itself neither joins a cluster nor founds one with
// others. A node of a larger cluster does not become a queue by itself.
func TestOneDoesNotBecomeAnother(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		one := newSimNode(c, "one", false)
		require.NoError(t, one.alone(t).Close())
		for _, join := range []bool{false, true} {
			one.join = join
			err := c.open(one)
			require.ErrorIs(t, err, codeq.ErrNotMember)
			require.ErrorContains(t, err, "without other peers")
		}
		require.NoError(t, one.alone(t).Close())

		n := c.nodes[0]
		n.stop()
		for range 2 {
			_, err := codeq.Open("queue", inspect.With(&codeq.Options{}, inspect.Private{FS: n.machine.Disk()}))
			require.ErrorIs(t, err, codeq.ErrNotMember)
			require.ErrorContains(t, err, fmt.Sprintf("node %q, which is not the only one", n.name))
		}
	})
}

// TestAtWorkOnBothSides: a queue by itself becomes a node, or a node becomes a queue by itself. If
// its process was killed, its tasks at work become suspects. Else they come back at once. In
// neither case does the attempt count.
func TestAtWorkOnBothSides(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprint("killed ", killed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, first := firstNode(t, 1, codeq.Options{Shards: 2, LeaseFor: time.Hour})
				c.opts.Durability = codeq.DurabilityDisk
				q := first.alone(t)
				alone := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				req := codeq.ClaimRequest{Queues: []string{"a"}, Local: true}
				_, err := q.Claim(t.Context(), req)
				require.NoError(t, err)
				require.NoError(t, q.Checkpoint(t.Context(), "copy"))
				if killed {
					first.machine.Crash(0, c.seed())
					_ = q.Close() // the machine has lost the disk
				} else {
					require.NoError(t, q.Close())
				}
				c.begin(first)
				synctest.Wait()
				if info := queuetest.InfoOf(t, simQueue(first), alone); killed {
					require.Equal(t, codeq.Leased, info.State, "its lease ends an hour later")
					time.Sleep(time.Hour + time.Minute)
					synctest.Wait()
				} else {
					require.Equal(t, codeq.Ready, info.State)
				}
				info := queuetest.InfoOf(t, simQueue(first), alone)
				require.Equal(t, killed, info.Suspect)
				require.Zero(t, info.Attempts)

				node := queuetest.Produce(t, simQueue(first), codeq.Task{Queue: "b"})[0]
				req.Queues = []string{"b"}
				_, err = simQueue(first).Claim(t.Context(), req)
				require.NoError(t, err)
				if killed {
					first.crash(0)
				} else {
					first.stop()
				}
				q = first.alone(t)
				synctest.Wait()
				info = queuetest.InfoOf(t, q, node)
				require.Equal(t, killed, info.Suspect)
				require.Equal(t, killed, info.State == codeq.Blocked)
				require.Zero(t, info.Attempts)
				require.NoError(t, q.Close())
				c.nodes = nil
				c.close()
			})
		})
	}
}
