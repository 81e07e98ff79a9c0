package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/cluster"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// membersOfShards returns the names of the members of each shard, as the node knows them.
func (n *simNode) membersOfShards(t *testing.T) (shards [][]string) {
	for _, sh := range statusOf(t, n).Shards {
		var names []string
		for _, r := range sh.Replicas {
			names = append(names, r.Node)
		}
		shards = append(shards, names)
	}
	return shards
}

// TestFirstElections: a new cluster has leaders before any follower has waited for a full
// HeartbeatTimeout, and so has a cluster after its only voter is opened again.
func TestFirstElections(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 3, 5} {
		synctest.Test(t, func(t *testing.T) {
			c := newSimCluster(t, 1, 0, codeq.Options{Shards: 3})
			c.found(nodes)
			for lives := range 2 {
				begun := time.Now()
				for i := range nodes {
					c.nodes[i].start()
				}
				c.awaitLeaders()
				if nodes == 1 || lives == 0 {
					require.Less(t, time.Since(begun), 500*time.Millisecond, "%d nodes", nodes) // HeartbeatTimeout
				}
				each(c.nodes, (*simNode).stop)
			}
		})
	}
}

// TestAllLeave: nodes that leave at one moment leave one after the other, from all shards. The last
// node stays, has all tasks, and leads when it is opened again.
func TestAllLeave(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testkit.Sized(1, 100)) {
		simCaseOf(t, seed, 0, codeq.Options{Shards: 3}, 0, func(t *testing.T, c *simCluster) {
			c.found(3)
			for _, n := range c.nodes {
				n.leaves = true
				n.start()
			}
			c.spread()
			c.nodes[0].produce(t, 30)
			errs := make([]error, 3)
			var closing sync.WaitGroup
			for i, n := range c.nodes {
				begins := time.Duration(c.rng.IntN(20)) * time.Millisecond
				closing.Go(func() {
					time.Sleep(begins)
					errs[i] = n.close()
				})
			}
			closing.Wait()
			var last *simNode
			for i, n := range c.nodes {
				if errs[i] != nil {
					require.Nil(t, last, "%v", errs)
					last = n
					require.ErrorIs(t, errs[i], codeq.ErrInvalid)
					require.ErrorContains(t, errs[i], "not the last")
				}
			}
			require.NotNil(t, last)
			c.nodes = []*simNode{last}
			last.leaves = false
			last.start()
			c.awaitLeaders()
			require.Equal(t, 30, last.count(t))
			require.Equal(t, [][]string{{last.name}, {last.name}, {last.name}}, last.membersOfShards(t))
		})
	}
}

// TestRemovalGoesOn: the next removal finishes one that ended half-way.
func TestRemovalGoesOn(t *testing.T) {
	simNodes(t, 4, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.spread()
		half, next, by := c.nodes[3], c.nodes[2], c.nodes[0]
		require.NoError(t, inspect.Of(simQueue(by)).Leaders().Change(ctx, 0, cluster.RemoveNode, cluster.Peer{Node: half.name}))
		require.NoError(t, simQueue(by).RemoveNode(ctx, next.name))
		want := []string{"n0", "n1"}
		require.Equal(t, [][]string{want, want, want}, by.membersOfShards(t))
		c.drop(half)
		c.drop(next)
		by.produce(t, 10)
	})
}

// TestRemovalIsRepeated: the call that removes a node, repeated after it ended half-way, succeeds.
// After that the node is unknown.
func TestRemovalIsRepeated(t *testing.T) {
	simNodes(t, 4, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.spread()
		half, by := c.nodes[3], c.nodes[0]
		require.NoError(t, inspect.Of(simQueue(by)).Leaders().Change(ctx, 0, cluster.RemoveNode, cluster.Peer{Node: half.name}))
		require.NoError(t, simQueue(by).RemoveNode(ctx, half.name))
		want := []string{"n0", "n1", "n2"}
		require.Equal(t, [][]string{want, want, want}, by.membersOfShards(t))
		c.drop(half)
		require.ErrorIs(t, simQueue(by).RemoveNode(ctx, half.name), codeq.ErrNotMember)
	})
}

