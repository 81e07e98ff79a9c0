package cluster_test

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// threeNodes opens a cluster of three nodes over TCP loopback. config returns the TLS configuration
// of a node; nil: no TLS.
func threeNodes(t *testing.T, opts codeq.Options, config func(node string) *tls.Config) []*codeq.Queue {
	t.Helper()
	dir := t.TempDir()
	listeners := make([]net.Listener, 3)
	var peers []codeq.Peer
	for i := range listeners {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners[i] = l
		peers = append(peers, codeq.Peer{Node: fmt.Sprint("n", i), Address: l.Addr().String()})
	}
	queues := make([]*codeq.Queue, 3)
	for i := range queues {
		o := opts
		o.Cluster = &codeq.Cluster{Node: peers[i].Node, Listener: listeners[i], Peers: peers}
		if config != nil {
			o.Cluster.TLS = config(peers[i].Node)
		}
		if os.Getenv("CODEQ_LOG") != "" {
			o.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		var err error
		queues[i], err = codeq.Open(filepath.Join(dir, peers[i].Node), &o)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, queues[i].Close()) })
	}
	return queues
}
