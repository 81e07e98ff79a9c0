package codeqweb

import (
	"errors"
	"net/http"

	"codeq"
)

// clusterView is the content of the page of the cluster.
type clusterView struct {
	*codeq.ClusterStatus // nil: a standalone queue
	Nodes                []string
	Drained              bool // the node that serves the page
}

// clusterPage shows the leaders of the shards, and the progress of the replicas.
func (d *Dashboard) clusterPage(w http.ResponseWriter, r *request) error {
	status, err := d.q.ClusterStatus(r.Context())
	if err != nil && !errors.Is(err, codeq.ErrNoCluster) {
		return err
	}
	v := clusterView{ClusterStatus: status}
	if err != nil {
		v.ClusterStatus = nil
	} else if len(status.Shards) > 0 {
		for _, replica := range status.Shards[0].Replicas {
			v.Nodes = append(v.Nodes, replica.Node)
			v.Drained = v.Drained || replica.Node == status.Node && replica.Drained
		}
	}
	return d.show(w, r, page{Title: "Cluster", Screen: "cluster", Refresh: 2, Body: v})
}