// TestAdditionFinishesRemoval: a node joins although a node that was removed from the other shards
// leads a shard. That leader cannot add a node, as it is no member of the first shard.
func TestAdditionFinishesRemoval(t *testing.T) {
	simCase(t, codeq.Options{Shards: 3}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		c.spread()
		half, by := c.nodes[2], c.nodes[0]
		change := inspect.Of(simQueue(by)).Leaders().Change
		// The removal of another directory with the same name, finished by a late call, removes
		// nothing.
		another := cluster.Peer{Node: half.name, ID: manifest.NewID()}
		require.NoError(t, change(ctx, 1, cluster.RemoveNode, another))
		require.Len(t, membersOf(by, 1), 3)
		for shard := range 2 {
			require.NoError(t, change(ctx, shard, cluster.RemoveNode, cluster.Peer{Node: half.name}))
		}
		requireNode(t, half, c.leader(2))
		want := []string{"n0", "n1", c.another().name}
		require.Equal(t, [][]string{want, want, want}, by.membersOfShards(t))
		c.drop(half)
		by.produce(t, 10)
	})
}

// TestRemovedDirectory: a directory that was removed does not become a member again, neither by a
// late message that adds the node nor by a call. The same name with an empty directory is another
// node.
func TestRemovedDirectory(t *testing.T) {
	simNodes(t, 4, codeq.Options{Shards: 2, Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		by, removed := c.nodes[0], c.nodes[3]
		late := cluster.Peer{Node: removed.name, Address: removed.name, ID: removed.id()}
		require.NoError(t, simQueue(by).RemoveNode(ctx, removed.name))
		c.nodes = c.nodes[:3]
		want := []string{"n0", "n1", "n2"}
		refuses := func() {
			t.Helper()
			for shard := range 2 {
				err := inspect.Of(simQueue(by)).Leaders().Change(ctx, shard, cluster.AddNode, late)
				require.ErrorIs(t, err, codeq.ErrNotMember)
			}
			taken := cluster.Peer{Node: late.Node, Address: late.Address, ID: manifest.NewID()}
			err := inspect.Of(simQueue(by)).Leaders().Change(ctx, 0, cluster.Readmit, taken, late.ID)
			require.ErrorIs(t, err, codeq.ErrNotMember)
			err = simQueue(by).AddNode(ctx, codeq.Peer{Node: removed.name, Address: removed.name})
			require.ErrorIs(t, err, codeq.ErrNotMember)
			require.ErrorContains(t, err, "removed")
			require.Equal(t, [][]string{want, want}, by.membersOfShards(t))
		}
		refuses()
		removed.stop()
		removed.join = true
		require.ErrorIs(t, c.open(removed), codeq.ErrNotMember)
		removed.join = false
		removed.start()
		removed.crash(0)
		removed.start() // with another ID
		refuses()
		each(c.nodes, func(n *simNode) { n.crash(100) })
		c.mend(true)
		c.awaitLeaders()
		refuses()

		removed.stop()
		removed.machine.Wipe()
		removed.join = true
		removed.start()
		c.nodes = append(c.nodes, removed)
		c.awaitVotes()
	})
}

// TestOtherShards: a node is refused if its number of shards differs from that of its cluster or of
// the other founders. The refused node leaves nothing behind: with the right number it becomes a
// member.
func TestOtherShards(t *testing.T) {
	open := func(c *simCluster, n *simNode, shards int) error {
		return c.openWith(n, func(o *codeq.Options) { o.Shards = shards })
	}
	for _, joins := range []bool{false, true} {
		for _, wrong := range []int{1, 3} {
			t.Run(fmt.Sprintf("joins %t with %d", joins, wrong), func(t *testing.T) {
				simNodes(t, 0, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
					c.found(2)
					n := c.nodes[1]
					c.nodes[0].start()
					if joins {
						n.start()
						c.awaitLeaders()
						n = c.node(true)
						c.nodes = append(c.nodes, n)
					}
					err := open(c, n, wrong)
					if !joins {
						require.NoError(t, err)
						time.Sleep(time.Minute)
						err = <-queuetest.Producing(simQueue(n), codeq.Task{Queue: "a"})
						n.stop()
					}
					require.ErrorContains(t, err, fmt.Sprintf("2 groups, not %d", wrong))
					require.Equal(t, joins, errors.Is(err, codeq.ErrShardCount))
					n.start()
					c.awaitLeaders()
					n.produce(t, 10)
					c.rest()
					n.stop()
					require.ErrorIs(t, open(c, n, wrong), codeq.ErrShardCount)
				})
			})
		}
	}
}

