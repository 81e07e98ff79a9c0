package cluster_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// The tests below follow the rows of "What to do" in docs/replication.md, with the calls of each
// row.

// TestOperateNodeLost: a node is lost for good, or its disk, and another one takes its place.
func TestOperateNodeLost(t *testing.T) {
	for _, disk := range []bool{false, true} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			leader, lost := c.lead()
			leader.produce(t, 10)
			lost.crash(100)
			if disk { // its machine is used again, as another node
				lost.machine.Wipe()
				require.ErrorIs(t, c.open(lost), codeq.ErrNotMember)
				require.NoError(t, simQueue(leader).RemoveNode(t.Context(), lost.name))
			}
			fourth := c.another() // Open with Join, under another name
			if !disk {
				require.NoError(t, simQueue(leader).RemoveNode(t.Context(), lost.name))
			}
			c.drop(lost)
			require.NoError(t, simQueue(fourth).WaitReady(t.Context()))
			require.Equal(t, 10, fourth.count(t))
			require.Len(t, leader.membersOfShards(t)[0], 3)
		})
	}
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
	simNodes(t, 5, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) {
		leader, behind := c.lead()
		c.awaitReady()
		leader.produce(t, 10)
		c.net.Isolate(behind.name, c.names())
		leader.produce(t, 10)
		time.Sleep(time.Second) // all other nodes have these tasks
		ahead := c.third(leader, behind)
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
	queuetest.Produce(t, fourth, codeq.Task{Queue: "a"})
	queuetest.Claim(t, qs[1], "a")
	require.NoError(t, fourth.RemoveNode(ctx, "fourth"))
	require.NoError(t, fourth.Close())
}

// TestLostNodesAreRefused: one node has gone on alone, and then the lost nodes come back. They
// belong to another cluster. Without a majority of that cluster they do nothing, and say why. With
// one, they go on beside the other node. In neither case does a task of the lost nodes reach the
// other node.
func TestLostNodesAreRefused(t *testing.T) {
	t.Parallel()
	for _, kind := range []struct{ nodes, back int }{{3, 1}, {5, 2}, {3, 2}} {
		t.Run(fmt.Sprintf("%d of %d", kind.back, kind.nodes), func(t *testing.T) {
			simNodes(t, kind.nodes, codeq.Options{}, func(t *testing.T, c *simCluster) {
				ctx := context.Background()
				n := c.leader(0)
				n.produce(t, 20)
				c.rest()
				var lost []*simNode
				for _, old := range c.members() {
					old.crash(100)
					if old != n {
						lost = append(lost, old)
					}
				}
				require.NoError(t, c.recover(n))
				n.start()
				c.awaitLeaders()
				n.produce(t, 10)
				back := lost[:kind.back]
				each(back, (*simNode).start)
				time.Sleep(time.Minute)
				others := 20
				for _, old := range back {
					_, err := simQueue(old).Produce(ctx, codeq.Task{Queue: "a"})
					if 2*kind.back > kind.nodes {
						others++
						require.NoError(t, err)
						require.Equal(t, others, old.count(t))
						continue
					}
					why := fmt.Sprintf("node %s: peer: connect to %[1]s: peer: connection refused: this is node %[1]q (%.8s, of cluster %.8s)",
						n.name, n.id(), inspect.Of(simQueue(n)).Node().Cluster())
					require.ErrorIs(t, err, codeq.ErrNotLeader)
					require.ErrorContains(t, err, why)
					ready, cancel := context.WithTimeout(ctx, time.Minute)
					err = simQueue(old).WaitReady(ready)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.ErrorContains(t, err, why)
				}
				err := simQueue(n).AddNode(ctx, codeq.Peer{Node: back[0].name, Address: back[0].name})
				require.ErrorIs(t, err, codeq.ErrNotMember)
				require.ErrorContains(t, err, "of cluster")
				require.Equal(t, 30, n.count(t))
				n.produce(t, 10)

				for range 2 {
					c.grow(t.Logf)
				}
				c.rest()
				for _, m := range c.members() {
					require.Equal(t, 40, m.count(t))
				}
				each(back, (*simNode).stop)
			})
		})
	}
}
