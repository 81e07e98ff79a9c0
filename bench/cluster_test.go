package bench

import (
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"codeq"
)

// BenchmarkCluster is BenchmarkFullCycle on three nodes in one process, which
// talk over TCP loopback: the producers and workers are spread over the nodes.
func BenchmarkCluster(b *testing.B) {
	const nodes = 3
	for _, d := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		for _, shards := range []int{1, 3} {
			b.Run(fmt.Sprintf("nodes=%d/durability=%v/shards=%d", nodes, d, shards), func(b *testing.B) {
				queues := openCluster(b, nodes, codeq.Options{Durability: d, Shards: shards})
				fullCycle(b, queues...)
			})
		}
	}
}

// openCluster opens the nodes of a cluster, which end with the benchmark, and
// waits until the shards have the leaders that they are to keep.
func openCluster(b *testing.B, nodes int, opts codeq.Options) []*codeq.Queue {
	dir := b.TempDir()
	var peers []codeq.Peer
	var listeners []net.Listener
	for i := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		listeners = append(listeners, l)
		peers = append(peers, codeq.Peer{Node: fmt.Sprint("node-", i), Address: l.Addr().String()})
	}
	var queues []*codeq.Queue
	for i, p := range peers {
		o := opts
		o.Cluster = &codeq.Cluster{Node: p.Node, Listener: listeners[i], Peers: peers}
		q, err := codeq.Open(filepath.Join(dir, p.Node), &o)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			if err := q.Close(); err != nil {
				b.Error(err)
			}
		})
		queues = append(queues, q)
	}
	time.Sleep(3 * time.Second)
	return queues
}
