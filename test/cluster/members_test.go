package cluster_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

func peersOf(qs []*codeq.Queue) (peers []codeq.Peer) {
	for _, q := range qs {
		self := inspect.Of(q).Node().Self()
		peers = append(peers, codeq.Peer{Node: self.Node, Address: self.Address})
	}
	return peers
}

// eventually reads the status of a cluster until ok accepts it.
func eventually(t *testing.T, q *codeq.Queue, what string, ok func(*codeq.ClusterStatus) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		st, err := q.ClusterStatus(ctx)
		if err == nil && ok(st) {
			return
		}
		require.NoError(t, ctx.Err(), "%s: %+v, %v", what, st, err)
		change := inspect.Of(q).Node().Changed()
		select {
		case <-change:
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// TestClusterMembers: a node joins and leads its share, another node is removed, and nothing is
// lost.
func TestClusterMembers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	qs := threeNodes(t, codeq.Options{}, nil)
	for i := range 30 {
		_, err := qs[i%3].Produce(ctx, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i)})
		require.NoError(t, err)
	}
	eventually(t, qs[0], "each node leads a shard", func(st *codeq.ClusterStatus) bool {
		leaders := make(map[string]bool)
		for _, sh := range st.Shards {
			leaders[sh.Leader] = true
		}
		return len(leaders) == 3 && !leaders[""]
	})

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "n3")
	fourth, err := codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "n3", Listener: l, Peers: peersOf(qs), Join: true}})
	require.NoError(t, err)
	qs = append(qs, fourth)
	t.Cleanup(func() { require.NoError(t, fourth.Close()) })
	eventually(t, fourth, "all four vote and answer", func(st *codeq.ClusterStatus) bool {
		return !slices.ContainsFunc(st.Shards, func(sh codeq.ShardStatus) bool {
			return len(sh.Replicas) != 4 || slices.ContainsFunc(sh.Replicas, func(r codeq.ReplicaStatus) bool { return !r.Voter || r.LastError != "" })
		})
	})

	require.NoError(t, qs[1].RemoveNode(ctx, "n0"))
	require.ErrorIs(t, qs[1].RemoveNode(ctx, "n0"), codeq.ErrNotMember, "again")
	eventually(t, fourth, "n0 leads nothing, n3 does", func(st *codeq.ClusterStatus) bool {
		leads := make(map[string]int)
		for _, sh := range st.Shards {
			leads[sh.Leader]++
			if len(sh.Replicas) != 3 {
				return false
			}
		}
		return leads["n0"] == 0 && leads["n3"] > 0 && leads[""] == 0
	})
	require.NoError(t, fourth.TransferLeadership(ctx, 0, "n3"))
	eventually(t, qs[2], "shard 0 has a leader", func(st *codeq.ClusterStatus) bool { return st.Shards[0].Leader != "" })
	require.ErrorIs(t, fourth.TransferLeadership(ctx, 0, "n0"), codeq.ErrNotFound)
	for i := range 30 {
		l, err := qs[1+i%3].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, qs[1+(i+1)%3].Complete(ctx, l.Receipt, nil))
	}
	_, err = qs[1].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrEmpty)
}

// TestRecoverCluster: the cluster of a node is lost. The node goes on by itself, with all its
// tasks.
func TestRecoverCluster(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	qs := threeNodes(t, codeq.Options{}, nil)
	var ids []codeq.ID
	for range 30 {
		id, err := qs[0].Produce(ctx, codeq.Task{Queue: "a"})
		require.NoError(t, err)
		ids = append(ids, id)
	}
	for shard := range inspect.Of(qs[0]).Shards() { // the remaining node has everything
		applied, err := inspect.Of(qs[0]).Leaders().Applied(ctx, shard)
		require.NoError(t, err)
		require.NoError(t, inspect.Of(qs[0]).Group(shard).AwaitApplied(ctx, applied))
	}
	dir := inspect.Of(qs[0]).Directory().Path
	for _, q := range qs {
		require.NoError(t, q.Close())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	opts := &codeq.Options{Cluster: &codeq.Cluster{Node: "n0", Listener: l, Listen: l.Addr().String()}}
	opts.Cluster.Peers = peersOf(qs)
	require.ErrorIs(t, codeq.RecoverCluster(dir, opts), codeq.ErrInvalid)
	opts.Cluster.Peers = nil
	requireNotRecovered(t, dir, opts)
	opts.Shards = inspect.Of(qs[0]).Shards()
	require.NoError(t, codeq.RecoverCluster(dir, opts))
	q, err := codeq.Open(dir, opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for _, id := range ids {
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, codeq.Ready, info.State)
	}
	_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, err)
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