// TestReplaceByMember: ReplaceNode refuses a member as the new node, whatever its address in the
// call: the cluster would have one node less.
func TestReplaceByMember(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, other := c.lead()
		before := membersOf(leader, 0)
		for _, by := range []*simNode{leader, other} {
			for _, address := range []string{leader.name, other.name, "elsewhere"} {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				err := simQueue(by).ReplaceNode(ctx, other.name, codeq.Peer{Node: leader.name, Address: address})
				cancel()
				require.ErrorIs(t, err, codeq.ErrInvalid)
				require.ErrorContains(t, err, "RemoveNode")
				require.Equal(t, before, membersOf(leader, 0))
			}
		}
	})
}

// TestUnknownNode: a node that is no member can be neither removed nor replaced.
func TestUnknownNode(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, other := c.lead()
		for _, n := range []*simNode{leader, other} {
			err := simQueue(n).RemoveNode(ctx, "nobody")
			require.ErrorIs(t, err, codeq.ErrNotMember)
			require.ErrorContains(t, err, `"nobody"`)
			err = simQueue(n).ReplaceNode(ctx, "nobody", codeq.Peer{Node: "n9", Address: "n9"})
			require.ErrorIs(t, err, codeq.ErrNotMember)
			require.ErrorContains(t, err, `"nobody"`)
		}
		require.Len(t, leader.membersOfShards(t)[0], 3)
	})
}

// TestCallsOfRemovedNode: a node removes itself, or another node removes it. All its calls fail at
// once, and soon say that it was removed. The node leaves at once.
func TestCallsOfRemovedNode(t *testing.T) {
	for _, itself := range []bool{false, true} {
		for _, leads := range []bool{false, true} {
			t.Run(fmt.Sprintf("itself %t leads %t", itself, leads), func(t *testing.T) {
				simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
					by, removed := c.lead()
					if leads {
						by, removed = removed, by
					} else {
						removed.stop()
						removed.leaves = true
						removed.start()
					}
					if itself {
						by = removed
					}
					q := simQueue(removed)
					queuetest.Produce(t, q, codeq.Task{Queue: "a"})
					require.NoError(t, simQueue(by).RemoveNode(t.Context(), removed.name))
					for _, err := range []error{<-queuetest.Producing(q, codeq.Task{Queue: "a"}), q.WaitReady(t.Context())} {
						require.Error(t, err) // the node may not know yet why
					}
					time.Sleep(time.Minute)
					requireRemoved(t, q, removed.name)
					begun := time.Now()
					c.drop(removed)
					require.Less(t, time.Since(begun), time.Second)
				})
			})
		}
	}
}

// TestAddOtherServer: a server of another protocol is no node, and AddNode does not wait until it
// is one.
func TestAddOtherServer(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, _ := c.lead()
		l := c.net.Listen("web")
		web := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second}
		served := make(chan error, 1)
		go func() { served <- web.Serve(l) }()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := simQueue(leader).AddNode(ctx, codeq.Peer{Node: "web", Address: "web"})
		require.ErrorIs(t, err, codeq.ErrNotMember)
		require.ErrorContains(t, err, "no node")
		require.NoError(t, web.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	})
}

// TestLeaveOfNoCluster: a node that is part of no cluster has no cluster to leave.
func TestLeaveOfNoCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 0, codeq.Options{Shards: 1})
		c.found(2)
		n := c.nodes[0]
		n.leaves = true
		n.start()
		time.Sleep(time.Minute)
		begin := time.Now()
		require.NoError(t, n.close())
		require.Less(t, time.Since(begin), time.Second)
	})
}

