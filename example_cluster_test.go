package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"codeq"
)

// cluster opens three nodes on loopback addresses, in one process and below one directory. In an
// application, each node has a machine of its own.
func cluster() (nodes []*codeq.Queue, peers []codeq.Peer, end func()) {
	dir, err := os.MkdirTemp("", "codeq-cluster")
	if err != nil {
		log.Fatal(err)
	}
	var listeners []net.Listener
	for _, name := range []string{"ann", "bob", "cid"} {
		l := loopback()
		listeners = append(listeners, l)
		peers = append(peers, codeq.Peer{Node: name, Address: l.Addr().String()})
	}
	nodes = make([]*codeq.Queue, len(peers))
	each := func(do func(i int) error) { // at the same time, as on three machines
		var all sync.WaitGroup
		for i := range nodes {
			all.Go(func() {
				if err := do(i); err != nil {
					log.Fatal(err)
				}
			})
		}
		all.Wait()
	}
	each(func(i int) (err error) {
		nodes[i], err = codeq.Open(filepath.Join(dir, peers[i].Node), &codeq.Options{
			Cluster: &codeq.Cluster{Node: peers[i].Node, Listener: listeners[i], Peers: peers},
		})
		return err
	})
	each(func(i int) error { return nodes[i].WaitReady(context.Background()) })
	return nodes, peers, func() {
		each(func(i int) error { return nodes[i].Close() })
		if err := os.RemoveAll(dir); err != nil {
			log.Fatal(err)
		}
	}
}

// newcomer opens a node for an existing cluster. With joins, Open asks the other nodes to add the
// node. Otherwise, the node waits for AddNode or ReplaceNode.
func newcomer(name string, peers []codeq.Peer, joins bool) (address string, end func()) {
	dir, err := os.MkdirTemp("", "codeq-"+name)
	if err != nil {
		log.Fatal(err)
	}
	l := loopback()
	q, err := codeq.Open(dir, &codeq.Options{
		// With LeaveOnClose, Close would remove the node again.
		Cluster: &codeq.Cluster{Node: name, Listener: l, Peers: peers, Join: joins},
	})
	if err != nil {
		log.Fatal(err)
	}
	return l.Addr().String(), func() {
		_ = q.Close() // the node may be removed already
		_ = os.RemoveAll(dir)
	}
}

func loopback() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	return l
}

// Three nodes hold the same tasks, and each serves every call.
func ExampleCluster() {
	ctx := context.Background()
	nodes, _, end := cluster()
	defer end()
	if _, err := nodes[0].Produce(ctx, codeq.Task{Queue: "mail", Payload: []byte("hello")}); err != nil {
		log.Fatal(err)
	}
	lease, err := nodes[1].Claim(ctx, codeq.ClaimRequest{Queues: []string{"mail"}})
	if err != nil {
		log.Fatal(err)
	}
	if err := nodes[2].Complete(ctx, lease.Receipt, nil); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", lease.Payload)
	// Output: hello
}

