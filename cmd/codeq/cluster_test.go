package main

import (
	"net"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// node opens a node of a cluster.
func node(t *testing.T, dir, name string, listener net.Listener, peers ...codeq.Peer) *codeq.Queue {
	t.Helper()
	q, err := codeq.Open(dir, &codeq.Options{
		Shards: 2, Durability: codeq.DurabilityProcess,
		Cluster: &codeq.Cluster{Node: name, Listener: listener, Peers: peers},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	return q
}

// TestCluster: the command changes members and leaders of a cluster by the process of one node.
func TestCluster(t *testing.T) {
	listen := func() (net.Listener, codeq.Peer) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		return l, codeq.Peer{Address: l.Addr().String()}
	}
	l1, p1 := listen()
	l2, p2 := listen()
	p1.Node, p2.Node = "n1", "n2"
	dir := filepath.Join(t.TempDir(), "n1")
	q := node(t, dir, "n1", l1, p1)
	serveNode(t, q, dir)
	require.NoError(t, q.WaitReady(t.Context()))
	at := []string{"-dir", dir}

	s := decoded[codeq.ClusterStatus](t, with(at, "cluster", "status")...)
	require.Len(t, s.Shards, 2)
	require.Len(t, s.Shards[0].Replicas, 1)
	node(t, filepath.Join(t.TempDir(), "n2"), "n2", l2, p1, p2)
	ok(t, with(at, "cluster", "add", "-dry-run", "n2", p2.Address)...)
	require.Equal(t, clusterResult{Done: "added", Node: "n2"}, decoded[clusterResult](t, with(at, "cluster", "add", "n2", p2.Address)...))
	require.Len(t, decoded[codeq.ClusterStatus](t, with(at, "cluster", "status")...).Shards[0].Replicas, 2)
	require.Equal(t, exitRefused, call(t, with(at, "cluster", "add", "-dry-run", "n2", p2.Address)...).code)

	for _, at := range [][]string{at, {"-url", newDashboard(t, q).URL + "/admin"}} {
		for _, to := range []string{"n2", "n1"} {
			ok(t, with(at, "cluster", "transfer", "-dry-run", "1", to)...)
			ok(t, with(at, "cluster", "transfer", "1", to)...)
			for leader := ""; leader != to; { // the asked node may learn it a moment later
				leader = decoded[codeq.ClusterStatus](t, with(at, "cluster", "status")...).Shards[1].Leader
			}
		}
		placed := regexp.MustCompile(`1 +n1 .*leader \(placed\)`) // a moment after the leader has begun
		for !placed.MatchString(ok(t, with(at, "cluster", "status")...)) {
		}
		require.Equal(t, exitNotFound, call(t, with(at, "cluster", "transfer", "0", "n9")...).code)
		require.Equal(t, exitNotFound, call(t, with(at, "cluster", "transfer", "-dry-run", "0", "n9")...).code)
		require.Equal(t, exitUsage, call(t, with(at, "cluster", "transfer", "-dry-run", "7", "n1")...).code)
	}
	ok(t, with(at, "cluster", "transfer", "1", "")...)
	ok(t, with(at, "cluster", "drain")...)
	require.Contains(t, ok(t, with(at, "cluster", "status")...), "drained")
	ok(t, with(at, "cluster", "undrain")...)

	// Beside a node, commands show and change the tasks of a cluster like those of a standalone
	// queue.
	ok(t, with(at, "produce", "-queue", "mail", "x")...)
	require.EqualValues(t, 1, counts(t, at, "mail").Ready)

	ok(t, with(at, "cluster", "remove", "-dry-run", "n2")...)
	ok(t, with(at, "cluster", "remove", "n2")...)
	require.Len(t, decoded[codeq.ClusterStatus](t, with(at, "cluster", "status")...).Shards[0].Replicas, 1)
	require.Equal(t, exitRefused, call(t, with(at, "cluster", "remove", "n2")...).code)
	require.Equal(t, exitUsage, call(t, with(at, "cluster", "remove")...).code)
}

// TestNoCluster: a standalone queue has no nodes. The closed directory of a node can be read, but
// not changed or exported.
func TestNoCluster(t *testing.T) {
	dir := newQueue(t, nil)
	serve(t, dir)
	require.Equal(t, exitRefused, call(t, "-dir", dir, "cluster", "status").code)
	require.Equal(t, exitRefused, call(t, "-dir", dir, "cluster", "remove", "n1").code)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := filepath.Join(t.TempDir(), "n1")
	q := node(t, closed, "n1", l, codeq.Peer{Node: "n1", Address: l.Addr().String()})
	require.NoError(t, q.WaitReady(t.Context()))
	require.NoError(t, q.Close())
	require.Equal(t, "n1", decoded[infoResult](t, "-dir", closed, "info").At.Node)
	r := call(t, "-dir", closed, "pause", "mail")
	require.Equal(t, exitRefused, r.code, r.err)
	require.Contains(t, r.err, "steered while its process has it open")
	require.Equal(t, exitRefused, call(t, "-dir", closed, "export").code)
}