// TestSilentFounder: a cluster does not begin while a founder does not answer, and calls name that
// founder. A founder that falls silent later keeps no other founder out of the cluster that has
// begun.
func TestSilentFounder(t *testing.T) {
	for _, silence := range []time.Duration{0, time.Minute} { // before the cluster can begin
		simNodes(t, 0, codeq.Options{}, func(t *testing.T, c *simCluster) {
			c.found(3)
			first, other, silent := c.nodes[0], c.nodes[1], c.nodes[2]
			c.net.Isolate(silent.name, c.names())
			each(c.nodes, (*simNode).start)
			if silence > 0 {
				time.Sleep(silence)
				_, err := simQueue(first).Produce(t.Context(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrNotLeader)
				require.ErrorContains(t, err, `node "n2" at n2: peer: not sent`)
			}
			c.net.SetCut(silent.name, first.name, false)
			c.net.SetCut(first.name, silent.name, false)
			c.awaitLeaders()
			begun := time.Now()
			require.NoError(t, simQueue(other).WaitReady(t.Context())) // silent has never reached other
			require.Less(t, time.Since(begun), 2*time.Second)
		})
	}
}

// TestFoundersAgree: no cluster begins with an address that differs from the founder's own.
func TestFoundersAgree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 0, codeq.Options{Shards: 1})
		c.found(2)
		a, b := c.nodes[0], c.nodes[1]
		open := func(first, second string) error {
			return c.openWith(a, func(o *codeq.Options) {
				o.Cluster.Peers = []codeq.Peer{{Node: "n0", Address: first}, {Node: "n1", Address: second}}
				dial := inspect.Options(o.Cluster).Dial
				inspect.Options(o.Cluster).Dial = func(ctx context.Context, address string) (net.Conn, error) {
					return dial(ctx, strings.Replace(address, "alias", "n1", 1))
				}
			})
		}
		err := open("elsewhere", "n1")
		require.ErrorIs(t, err, codeq.ErrInvalid)
		require.ErrorContains(t, err, "elsewhere")

		require.NoError(t, open("n0", "alias"))
		b.start()
		time.Sleep(time.Minute)
		err = <-queuetest.Producing(simQueue(a), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		require.ErrorContains(t, err, `node "n1" says that its address is n1, not alias`)
		a.stop()
		require.NoError(t, open("n0", "n1"))
		c.awaitLeaders()
		c.close()
	})
}

// TestRefusedBeforeItIsANode: when Open refuses a node for its address, any node can use the
// directory.
func TestRefusedBeforeItIsANode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	taken := l.Addr().String()
	_, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: taken}})
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	_, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "b", Listener: l, Peers: []codeq.Peer{{Node: "b", Address: "127.0.0.1:1"}}}})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	m, err := manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	require.Nil(t, m)
	q, err := codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "c", Listen: taken}}) // Open has closed the Listener
	require.NoError(t, err)
	_, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "c", Listen: taken}})
	require.ErrorIs(t, err, codeq.ErrLocked, "it is open, and so its address is taken")
	require.NoError(t, q.Close())
}

// TestAddresses: Open refuses an address that cannot be dialed, and writes nothing before.
func TestAddresses(t *testing.T) {
	t.Parallel()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for _, bad := range []string{"", "host", "host:", ":7400", "0.0.0.0:7400", "[::]:7400", "host:0", "host:65536", "host:http", "a:b:1"} {
		fs := crashfs.New()
		refused := func(c codeq.Cluster) {
			t.Helper()
			_, err := codeq.Open("q", inspect.With(&codeq.Options{Cluster: &c}, inspect.Private{FS: fs}))
			require.ErrorIs(t, err, codeq.ErrInvalid, bad)
		}
		refused(codeq.Cluster{Node: "a", Listen: bad})
		refused(codeq.Cluster{Node: "a", Listen: "127.0.0.1:7400", Peers: []codeq.Peer{{Node: "b", Address: bad}}})
		refused(codeq.Cluster{Node: "a", Listen: "127.0.0.1:7400", Peers: []codeq.Peer{{Node: "b", Address: bad}}, Join: true})
		if bad != "" {
			refused(codeq.Cluster{Node: "a", Listen: "127.0.0.1:7400", Advertise: bad})
		}
		require.ErrorIs(t, q.AddNode(t.Context(), codeq.Peer{Node: "b", Address: bad}), codeq.ErrInvalid, bad)
		require.ErrorIs(t, q.ReplaceNode(t.Context(), "c", codeq.Peer{Node: "b", Address: bad}), codeq.ErrInvalid, bad)
		names, err := fs.List("")
		require.NoError(t, err)
		require.Empty(t, names)
	}
}

