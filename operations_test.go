package codeq

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testcert"
)

// The rows of "What to do" in REPLICATION.md, each with the calls that it names.

// TestOperateNodeLost: a node is gone for good; another one takes its place.
func TestOperateNodeLost(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
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
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		leader, lost := c.lead()
		leader.produce(t, 10)
		lost.crash(100)
		lost.wipe()
		require.ErrorIs(t, c.open(lost), ErrNotMember)
		require.NoError(t, simQueue(leader).RemoveNode(ctx, lost.name))
		c.drop(lost)
		again := c.another() // Open with Join, under another name
		require.Equal(t, 10, again.count(t))
		require.Len(t, leader.membersOfShards(t)[0], 3)
	})
}

// TestOperateMajorityLost: of three nodes two are lost for good. The third one goes on alone, and
// others join it.
func TestOperateMajorityLost(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		left, _ := c.lead()
		left.produce(t, 10)
		for _, n := range c.members() {
			if n != left {
				n.crash(100)
			}
		}
		left.stop()
		require.NoError(t, c.recover(left)) // RecoverCluster
		left.start()
		for range 2 {
			n := c.another() // Open with Join, under new names
			require.Equal(t, 10, n.count(t))
		}
		require.NoError(t, simQueue(left).WaitReady(ctx))
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

// TestOperateOneToThree: a queue by itself becomes a cluster of three nodes, and one by itself again.
func TestOperateOneToThree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		c, first := firstNode(t, 1, Options{Shards: 2})
		q := first.alone(t)
		produce(t, q, Task{Queue: "a"})
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
		require.EqualValues(t, 1, countsOf(t, q, "a").Ready)
		require.NoError(t, q.Close())
		c.nodes = nil
		c.close()
	})
}

// TestOperateCertificates: the certificates of all nodes, and then the authority, are replaced while
// the nodes are open, by functions of tls.Config that read the current ones.
func TestOperateCertificates(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	old, next := testcert.New(t), testcert.New(t)
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
	qs := threeNodesTLS(t, Options{Shards: 1}, config)
	require.NoError(t, qs[0].WaitReady(ctx))
	for node, current := range certificates {
		current.Store(&next.Config(t, next, node).Certificates[0])
	}
	nextOnly := x509.NewCertPool()
	next.AddTo(nextOnly)
	trusted.Store(nextOnly)
	open := func(node string, c *tls.Config) (*Queue, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		return Open(filepath.Join(t.TempDir(), node), &Options{Shards: 1, Cluster: &Cluster{
			Node: node, Listener: l, Peers: peersOf(qs), Join: true, TLS: c,
		}})
	}
	_, err := open("late", old.Config(t, next, "late"))
	require.Error(t, err, "its certificate is of the authority that was replaced")
	fourth, err := open("fourth", next.Config(t, next, "fourth"))
	require.NoError(t, err)
	_, err = fourth.Produce(ctx, Task{Queue: "a"})
	require.NoError(t, err)
	_, err = qs[1].Claim(ctx, ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, fourth.RemoveNode(ctx, "fourth"))
	require.NoError(t, fourth.Close())
}
