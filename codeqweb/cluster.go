package codeqweb

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"codeq"
)

// clusterView is the content of the page of the cluster.
type clusterView struct {
	*codeq.ClusterStatus // nil: a standalone queue
	Problems             []string
	Nodes                []nodeView
	Groups               []groupView
	Drained              bool // the node that serves the page
}

// nodeView is a node with the shards that it leads.
type nodeView struct {
	Node, Address string
	Self          bool
	Leads         []int // shards
	Drained       bool
	Lag           uint64 // the largest one of its replicas
	Free, Disk    int64  // as in codeq.ReplicaStatus
	LowDisk       bool
	LastError     string
}

// groupView is a shard with the replica that is the furthest behind.
type groupView struct {
	codeq.ShardStatus
	Behind codeq.ReplicaStatus // Lag 0: none is
}

// lowDisk is the part of a disk below which its free space is shown as low: a 20th.
const lowDisk = 20

// clusterPage shows problems, the nodes with their disks, the leaders of the shards, and the
// progress of the replicas.
func (d *Dashboard) clusterPage(w http.ResponseWriter, r *request) error {
	status, err := d.q.ClusterStatus(r.Context())
	if err != nil && !errors.Is(err, codeq.ErrNoCluster) {
		return err
	}
	v := clusterView{ClusterStatus: status}
	if err != nil {
		v.ClusterStatus = nil
	}
	v.Problems = d.ownProblems(r.Context())
	if v.ClusterStatus != nil {
		v.addNodes()
		v.Problems = append(v.Problems, v.problems()...)
	}
	return d.show(w, r, page{Title: "Cluster", Screen: "cluster", Refresh: 2, Body: v})
}

// ownProblems names the faults of the stores of this process.
func (d *Dashboard) ownProblems(ctx context.Context) (problems []string) {
	if err := d.q.Health(ctx); err != nil {
		problems = strings.Split(err.Error(), "\n")
	}
	stats, err := d.q.StorageStats()
	if err != nil {
		return append(problems, err.Error())
	}
	for i := range stats.Shards {
		if reason := stats.Shards[i].LastError; reason != "" {
			problems = append(problems, reason)
		}
	}
	if stats.FreeBytes >= 0 && stats.FreeBytes < stats.MinFreeBytes {
		problems = append(problems, fmt.Sprintf("The disk of this process is full: %s are free, and tasks are accepted from %s on.", size(stats.FreeBytes), size(stats.MinFreeBytes)))
	}
	return problems
}

// addNodes joins the shards by node.
func (v *clusterView) addNodes() {
	for _, s := range v.Shards {
		g := groupView{ShardStatus: s}
		for _, r := range s.Replicas {
			i := slices.IndexFunc(v.Nodes, func(n nodeView) bool { return n.Node == r.Node })
			if i < 0 {
				i = len(v.Nodes)
				v.Nodes = append(v.Nodes, nodeView{Node: r.Node, Address: r.Address, Self: r.Node == v.Node, LastError: r.LastError})
			}
			n := &v.Nodes[i]
			if n.Drained = n.Drained || r.Drained; n.Self {
				v.Drained = n.Drained
			}
			if s.Leader == r.Node {
				n.Leads = append(n.Leads, s.Shard)
			}
			if r.DiskBytes > 0 {
				n.Free, n.Disk, n.LowDisk = r.FreeBytes, r.DiskBytes, r.FreeBytes < r.DiskBytes/lowDisk
			}
			n.Lag = max(n.Lag, r.Lag)
			if r.Lag > g.Behind.Lag {
				g.Behind = r
			}
		}
		v.Groups = append(v.Groups, g)
	}
	slices.SortFunc(v.Nodes, func(a, b nodeView) int { return strings.Compare(a.Node, b.Node) })
}

// problems names the faults of the cluster.
func (v *clusterView) problems() (problems []string) {
	for _, s := range v.Shards {
		if s.Leader == "" {
			problems = append(problems, fmt.Sprintf("Shard %d has no leader: its calls wait for one.", s.Shard))
		}
	}
	for _, n := range v.Nodes {
		if n.LastError != "" {
			problems = append(problems, fmt.Sprintf("Node %s does not answer: %s", n.Node, n.LastError))
		}
		if n.LowDisk {
			problems = append(problems, fmt.Sprintf("The disk of node %s has %s free of %s.", n.Node, size(n.Free), size(n.Disk)))
		}
	}
	for _, s := range v.Shards {
		for _, r := range s.Replicas {
			if r.Stalled > 0 && r.Node != v.Node { // its own are among ownProblems
				problems = append(problems, fmt.Sprintf("Shard %d on node %s is stalled: its log, or store, has not answered for %s.", s.Shard, r.Node, span(r.Stalled)))
			}
			if r.Suspect {
				problems = append(problems, fmt.Sprintf("Shard %d on node %s may lack acknowledged changes, and does not vote until it is taken back.", s.Shard, r.Node))
			}
		}
	}
	return problems
}

// Used returns the part of the disk that is not free.
func (n nodeView) Used() int64 { return n.Disk - n.Free }

func (d *Dashboard) apiCluster(ctx context.Context, _ *request) (any, error) {
	return d.q.ClusterStatus(ctx)
}
