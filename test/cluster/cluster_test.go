package cluster_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// TestClusterCycle: tasks are produced, read, claimed and completed on different nodes. Storage
// statistics show each node's replicas.
func TestClusterCycle(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	qs := threeNodes(t, codeq.Options{}, nil)
	for i, q := range qs {
		for n := range 10 {
			id, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: []byte{byte(n)}})
			require.NoError(t, err)
			info, err := qs[(i+1)%3].Get(ctx, id)
			require.NoError(t, err)
			require.Equal(t, codeq.Ready, info.State)
		}
	}
	for i := range 30 {
		l, err := qs[i%3].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, qs[(i+1)%3].Complete(ctx, l.Receipt, nil))
	}
	for _, q := range qs {
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
		st, err := q.StorageStats()
		require.NoError(t, err)
		require.Positive(t, st.FreeBytes)
		for _, s := range st.Shards { // every node has its replicas, and only Raft's log
			require.Positive(t, s.DiskBytes)
			require.Positive(t, s.MemTableBytes)
			require.Zero(t, s.LogBytes)
			require.Zero(t, s.LoggedBytes)
		}
	}
}

// TestClusterBroadcast: the subscriptions of each node get the events of all shards.
func TestClusterBroadcast(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	qs := threeNodes(t, codeq.Options{}, nil)
	var subs []*codeq.Subscription
	for _, q := range qs {
		sub, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProduced, codeq.EventCompleted}})
		require.NoError(t, err)
		subs = append(subs, sub)
	}
	id, err := qs[0].Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, err)
	var outcomes errgroup.Group
	for _, q := range qs {
		outcomes.Go(func() error {
			o, err := q.Await(ctx, id)
			if err == nil && (o.State != codeq.Done || string(o.Result) != "well") {
				err = fmt.Errorf("outcome %+v", o)
			}
			return err
		})
	}
	for queuetest.Awaiting(t, qs, id) < len(qs) {
		require.NoError(t, ctx.Err())
	}
	terms := func() (terms []uint64) {
		status, err := qs[0].ClusterStatus(ctx)
		require.NoError(t, err)
		for _, sh := range status.Shards {
			terms = append(terms, sh.Term)
		}
		return terms
	}
	before := terms()
	l, err := qs[1].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, qs[2].Complete(ctx, l.Receipt, []byte("well")))
	require.NoError(t, outcomes.Wait())
	for _, sub := range subs {
		for _, kind := range []codeq.EventKind{codeq.EventProduced, codeq.EventCompleted} {
			e, err := sub.Next(ctx)
			require.NoError(t, err)
			require.Equal(t, kind, e.Kind)
			require.Equal(t, id, e.ID)
		}
	}
	for _, q := range qs {
		o, err := q.Await(ctx, id)
		if errors.Is(err, codeq.ErrNotFound) && !slices.Equal(before, terms()) {
			continue // another node leads
		}
		require.NoError(t, err, "its leader remembers")
		require.Equal(t, "well", string(o.Result))
	}
}

// TestClusterCancel: a handler learns of a cancel at once, whichever shard has its task and
// whichever node cancels it.
func TestClusterCancel(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	qs := threeNodes(t, codeq.Options{}, nil)
	begun, ended := make(chan codeq.ID, 10), make(chan error, 10)
	for _, q := range qs {
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[int]) error {
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
		task, err := codeq.NewTask("a", i)
		require.NoError(t, err)
		_, err = qs[i%3].Produce(ctx, task)
		require.NoError(t, err)
		require.NoError(t, qs[(i+1)%3].Cancel(ctx, <-begun))
		require.ErrorIs(t, <-ended, codeq.ErrCanceled)
	}
}

// TestTLSBesideNone: some nodes use TLS, and others do not. All say why they have no leader, and
// how to repair that.
func TestTLSBesideNone(t *testing.T) {
	t.Parallel()
	ca := testbase.NewAuthority(t)
	var peers []codeq.Peer
	var listeners []net.Listener
	var qs []*codeq.Queue
	for _, node := range []string{"a", "b"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		listeners, peers = append(listeners, l), append(peers, codeq.Peer{Node: node, Address: l.Addr().String()})
	}
	for i, config := range []*tls.Config{nil, ca.Config(t, ca, "b")} {
		q, err := codeq.Open(filepath.Join(t.TempDir(), "q"), &codeq.Options{Cluster: &codeq.Cluster{
			Node: peers[i].Node, Listener: listeners[i], Peers: peers, TLS: config, CallTimeout: time.Second,
		}})
		require.NoError(t, err)
		defer q.Close()
		qs = append(qs, q)
	}
	for _, q := range qs {
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			_, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
			require.ErrorIs(c, err, codeq.ErrNotLeader)
			require.ErrorContains(c, err, "set Cluster.TLS on all nodes")
		}, 20*time.Second, time.Millisecond)
	}
}

// TestListenerOfFailedOpen: an Open that fails closes the Listener of its options.
func TestListenerOfFailedOpen(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "q")
	q, err := codeq.Open(dir, &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer q.Close()
	fails := func(want error, path, node string, shards int) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, err = codeq.Open(path, &codeq.Options{Shards: shards, Cluster: &codeq.Cluster{Node: node, Listener: l}})
		require.ErrorIs(t, err, want)
		_, err = l.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
	}
	fails(codeq.ErrLocked, dir, "a", 1)
	fails(codeq.ErrShardCount, dir, "a", 2)
	fails(codeq.ErrInvalid, dir, "", 1)
	fails(codeq.ErrInvalid, "", "a", 1)
}
