package codeq

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// threeNodes opens a cluster of three nodes over TCP loopback.
func threeNodes(t *testing.T, opts Options) []*Queue {
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
		o.Cluster = &Cluster{Node: peers[i].Node, Listener: listeners[i], Peers: peers}
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

func TestClusterCycle(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	qs := threeNodes(t, Options{})
	for i, q := range qs {
		for n := range 10 {
			id, err := q.Produce(ctx, Task{Queue: "a", Payload: []byte{byte(n)}})
			require.NoError(t, err)
			info, err := qs[(i+1)%3].Get(ctx, id)
			require.NoError(t, err)
			require.Equal(t, Ready, info.State)
		}
	}
	for i := range 30 {
		l, err := qs[i%3].Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, qs[(i+1)%3].Complete(ctx, l.Receipt, nil))
	}
	stats, err := qs[0].Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, Counts{}, stats["a"])
}
