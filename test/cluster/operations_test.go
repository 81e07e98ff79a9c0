package cluster_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// The tests below follow the rows of "What to do" in docs/replication.md, with the calls of each
// row.

// TestOperateNodeLost: a node is lost for good, and another one takes its place.
func TestOperateNodeLost(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, lost := c.lead()
		leader.produce(t, 10)
		lost.crash(100)
		fourth := c.another() // Open with Join
		require.NoError(t, simQueue(leader).RemoveNode(ctx, lost.name))
		c.drop(lost)
		require.NoError(t, simQueue(fourth).WaitReady(ctx))
		require.Equal(t, 10, fourth.count(t))
	})
}

// TestOperateDiskLost: the disk of a node is lost, and its machine is used again.
func TestOperateDiskLost(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, lost := c.lead()
		leader.produce(t, 10)
		lost.crash(100)
		lost.wipe()
		require.ErrorIs(t, c.open(lost), codeq.ErrNotMember)
		require.NoError(t, simQueue(leader).RemoveNode(ctx, lost.name))
		c.drop(lost)
		again := c.another() // Open with Join, under another name
		require.Equal(t, 10, again.count(t))
		require.Len(t, leader.membersOfShards(t)[0], 3)
	})
}

// goOn starts a node that is down as a cluster of one, with the given number of tasks. Two other
// nodes then join it.
func (c *simCluster) goOn(t *testing.T, n *simNode, tasks int) {
	t.Helper()
	require.NoError(t, c.recover(n)) // RecoverCluster
	n.start()
	require.Equal(t, tasks, n.count(t))
	for range 2 {
		joined := c.another() // Open with Join, under new names
		require.NoError(t, simQueue(joined).WaitReady(context.Background()))
		require.Equal(t, tasks, joined.count(t))
	}
	require.Len(t, n.membersOfShards(t)[0], 3)
}

// TestOperateMajorityLost: three of five nodes are lost for good, and one of the others lacks the
// latest acknowledged tasks. The furthest node goes on alone, and others join it.
func TestOperateMajorityLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newSimCluster(t, 1, 5, codeq.Options{Shards: 2})
		leader, behind := c.lead()
		c.awaitReady()
		leader.produce(t, 10)
		c.net.Isolate(behind.name, c.names())
		leader.produce(t, 10)
		time.Sleep(time.Second) // all other nodes have these tasks
		ahead := c.members()[slices.IndexFunc(c.members(), func(n *simNode) bool { return n != leader && n != behind })]
		for _, n := range c.members() {
			if n != ahead && n != behind {
				n.crash(100)
			}
		}
		c.net.Heal(true)
		time.Sleep(time.Second) // connections to the others have ended
		_, err := simQueue(behind).Produce(t.Context(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrNotLeader)
		for _, asked := range []*simNode{ahead, behind} {
			requireNode(t, ahead, c.furthest(asked))
		}
		behind.stop()
		ahead.stop()
		c.goOn(t, ahead, 20)
		c.rest()
		require.NoError(t, c.check())
		c.close()
	})
}

