package cluster_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestClusterCycle: tasks are produced, read, claimed and completed on different nodes. Storage
// statistics show each node's replicas.
func TestClusterCycle(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	qs := threeNodes(t, codeq.Options{Durability: codeq.DurabilityProcess}, nil) // a slow sync would change leaders
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
		err = qs[(i+1)%3].Complete(ctx, l.Receipt, nil)
		if errors.Is(err, codeq.ErrUncertain) { // the leader has changed
			if err = qs[i%3].Complete(ctx, l.Receipt, nil); errors.Is(err, codeq.ErrLeaseLost) {
				err = nil
			}
		}
		require.NoError(t, err)
	}
	for _, q := range qs {
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
		st, err := q.StorageStats()
		require.NoError(t, err)
		require.Positive(t, st.FreeBytes)
		status, err := q.ClusterStatus(ctx)
		require.NoError(t, err)
		for _, r := range status.Shards[0].Replicas { // each node reports its disk
			require.Positive(t, r.FreeBytes, r.Node)
			require.Greater(t, r.DiskBytes, r.FreeBytes, r.Node)
		}
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

// TestPagesOfNodes: the pages of a list may come from several nodes, each leading some of the
// shards.
func TestPagesOfNodes(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	qs := threeNodes(t, codeq.Options{Shards: 3, Durability: codeq.DurabilityNone}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	var want []codeq.ID
	for i := range 60 {
		id, err := qs[i%3].Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 3), Unique: codeq.Unique{Key: fmt.Sprint(i)}})
		require.NoError(t, err)
		want = append(want, id)
	}
	leased, err := qs[0].ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 20})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // a shard that was too late gives its leases back
		return queuetest.CountsOf(t, qs[0], "a").Leased == uint64(len(leased))
	}, 30*time.Second, time.Millisecond)
	for _, states := range [][]codeq.State{{codeq.Ready}, {codeq.Leased}, nil} {
		var at []codeq.ID
		for _, newest := range []bool{false, true} {
			o := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: states, Queue: "a"}, Limit: 7, Newest: newest}
			var got []codeq.ID
			for n := 0; n == 0 || o.Cursor != ""; n++ {
				o.NoPayload = n%2 > 0
				p, err := qs[n%3].ListPage(ctx, o)
				require.NoError(t, err)
				for _, i := range p.Tasks {
					require.Len(t, i.Payload, 3*(1-n%2))
					got = append(got, i.ID)
				}
				o.Cursor = p.Next
			}
			if newest && states != nil {
				slices.Reverse(got)
				require.Equal(t, at, got)
			}
			at = got
		}
		n := len(want)
		switch {
		case states == nil:
		case states[0] == codeq.Leased:
			n = len(leased)
		default:
			n -= len(leased)
		}
		require.Len(t, at, n)
		require.Subset(t, want, at)
	}
	for i, id := range want {
		info, err := qs[(i+1)%3].FindByKey(ctx, codeq.UniqueKey{Queue: "a", Key: fmt.Sprint(i)})
		require.NoError(t, err)
		require.Equal(t, id, info.ID)
	}
	r, err := qs[1].Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready, codeq.Leased}}})
	require.NoError(t, err)
	require.Equal(t, codeq.BulkResult{Matched: 60, Changed: 60}, r)
	queuetest.RequireOddTexts(t, qs[0], qs[1])
}

// TestNothingLeftOfNode is TestNothingLeft for nodes of a cluster, and their sockets.
func TestNothingLeftOfNode(t *testing.T) {
	before := testkit.WatchLeaks()
	t.Run("nodes", func(t *testing.T) {
		q := threeNodes(t, codeq.Options{Durability: codeq.DurabilityNone}, nil)[1]
		wait := queuetest.UseEverything(t, q)
		require.NoError(t, q.Close())
		wait()
	})
	before.Require(t, "after a cluster")
}

// TestDeadKindsOfNodes: each node sums up the dead letters of all shards by kind, also of shards of
// other leaders.
func TestDeadKindsOfNodes(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	qs := threeNodes(t, codeq.Options{Shards: 3, Durability: codeq.DurabilityNone}, nil)
	for _, q := range qs {
		require.NoError(t, q.WaitReady(ctx))
	}
	for i := range 30 {
		_, err := qs[i%3].Produce(ctx, codeq.Task{Queue: "a"})
		require.NoError(t, err)
		l, err := qs[(i+1)%3].Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, qs[i%3].DeadLetter(ctx, l.Receipt, fmt.Errorf("failed %d times", i)))
	}
	require.NoError(t, qs[0].TransferLeadership(ctx, 1, ""))
	for _, q := range qs {
		kinds, err := q.DeadKinds(ctx, "a")
		require.NoError(t, err)
		require.Len(t, kinds, 1)
		require.Equal(t, "failed # times", kinds[0].Kind)
		require.Equal(t, uint64(30), kinds[0].Count)
		require.Equal(t, []string{"a"}, kinds[0].Queues)
	}
}
