package codeqprom_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqprom"
)

// node is a node of a cluster with its Collector.
type node struct {
	*codeq.Queue
	metrics *codeqprom.Collector
	name    string
}

// openCluster opens three nodes on loopback addresses.
func openCluster(t *testing.T) []*node {
	t.Helper()
	dir := t.TempDir()
	nodes, listeners, peers := make([]*node, 3), make([]net.Listener, 3), make([]codeq.Peer, 3)
	for i := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		nodes[i] = &node{metrics: codeqprom.New(nil), name: fmt.Sprint("n", i)}
		listeners[i], peers[i] = l, codeq.Peer{Node: nodes[i].name, Address: l.Addr().String()}
	}
	var all sync.WaitGroup
	for i, n := range nodes {
		all.Go(func() {
			q, err := codeq.Open(filepath.Join(dir, n.name), &codeq.Options{
				Shards: 3, Observer: n.metrics.Observer(nil),
				Cluster: &codeq.Cluster{Node: n.name, Listener: listeners[i], Peers: peers},
			})
			if err == nil {
				err = q.WaitReady(t.Context())
			}
			if err != nil {
				t.Error(err)
				return
			}
			n.Queue = q
			n.metrics.Watch(q)
			t.Cleanup(func() { _ = q.Close() })
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return nodes
}

// sumOf sums the values of a family over nodes.
func sumOf(t *testing.T, nodes []*node, family string) map[string]float64 {
	t.Helper()
	sum := make(map[string]float64)
	for _, n := range nodes {
		for labels, v := range values(gather(t, n.metrics)[family]) {
			sum[labels] += v
		}
	}
	return sum
}

// patience is the longest wait for a state of the test's cluster.
const patience = 30 * time.Second

// TestClusterSums: the sums over the nodes are right for each called node and each leader, and also
// after the end of one node.
func TestClusterSums(t *testing.T) {
	t.Parallel()
	nodes := openCluster(t)
	produced := 0.
	work := func(nodes []*node) {
		t.Helper()
		for i := range 20 {
			produce(t, nodes[i%len(nodes)].Queue, codeq.Task{Queue: "a"})
			produced++
		}
		l, err := nodes[0].Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, nodes[1].Complete(t.Context(), l.Receipt, nil))
	}
	right := func(nodes, all []*node, completed float64) {
		t.Helper()
		require.Eventually(t, func() bool {
			tasks, events, up := sumOf(t, nodes, "codeq_tasks"), sumOf(t, all, "codeq_task_events_total"), sumOf(t, nodes, "codeq_shard_up")
			return maps.Equal(nonzero(tasks), map[string]float64{"queue=a,state=ready": produced - completed}) &&
				events["event=produced,queue=a"] == produced && events["event=completed,queue=a"] == completed &&
				maps.Equal(up, map[string]float64{"shard=0": 1, "shard=1": 1, "shard=2": 1})
		}, patience, 10*time.Millisecond)
	}
	work(nodes)
	right(nodes, nodes, 1)
	require.NoError(t, nodes[0].TransferLeadership(t.Context(), 1, "n2"))
	work(nodes)
	right(nodes, nodes, 2)

	require.Eventually(t, func() bool {
		up, lag := sumOf(t, nodes, "codeq_raft_follower_up"), sumOf(t, nodes, "codeq_raft_lag_entries")
		return len(up) == 6 && len(nonzero(up)) == 6 && len(lag) == 6 && len(nonzero(lag)) == 0
	}, patience, 10*time.Millisecond)

	require.NoError(t, nodes[2].Close())
	right(nodes[:2], nodes, 2)
	work(nodes[:2])
	right(nodes[:2], nodes, 3)
	up, lag := sumOf(t, nodes[:2], "codeq_raft_follower_up"), sumOf(t, nodes[:2], "codeq_raft_lag_entries")
	for shard := range 3 {
		require.Contains(t, up, fmt.Sprintf("node=n2,shard=%d", shard))
		require.Zero(t, up[fmt.Sprintf("node=n2,shard=%d", shard)])
	}
	require.Len(t, nonzero(up), 3)
	require.Len(t, lag, 3, "of those that answer")
	require.Zero(t, sumOf(t, nodes, "codeq_scrape_errors_total")["part=cluster"])
}

// TestLint: names, types and texts follow Prometheus' conventions.
func TestLint(t *testing.T) {
	t.Parallel()
	for _, n := range openCluster(t) {
		produceAndRun(t, n.Queue)
		problems, err := testutil.CollectAndLint(n.metrics)
		require.NoError(t, err)
		require.Empty(t, problems)
	}
}

// produceAndRun makes a value for each metric of a queue.
func produceAndRun(t *testing.T, q *codeq.Queue) {
	t.Helper()
	ctx := t.Context()
	var m codeq.Mux
	ran := make(chan struct{}, 1)
	codeq.Handle(&m, "run", func(context.Context, *codeq.Job[[]byte]) error {
		select {
		case ran <- struct{}{}:
		default:
		}
		return nil
	})
	running, stop := context.WithCancel(ctx)
	done := make(chan error)
	go func() { done <- q.Run(running, &m, nil) }()
	produce(t, q, codeq.Task{Queue: "run"}, codeq.Task{Queue: "wait"})
	<-ran
	stop()
	require.NoError(t, <-done)
}

// runBatch makes a value for the metric of batch handlers.
func runBatch(t *testing.T, q *codeq.Queue) {
	t.Helper()
	running, stop := context.WithCancel(t.Context())
	var m codeq.Mux
	codeq.HandleBatch(&m, "batch", codeq.BatchOptions{}, func(context.Context, []*codeq.Job[[]byte]) []error {
		stop()
		return nil
	})
	produce(t, q, codeq.Task{Queue: "batch"})
	require.NoError(t, q.Run(running, &m, nil))
}

// row is a line of the table in doc.go.
var row = regexp.MustCompile(`(?m)^//	(codeq_\w+)(?:\{([\w,]*)\})?\s+(gauge|counter|histogram)\s`)

// TestDocumented: the table of the package documentation names all metrics, their labels and types,
// and no other.
func TestDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	documented := make(map[string]string)
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		labels := strings.Split(m[2], ",")
		slices.Sort(labels)
		documented[m[1]] = m[3] + " " + strings.Join(labels, ",")
	}
	exported := make(map[string]string)
	nodes := openCluster(t)
	for _, n := range nodes {
		produceAndRun(t, n.Queue)
	}
	runBatch(t, nodes[0].Queue)
	require.Eventually(t, func() bool {
		for _, n := range nodes {
			for name, f := range gather(t, n.metrics) {
				exported[name] = strings.ToLower(f.GetType().String()) + " " + labelsOf(f)
			}
		}
		return maps.Equal(documented, exported)
	}, patience, 10*time.Millisecond, "%v", exported)
	require.Equal(t, documented, exported)
}

func labelsOf(f *dto.MetricFamily) string {
	var names []string
	for _, l := range f.Metric[0].Label {
		names = append(names, l.GetName())
	}
	return strings.Join(names, ",")
}
