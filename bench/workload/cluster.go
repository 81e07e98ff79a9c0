package workload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"codeq"
)

// OpenCluster opens the 1 to 100 nodes of a new cluster in this process, each in its own directory
// below dir, connected over TCP loopback. It returns when the preferred node of each shard leads
// it, so that no leader changes under the load. An error leaves nothing open.
func OpenCluster(ctx context.Context, dir string, nodes int, opts codeq.Options) ([]*codeq.Queue, error) {
	var peers []codeq.Peer
	var listeners []net.Listener
	for i := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			for _, l := range listeners {
				_ = l.Close() // unused
			}
			return nil, err
		}
		listeners = append(listeners, l)
		peers = append(peers, codeq.Peer{Node: nodeName(i), Address: l.Addr().String()})
	}
	var queues []*codeq.Queue
	for i, p := range peers {
		o := opts
		o.Cluster = &codeq.Cluster{Node: p.Node, Listener: listeners[i], Peers: peers}
		q, err := codeq.Open(filepath.Join(dir, p.Node), &o)
		if err != nil {
			for _, l := range listeners[i:] {
				_ = l.Close() // may be closed already
			}
			return nil, errors.Join(fmt.Errorf("open %s: %w", p.Node, err), CloseAll(queues))
		}
		queues = append(queues, q)
	}
	if err := settled(ctx, queues); err != nil {
		return nil, errors.Join(err, CloseAll(queues))
	}
	return queues, nil
}

// CloseAll closes the nodes of a cluster.
func CloseAll(queues []*codeq.Queue) error {
	var errs []error
	for _, q := range queues {
		errs = append(errs, q.Close())
	}
	return errors.Join(errs...)
}

// nodeName sorts like i: the n-th node by name is the preferred leader of the n-th shard.
func nodeName(i int) string { return fmt.Sprintf("node-%02d", i) }

const (
	// settleTimeout is several times the duration of elections and of transfers to the preferred
	// leaders.
	settleTimeout = time.Minute
	settlePoll    = 20 * time.Millisecond
)

// settled waits until the preferred node of each shard leads it.
func settled(ctx context.Context, queues []*codeq.Queue) error {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTimeout, errors.New("the shards have not got to their nodes"))
	defer cancel()
	for {
		st, err := queues[0].ClusterStatus(ctx)
		if err != nil {
			return err
		}
		if atHome(st, len(queues)) {
			return nil
		}
		select {
		case <-time.After(settlePoll):
		case <-ctx.Done():
			return fmt.Errorf("cluster of %d: %w", len(queues), context.Cause(ctx))
		}
	}
}

func atHome(st *codeq.ClusterStatus, nodes int) bool {
	for _, sh := range st.Shards {
		home := nodeName(sh.Shard % nodes)
		serves := false
		for _, r := range sh.Replicas {
			serves = serves || r.Node == home && r.Serves
		}
		if sh.Leader != home || len(sh.Replicas) != nodes || !serves {
			return false
		}
	}
	return true
}
