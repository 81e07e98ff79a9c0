package codeq

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq/internal/testcert"
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

func TestClusterCycle(t *testing.T) {
	t.Parallel()
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

// TestClusterBroadcast: any node hears of what happens in any shard.
func TestClusterBroadcast(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	qs := threeNodes(t, Options{})
	var subs []*Subscription
	for _, q := range qs {
		sub, err := q.Subscribe(SubscribeOptions{Kinds: []EventKind{EventProduced, EventCompleted}})
		require.NoError(t, err)
		subs = append(subs, sub)
	}
	id, err := qs[0].Produce(ctx, Task{Queue: "a"})
	require.NoError(t, err)
	var outcomes errgroup.Group
	for _, q := range qs {
		outcomes.Go(func() error {
			o, err := q.Await(ctx, id)
			if err == nil && (o.State != Done || string(o.Result) != "well") {
				err = fmt.Errorf("outcome %+v", o)
			}
			return err
		})
	}
	for awaiting(t, qs, id) < len(qs) {
		require.NoError(t, ctx.Err())
	}
	l, err := qs[1].Claim(ctx, ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, qs[2].Complete(ctx, l.Receipt, []byte("well")))
	require.NoError(t, outcomes.Wait())
	for _, sub := range subs {
		for _, kind := range []EventKind{EventProduced, EventCompleted} {
			e, err := sub.Next(ctx)
			require.NoError(t, err)
			require.Equal(t, kind, e.Kind)
			require.Equal(t, id, e.ID)
		}
	}
	_, err = qs[0].Await(ctx, id)
	require.ErrorIs(t, err, ErrNotFound)
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

// TestClusterCancel: a handler learns of a cancel at once, wherever its task
// lies and whoever cancels it.
func TestClusterCancel(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	qs := threeNodes(t, Options{})
	begun, ended := make(chan ID, 10), make(chan error, 10)
	for _, q := range qs {
		var m Mux
		Handle(&m, "a", func(ctx context.Context, j *Job[int]) error {
			begun <- j.ID
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return nil
		})
		running, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- q.Run(running, &m, nil) }()
		defer func() {
			stop()
			require.NoError(t, <-done)
		}()
	}
	for i := range 9 {
		task, err := NewTask("a", i)
		require.NoError(t, err)
		_, err = qs[i%3].Produce(ctx, task)
		require.NoError(t, err)
		require.NoError(t, qs[(i+1)%3].Cancel(ctx, <-begun))
		require.ErrorIs(t, <-ended, ErrCanceled)
	}
}

// TestClusterTLS: nodes with certificates of one authority talk to each other,
// and to nobody else.
func TestClusterTLS(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ours, theirs := testcert.New(t), testcert.New(t)
	qs := threeNodesTLS(t, Options{}, func(node string) *tls.Config { return ours.Config(t, ours, node) })
	for i, q := range qs {
		_, err := q.Produce(ctx, Task{Queue: "a"})
		require.NoError(t, err)
		_, err = qs[(i+1)%3].Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, err = Open(filepath.Join(t.TempDir(), "q"), &Options{Cluster: &Cluster{
		Node: "stranger", Listener: l, Peers: peersOf(qs), Join: true, TLS: theirs.Config(t, ours, "stranger"),
	}})
	require.ErrorContains(t, err, "join the cluster")
}