// TestLongNodeNames: names and addresses that are too long are refused, with their length.
func TestLongNodeNames(t *testing.T) {
	t.Parallel()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	refused := func(err error) {
		t.Helper()
		var invalid *codeq.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "1000000 bytes", invalid.Value)
		require.Less(t, len(err.Error()), 200)
	}
	long, ctx := strings.Repeat("x", 1_000_000), t.Context()
	at := strings.Repeat("x", 1_000_000-5) + ":7400"
	for _, c := range []codeq.Cluster{
		{Node: long, Listen: "x:1"},
		{Node: "a", Listen: at},
		{Node: "a", Listen: "x:1", Advertise: at},
		{Node: "a", Listen: "x:1", Peers: []codeq.Peer{{Node: long, Address: "x:1"}}},
		{Node: "a", Listen: "x:1", Peers: []codeq.Peer{{Node: "b", Address: at}}},
	} {
		_, err := codeq.Open("q", inspect.With(&codeq.Options{Cluster: &c}, inspect.Private{FS: crashfs.New()}))
		refused(err)
	}
	refused(q.AddNode(ctx, codeq.Peer{Node: long, Address: "x:1"}))
	refused(q.AddNode(ctx, codeq.Peer{Node: "b", Address: at}))
	refused(q.RemoveNode(ctx, long))
	refused(q.ReplaceNode(ctx, "b", codeq.Peer{Node: "c", Address: at}))
	refused(q.TransferLeadership(ctx, 0, long))
	claim := codeq.ClaimRequest{Queues: []string{"a"}, Weights: map[string]int{long: 1}, NoWait: true}
	_, err = q.Claim(ctx, claim)
	refused(err)
	longest := codeq.Cluster{Node: strings.Repeat("x", cluster.MaxNodeName), Listen: strings.Repeat("x", cluster.MaxAddress-5) + ":7400"}
	require.ErrorIs(t, codeq.RecoverCluster(t.TempDir(), &codeq.Options{Cluster: &longest}), codeq.ErrNotQueue, "its options are good")
}

// TestRunAwaitsLeaders: a Run that begins before there is a leader waits for one, until its context
// ends or the queue is closed.
func TestRunAwaitsLeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 0, codeq.Options{Shards: 2})
		c.found(2)
		a, b := c.nodes[0], c.nodes[1]
		a.start()
		handled := make(chan struct{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[int]) error { close(handled); return nil })
		run := func(ctx context.Context) chan error {
			ended := make(chan error, 1)
			go func() { ended <- simQueue(a).Run(ctx, &m, nil) }()
			return ended
		}
		ctx, cancel := context.WithCancel(context.Background())
		ended := run(ctx)
		time.Sleep(time.Hour)
		require.Empty(t, ended)
		cancel()
		require.NoError(t, <-ended)
		ended = run(context.Background())
		time.Sleep(time.Second)
		begin := time.Now()
		a.stop()
		err := <-ended
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.NotErrorIs(t, err, context.Canceled)
		require.Less(t, time.Since(begin), time.Second)

		a.start()
		ended = run(context.Background())
		time.Sleep(time.Hour)
		b.start()
		c.awaitLeaders()
		task, err := codeq.NewTask("a", 1)
		require.NoError(t, err)
		queuetest.Produce(t, simQueue(b), task)
		<-handled
		a.stop()
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
		c.close()
	})
}

// TestVoteForUnknownNode: a voter that lags behind elects a node that it does not know, if that
// node has all acknowledged tasks: only these two nodes are left.
func TestVoteForUnknownNode(t *testing.T) {
	t.Parallel()
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		leader, behind := c.lead()
		c.net.Isolate(behind.name, c.names())
		joined := c.another()
		for _, n := range slices.Clone(c.nodes) {
			if n != leader && n != behind && n != joined {
				c.remove(n, t.Logf, nil)
			}
		}
		joined.produce(t, 10)
		requireNode(t, leader, c.leader(0))
		leader.crash(100)
		c.net.Heal(false)
		c.awaitLeaders()
		requireNode(t, joined, c.leader(0))
		require.Equal(t, 10, behind.count(t))
		leader.start()
	})
}

// blank starts a node that belongs to no cluster.
func (c *simCluster) blank() *simNode {
	n := c.node(false)
	n.start()
	return n
}

