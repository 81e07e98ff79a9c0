package codeq

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// threeNodes opens a cluster of three nodes over TCP loopback.
func threeNodes(t *testing.T, opts Options) []*Queue {
	t.Helper()
	return threeNodesTLS(t, opts, func(string) *tls.Config { return nil })
}

func threeNodesTLS(t *testing.T, opts Options, config func(node string) *tls.Config) []*Queue {
	t.Helper()
	dir := t.TempDir()
	listeners := make([]net.Listener, 3)
	var peers []Peer
	for i := range listeners {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners[i] = l
		peers = append(peers, Peer{fmt.Sprint("n", i), l.Addr().String()})
	}
	queues := make([]*Queue, 3)
	for i := range queues {
		o := opts
		o.Cluster = &Cluster{Node: peers[i].Node, Listener: listeners[i], Peers: peers, TLS: config(peers[i].Node)}
		if os.Getenv("CODEQ_LOG") != "" {
			o.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		var err error
		queues[i], err = Open(filepath.Join(dir, peers[i].Node), &o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, queues[i].Close()) })
	}
	return queues
}

// awaiting is how many callers of Await the leader of a task's shard knows.
func awaiting(t *testing.T, qs []*Queue, id ID) (n int) {
	for _, q := range qs {
		if s := q.shard(q.shardOf(id)); s != nil {
			_ = s.probe(func(s *shard) error { // or it leads no more
				n += len(s.awaits.Of(id))
				return nil
			})
		}
	}
	return n
}
