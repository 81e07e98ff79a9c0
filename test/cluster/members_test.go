package cluster_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

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