// TestMembershipCallsEnd: without a majority, or with a node that does not come or never catches
// up, each call that changes the cluster ends. It says which node is missing and why. A call that
// waits for a node logs that.
func TestMembershipCallsEnd(t *testing.T) {
	t.Parallel()
	t.Run("no majority", func(t *testing.T) {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			ctx := context.Background()
			lost, left := c.lead()
			added := c.blank()
			for _, n := range c.members() {
				if n != left {
					n.crash(100)
				}
			}
			q := simQueue(left)
			for name, call := range map[string]func() error{
				"Produce":            func() error { _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); return err },
				"AddNode":            func() error { return q.AddNode(ctx, codeq.Peer{Node: added.name, Address: added.name}) },
				"RemoveNode":         func() error { return q.RemoveNode(ctx, lost.name) },
				"RemoveNode, itself": func() error { return q.RemoveNode(ctx, left.name) },
				"ReplaceNode":        func() error { return q.ReplaceNode(ctx, lost.name, codeq.Peer{Node: added.name, Address: added.name}) },
				"ReplaceNode, there": func() error { return q.ReplaceNode(ctx, lost.name, codeq.Peer{Node: added.name, Address: lost.name}) },
				"TransferLeadership": func() error { return q.TransferLeadership(ctx, 0, left.name) },
			} {
				begun := time.Now()
				err := call()
				require.ErrorIs(t, err, codeq.ErrNotLeader, name)
				require.ErrorContains(t, err, "node "+lost.name+": peer: dial "+lost.name+": dial sim: "+lost.name+": connection refused", name)
				require.Less(t, time.Since(begun), 2*simCallTimeout, name)
			}
			waits, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			err := q.WaitReady(waits)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorContains(t, err, "connection refused")
			require.NoError(t, q.Drain(ctx), "it leads nothing")
			require.NoError(t, q.Undrain(ctx))
			added.stop()
		})
	})
	t.Run("new node", func(t *testing.T) {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			time.Sleep(2 * time.Minute) // the leader is at home
			leader, by := c.lead()
			by.stop()
			seen := testkit.NewUserHandler(func(string) {})
			require.NoError(t, c.openWith(by, func(o *codeq.Options) { o.Logger = slog.New(seen) }))
			q := simQueue(by)
			c.awaitLeaders()
			for range 20 { // more than four messages of Raft
				queuetest.Produce(t, simQueue(leader), codeq.Task{Queue: "a", Payload: make([]byte, 1<<20)})
			}
			far, slow := c.blank(), c.blank()
			c.net.Isolate(far.name, c.names())
			for _, m := range c.members() {
				c.net.SetBandwidth(m.name, slow.name, 32<<10)
			}
			for _, call := range []struct {
				node, cause, logged string
			}{
				{"nobody", "dial sim: nobody: connection refused", "node that is to be added does not answer"},
				{far.name, "context deadline exceeded", "node that is to be added does not answer"},
				{slow.name, "node " + slow.name + " has applied", "node does not vote yet"},
			} {
				for _, replaces := range []bool{false, true} {
					if replaces && call.node == slow.name {
						continue // the node is a member already
					}
					*seen.Seen = nil
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					var err error
					if replaces {
						err = q.ReplaceNode(ctx, leader.name, codeq.Peer{Node: call.node, Address: call.node})
					} else {
						err = q.AddNode(ctx, codeq.Peer{Node: call.node, Address: call.node})
					}
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.ErrorContains(t, err, call.node)
					require.ErrorContains(t, err, call.cause)
					time.Sleep(time.Second)
					logs := seen.About(call.logged)
					require.NotEmpty(t, logs)
					require.Less(t, len(logs), 10)
					require.Contains(t, logs[0], call.node)
					require.Contains(t, logs[0], call.cause)
				}
			}
			require.Len(t, membersOf(leader, 0), 4)

			// With more time the same calls succeed.
			outcome := make(chan error, 2)
			for _, n := range []*simNode{far, slow} {
				go func() { outcome <- q.AddNode(context.Background(), codeq.Peer{Node: n.name, Address: n.name}) }()
			}
			time.Sleep(time.Minute)
			c.net.Heal(true)
			c.net.Unshape()
			require.NoError(t, <-outcome)
			require.NoError(t, <-outcome)
			c.nodes = append(c.nodes, far, slow)
		})
	})
}

