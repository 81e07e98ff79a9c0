package codeqweb

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestClusterProblems: the page names the faults of a cluster, and joins the replicas by node.
func TestClusterProblems(t *testing.T) {
	replica := func(node string, lag uint64, free int64) codeq.ReplicaStatus {
		return codeq.ReplicaStatus{Node: node, Address: node + ":1", Voter: true, Lag: lag, FreeBytes: free << 30, DiskBytes: 100 << 30}
	}
	stalled := replica("bob", 7, 50)
	stalled.Stalled = 3 * time.Second
	own := replica("ann", 0, 50)
	own.Stalled, own.Drained = time.Second, true
	suspect := replica("cid", 2000, 4)
	suspect.Suspect = true
	gone := codeq.ReplicaStatus{Node: "dan", LastError: "no route"}
	v := clusterView{ClusterStatus: &codeq.ClusterStatus{Node: "ann", Shards: []codeq.ShardStatus{
		{Shard: 0, Leader: "ann", Term: 4, Replicas: []codeq.ReplicaStatus{own, stalled, suspect, gone}},
		{Shard: 1, Replicas: []codeq.ReplicaStatus{own, replica("bob", 0, 50), replica("cid", 9, 4), gone}},
	}}}
	v.addNodes()
	require.Equal(t, []string{
		"Shard 1 has no leader: its calls wait for one.",
		"The disk of node cid has 4.0 GiB free of 100.0 GiB.",
		"Node dan does not answer: no route",
		"Shard 0 on node bob is stalled: its log, or store, has not answered for 3.0 s.",
		"Shard 0 on node cid may lack acknowledged changes, and does not vote until it is taken back.",
	}, v.problems())
	require.True(t, v.Drained)
	require.Equal(t, []nodeView{
		{Node: "ann", Address: "ann:1", Self: true, Leads: []int{0}, Drained: true, Free: 50 << 30, Disk: 100 << 30},
		{Node: "bob", Address: "bob:1", Lag: 7, Free: 50 << 30, Disk: 100 << 30},
		{Node: "cid", Address: "cid:1", Lag: 2000, Free: 4 << 30, Disk: 100 << 30, LowDisk: true},
		{Node: "dan", LastError: "no route"},
	}, v.Nodes)
	require.EqualValues(t, 96<<30, v.Nodes[2].Used())
	require.Equal(t, "cid", v.Groups[0].Behind.Node)
	require.EqualValues(t, 9, v.Groups[1].Behind.Lag)
}