// A new node replaces a node that has lost its disk.
func ExampleQueue_ReplaceNode() {
	ctx := context.Background()
	nodes, peers, end := cluster()
	defer end()

	address, leave := newcomer("dan", peers, false)
	defer leave()
	if err := nodes[0].ReplaceNode(ctx, "cid", codeq.Peer{Node: "dan", Address: address}); err != nil {
		log.Fatal(err)
	}
	st, err := nodes[0].ClusterStatus(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range st.Shards[0].Replicas {
		fmt.Println(r.Node)
	}
	// Output:
	// ann
	// bob
	// dan
}

// A node without Join waits until the cluster adds it.
func ExampleQueue_AddNode() {
	ctx := context.Background()
	nodes, peers, end := cluster()
	defer end()
	address, leave := newcomer("dan", peers, false)
	defer leave()
	if err := nodes[0].AddNode(ctx, codeq.Peer{Node: "dan", Address: address}); err != nil {
		log.Fatal(err)
	}
	st, err := nodes[0].ClusterStatus(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(st.Shards[0].Replicas), "nodes")
	// Output: 4 nodes
}

// A running cluster removes a node that has joined.
func ExampleQueue_RemoveNode() {
	ctx := context.Background()
	nodes, peers, end := cluster()
	defer end()
	_, leave := newcomer("dan", peers, true)
	defer leave()
	members := func() {
		st, err := nodes[0].ClusterStatus(ctx)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(len(st.Shards[0].Replicas), "nodes")
	}
	members()
	if err := nodes[1].RemoveNode(ctx, "dan"); err != nil {
		log.Fatal(err)
	}
	members()
	// Output:
	// 4 nodes
	// 3 nodes
}

// Before the maintenance of a machine, other nodes can take over its shards. Close hands the shards
// over as well.
func ExampleQueue_TransferLeadership() {
	ctx := context.Background()
	nodes, _, end := cluster()
	defer end()
	if err := nodes[0].TransferLeadership(ctx, 0, "bob"); err != nil {
		log.Fatal(err)
	}
	// Any node can use the shard, whichever node leads it.
	if _, err := nodes[0].Stats(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println("ok")
	// Output: ok
}

func ExampleQueue_Drain() {
	ctx := context.Background()
	nodes, _, end := cluster()
	defer end()
	if err := nodes[0].WaitReady(ctx); err != nil {
		log.Fatal(err)
	}
	if err := nodes[0].Drain(ctx); err != nil {
		log.Fatal(err)
	}
	// The node leads no shards now. It can be closed, and the other nodes continue at once.
	if err := nodes[0].Undrain(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println("ok")
	// Output: ok
}

func ExampleQueue_Undrain() {
	ctx := context.Background()
	nodes, _, end := cluster()
	defer end()
	if err := nodes[0].Undrain(ctx); err != nil { // no effect: the node was not drained
		log.Fatal(err)
	}
	fmt.Println("ok")
	// Output: ok
}

func ExampleQueue_ClusterStatus() {
	ctx := context.Background()
	nodes, _, end := cluster()
	defer end()
	// Produce waits until the shards have leaders.
	if _, err := nodes[0].Produce(ctx, codeq.Task{Queue: "mail"}); err != nil {
		log.Fatal(err)
	}
	st, err := nodes[1].ClusterStatus(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, shard := range st.Shards {
		for _, r := range shard.Replicas {
			if r.LastError != "" || !r.Voter {
				fmt.Println("shard", shard.Shard, "lacks", r.Node)
			}
		}
	}
	fmt.Println(st.Node, "sees", len(st.Shards), "shards")
	// Output: bob sees 3 shards
}

// A service reports that it is ready as soon as its node can serve calls.
func ExampleQueue_WaitReady() {
	nodes, _, end := cluster()
	defer end()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fmt.Println(nodes[0].WaitReady(ctx))
	// Output: <nil>
}

// One of two machines is lost for good. The other one continues alone, with its own tasks, and new
// nodes can join it.
func ExampleRecoverCluster() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "codeq-recover")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	listeners := []net.Listener{loopback(), loopback()}
	peers := []codeq.Peer{
		{Node: "ann", Address: listeners[0].Addr().String()}, {Node: "bob", Address: listeners[1].Addr().String()},
	}
	var nodes []*codeq.Queue
	for i, p := range peers {
		q, err := codeq.Open(filepath.Join(dir, p.Node), &codeq.Options{Cluster: &codeq.Cluster{
			Node: p.Node, Listener: listeners[i], Peers: peers,
			// Short timeouts, since the network is one machine.
			HeartbeatTimeout: 200 * time.Millisecond, CallTimeout: time.Second,
		}})
		if err != nil {
			log.Fatal(err)
		}
		nodes = append(nodes, q)
	}
	ann, bob := nodes[0], nodes[1]
	if err := bob.WaitReady(ctx); err != nil {
		log.Fatal(err)
	}
	_, err = bob.Produce(ctx, codeq.Task{Queue: "mail"})
	fmt.Println("together:", err)
	if err := bob.Close(); err != nil {
		log.Fatal(err)
	}
	_, err = ann.Produce(ctx, codeq.Task{Queue: "mail"})
	fmt.Println("without a majority there is no leader:", errors.Is(err, codeq.ErrNotLeader) || errors.Is(err, codeq.ErrUncertain))
	if err := ann.Close(); err != nil {
		log.Fatal(err)
	}

	opts := &codeq.Options{Cluster: &codeq.Cluster{Node: "ann", Listener: loopback()}}
	if err := codeq.RecoverCluster(filepath.Join(dir, "ann"), opts); err != nil {
		log.Fatal(err)
	}
	if ann, err = codeq.Open(filepath.Join(dir, "ann"), opts); err != nil {
		log.Fatal(err)
	}
	_, err = ann.Produce(ctx, codeq.Task{Queue: "mail"})
	fmt.Println("alone:", err)
	if err := ann.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// together: <nil>
	// without a majority there is no leader: true
	// alone: <nil>
}