func peersOf(qs []*codeq.Queue) (peers []codeq.Peer) {
	for _, q := range qs {
		self := inspect.Of(q).Node().Self()
		peers = append(peers, codeq.Peer{Node: self.Node, Address: self.Address})
	}
	return peers
}

// TestClusterMembers: a node joins and leads its share, another node is removed, and nothing is
// lost.
func TestClusterMembers(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		c.nodes[0].produce(t, 30)
		fourth, removed := c.another(), c.nodes[0]
		for _, sh := range statusOf(t, fourth).Shards {
			require.Len(t, sh.Replicas, 4)
			for _, r := range sh.Replicas {
				require.True(t, r.Voter)
				require.Empty(t, r.LastError)
			}
		}
		require.NoError(t, simQueue(c.nodes[1]).RemoveNode(t.Context(), "n0"))
		require.ErrorIs(t, simQueue(c.nodes[1]).RemoveNode(t.Context(), "n0"), codeq.ErrNotMember, "again")
		c.drop(removed)
		c.untilLed(map[string]int{"n1": 1, "n2": 1, "n3": 1})
		require.ErrorIs(t, simQueue(fourth).TransferLeadership(t.Context(), 0, "n0"), codeq.ErrNotFound)
		for i := range 30 {
			l := queuetest.ClaimNow(t, simQueue(c.nodes[i%3]), "a")
			queuetest.Complete(t, simQueue(c.nodes[(i+1)%3]), l)
		}
		require.Nil(t, queuetest.ClaimNow(t, simQueue(fourth), "a"))
	})
}

// TestRecoverCluster: the cluster of a node is lost. RecoverCluster refuses wrong options; then the
// node goes on by itself. TestOperateMajorityLost has its tasks.
func TestRecoverCluster(t *testing.T) {
	t.Parallel()
	qs := threeNodes(t, codeq.Options{Shards: 2}, nil)
	require.NoError(t, qs[0].WaitReady(t.Context()))
	dir := inspect.Of(qs[0]).Directory().Path
	for _, q := range qs {
		require.NoError(t, q.Close())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	opts := &codeq.Options{Cluster: &codeq.Cluster{Node: "n0", Listener: l, Listen: l.Addr().String(), Peers: peersOf(qs)}}
	require.ErrorIs(t, codeq.RecoverCluster(dir, opts), codeq.ErrInvalid)
	opts.Cluster.Peers = nil
	requireNotRecovered(t, dir, opts)
	opts.Shards = 2
	require.NoError(t, codeq.RecoverCluster(dir, opts))
	q, err := codeq.Open(dir, opts)
	require.NoError(t, err)
	queuetest.Produce(t, q, codeq.Task{Queue: "a"})
	require.NoError(t, q.Close())
}

// requireNotRecovered checks that RecoverCluster refuses a directory of no node, or with another
// number of shards, and changes nothing.
func requireNotRecovered(t *testing.T, dir string, opts *codeq.Options) {
	t.Helper()
	root := t.TempDir()
	empty, founding := filepath.Join(root, "empty"), filepath.Join(root, "founding")
	require.NoError(t, os.Mkdir(empty, 0o755))
	alone := *opts.Cluster
	alone.Listener, alone.Listen, alone.Advertise = nil, "127.0.0.1:0", "127.0.0.1:1"
	alone.Peers = []codeq.Peer{{Node: alone.Node, Address: alone.Advertise}, {Node: "away", Address: "127.0.0.1:2"}}
	q, err := codeq.Open(founding, &codeq.Options{Shards: 2, Cluster: &alone})
	require.NoError(t, err)
	require.NoError(t, q.Close())
	refused := func(dir string, shards int, want error) {
		t.Helper()
		before := testkit.RecursiveListing(t, filepath.Dir(dir))
		with := *opts
		with.Shards = shards
		err := codeq.RecoverCluster(dir, &with)
		require.ErrorIs(t, err, want)
		require.ErrorContains(t, err, dir)
		require.Equal(t, before, testkit.RecursiveListing(t, filepath.Dir(dir)))
	}
	refused(filepath.Join(root, "missing"), 0, codeq.ErrNotQueue)
	refused(empty, 0, codeq.ErrNotQueue)
	refused(founding, 0, codeq.ErrNotQueue)
	refused(founding, 3, codeq.ErrNotQueue)
	refused(dir, 4, codeq.ErrShardCount)
}