// TestOperatePowerLost: the power of all nodes fails. With DurabilityDisk the nodes are opened
// again, and go on. Below it, all nodes say that acknowledged tasks may be lost, and the furthest
// node goes on alone.
func TestOperatePowerLost(t *testing.T) {
	t.Run("disk", func(t *testing.T) {
		simCase(t, codeq.Options{Durability: codeq.DurabilityDisk}, func(t *testing.T, c *simCluster) {
			c.members()[0].produce(t, 10)
			for _, n := range c.members() {
				n.crash(0)
			}
			for _, n := range c.members() {
				n.start()
			}
			for _, n := range c.members() {
				require.NoError(t, simQueue(n).WaitReady(t.Context()))
				require.Equal(t, 10, n.count(t))
			}
		})
	})
	t.Run("process", func(t *testing.T) {
		simCase(t, codeq.Options{Durability: codeq.DurabilityProcess}, func(t *testing.T, c *simCluster) {
			leader, behind := c.lead()
			leader.produce(t, 10)
			c.net.Isolate(behind.name, c.names())
			leader.produce(t, 10)
			for _, n := range c.members() {
				if n == leader || n == behind { // the system has written the data of these two
					n.crash(100)
					n.machine.Reboot()
				} else {
					n.crash(0)
				}
			}
			c.net.Heal(true)
			for _, n := range c.members() {
				n.start()
			}
			time.Sleep(10 * time.Second)
			chosen := make(map[*simNode]bool)
			for _, n := range c.members() {
				_, err := simQueue(n).Produce(t.Context(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrPowerLost)
				chosen[c.furthest(n)] = true
			}
			require.Len(t, chosen, 1, "each says the same")
			for _, n := range c.members() {
				n.stop()
			}
			c.goOn(t, slices.Collect(maps.Keys(chosen))[0], 20)
		})
	})
}

// TestOperateUpgrade: the nodes of a cluster are closed one after the other and opened with the
// next version, as "Upgrade" of docs/replication.md says. The nodes that lead the most shards come
// last.
func TestOperateUpgrade(t *testing.T) {
	upgradeCase(t, 3, func(t *testing.T, c *simCluster) {
		c.nodes[0].produce(t, 10)
		// settled waits until all nodes are up and lag little. It returns the number of shards that
		// each node leads.
		settled := func() (leads map[string]int) {
			t.Helper()
			c.until("a cluster without an error and without a lag", func() bool {
				st, err := simQueue(c.nodes[0]).ClusterStatus(t.Context())
				require.NoError(t, err)
				leads = make(map[string]int)
				return !slices.ContainsFunc(st.Shards, func(sh codeq.ShardStatus) bool {
					leads[sh.Leader]++
					require.Equal(t, oldFormat, sh.Format, "before all nodes know the next one")
					return sh.Leader == "" || slices.ContainsFunc(sh.Replicas, func(r codeq.ReplicaStatus) bool {
						return r.LastError != "" || r.Lag > 8
					})
				})
			})
			return leads
		}
		known := func(node string) int {
			t.Helper()
			st, err := simQueue(c.nodes[0]).ClusterStatus(t.Context())
			require.NoError(t, err)
			at := slices.IndexFunc(st.Shards[0].Replicas, func(r codeq.ReplicaStatus) bool { return r.Node == node })
			return st.Shards[0].Replicas[at].NewestFormat
		}
		require.NoError(t, simQueue(c.nodes[0]).Checkpoint(t.Context(), "copy"))
		for left := c.members(); len(left) > 0; left = left[1:] {
			leads := settled()
			slices.SortFunc(left, func(a, b *simNode) int { return leads[a.name] - leads[b.name] })
			n := left[0]
			versions := []int{newFormat}
			if len(left) == 2 { // this node goes back in between
				versions = []int{newFormat, oldFormat, newFormat}
			}
			for _, version := range versions {
				require.NoError(t, n.become(version))
				require.NoError(t, simQueue(n).WaitReady(t.Context()))
				require.Equal(t, version, known(n.name))
			}
			n.produce(t, 1)
			time.Sleep(10 * time.Second)
		}
		for _, n := range c.nodes {
			for shard := range c.opts.Shards {
				require.Equal(t, newFormat, formatOf(t, simQueue(n), shard))
			}
			require.Equal(t, 13, n.count(t))
		}
		require.Equal(t, newFormat, known(c.nodes[2].name))
	})
}

// TestOperateMaintenance: one node after the other is drained, closed, opened again and undrained.
func TestOperateMaintenance(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		for _, n := range c.nodes {
			require.NoError(t, simQueue(n).Drain(ctx))
			require.Zero(t, c.led()[n.name])
			n.stop()
			n.start()
			require.NoError(t, simQueue(n).WaitReady(ctx))
			require.NoError(t, simQueue(n).Undrain(ctx))
			c.nodes[0].produce(t, 1)
		}
		c.untilLed(map[string]int{"n0": 1, "n1": 1, "n2": 1})
		require.Equal(t, 3, c.nodes[2].count(t))
	})
}

// TestOperateOneToThree: a queue by itself becomes a cluster of three nodes, and then a queue by
// itself again.
func TestOperateOneToThree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		c, first := firstNode(t, 1, codeq.Options{Shards: 2})
		q := first.alone(t)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		require.NoError(t, q.Close())
		c.begin(first) // Open with Cluster
		second, third := c.another(), c.another()
		require.Equal(t, 1, third.count(t))
		for _, n := range []*simNode{third, second} {
			require.NoError(t, simQueue(first).RemoveNode(ctx, n.name))
			c.drop(n)
		}
		first.stop()
		q = first.alone(t) // Open without Cluster
		require.EqualValues(t, 1, queuetest.CountsOf(t, q, "a").Ready)
		require.NoError(t, q.Close())
		c.nodes = nil
		c.close()
	})
}

// TestOperateCertificates: the certificates of all nodes, and then the authority, are replaced
// while the nodes are open. Functions of tls.Config read the current ones.
func TestOperateCertificates(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	old, next := testbase.NewAuthority(t), testbase.NewAuthority(t)
	both, trusted := x509.NewCertPool(), new(atomic.Pointer[x509.CertPool])
	old.AddTo(both)
	next.AddTo(both)
	trusted.Store(both)
	certificates := make(map[string]*atomic.Pointer[tls.Certificate])
	config := func(node string) *tls.Config {
		current := new(atomic.Pointer[tls.Certificate])
		current.Store(&old.Config(t, old, node).Certificates[0])
		certificates[node] = current
		c := &tls.Config{
			ClientAuth: tls.RequireAndVerifyClientCert, RootCAs: both, ClientCAs: both,
			GetCertificate:       func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return current.Load(), nil },
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return current.Load(), nil },
		}
		c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
			now := c.Clone()
			now.ClientCAs = trusted.Load()
			return now, nil
		}
		return c
	}
	qs := threeNodes(t, codeq.Options{Shards: 1}, config)
	require.NoError(t, qs[0].WaitReady(ctx))
	for node, current := range certificates {
		current.Store(&next.Config(t, next, node).Certificates[0])
	}
	nextOnly := x509.NewCertPool()
	next.AddTo(nextOnly)
	trusted.Store(nextOnly)
	open := func(node string, c *tls.Config) (*codeq.Queue, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		return codeq.Open(filepath.Join(t.TempDir(), node), &codeq.Options{Shards: 1, Cluster: &codeq.Cluster{
			Node: node, Listener: l, Peers: peersOf(qs), Join: true, TLS: c,
		}})
	}
	_, err := open("late", old.Config(t, next, "late"))
	require.Error(t, err, "its certificate is of the authority that was replaced")
	fourth, err := open("fourth", next.Config(t, next, "fourth"))
	require.NoError(t, err)
	_, err = fourth.Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, err)
	_, err = qs[1].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, fourth.RemoveNode(ctx, "fourth"))
	require.NoError(t, fourth.Close())
}
