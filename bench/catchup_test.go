package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

var away = flag.Int64("away", 0, "cycles that BenchmarkCatchUp's third node misses; 0: 100,000, or 20,000 with -short")

// BenchmarkCatchUp closes one of three nodes, which run in one process. After -away cycles on the
// other nodes it opens the node again, and runs for the same number of cycles. It fails if the node
// does not have all entries of the leaders after the end of the load. It reports
//
//	catchup-s           from the call of Open until the node has the entries of the leaders
//	missed-entries/s    entries of the logs that it missed, by that time
//	cycles/s            of the others while one is away
//	catchup-cycles/s    of the others during the catch-up
//	kept                catchup-cycles/s divided by cycles/s
//	log-MB, received-MB, store-MB
//	                    the most that any node had on disk: of logs, of files that it
//	                    made and received for the catch-up, and of tasks
//	late-log-MB         the most log in the last quarter
func BenchmarkCatchUp(b *testing.B) {
	for _, d := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		b.Run(fmt.Sprintf("durability=%v", d), func(b *testing.B) { catchUp(b, d) })
	}
}

const (
	// reach is the largest lag, in entries, of a node that has caught up: the entries that are
	// under way during load.
	reach = 32
	// unknown is the number of applied entries that counts for a shard while no leader answers.
	unknown = 1 << 40
	// shortest is the least time over which a rate is measured.
	shortest = time.Second
)

func catchUp(b *testing.B, d codeq.Durability) {
	missed := *away
	switch {
	case missed == 0 && testing.Short():
		missed = 20_000
	case missed == 0:
		missed = 100_000
	}
	c := newNodes(b, codeq.Options{Durability: d})
	ctx, cancel := context.WithCancel(context.Background())
	var l faultyLoad
	var wg sync.WaitGroup
	for i := range producers {
		wg.Go(func() { l.produce(ctx, b, c.queues[i%2]) })
	}
	for i := range workers {
		wg.Go(func() { l.work(ctx, b, c.queues[i%2]) })
	}
	defer wg.Wait()
	defer cancel()
	sizes := watchSizes(ctx, &wg, b, c.dir, func() int64 { return l.completed.Load() * 8 / max(missed, 1) })

	l.wait(missed / 10) // all three nodes work
	seen, lag := c.applied()
	for ; lag >= unknown; seen, lag = c.applied() {
		time.Sleep(10 * time.Millisecond)
	}
	require.NoError(b, c.queues[2].Close())
	begun := l.completed.Load()
	l.wait(missed / 4) // longer than the election of all new leaders
	alone := l.rate(b, func() bool { return l.completed.Load() < begun+missed })
	reopened := time.Now()
	c.open(2)
	caughtUp, entries := time.Duration(0), uint64(0)
	during := l.rate(b, func() bool {
		if caughtUp == 0 {
			if all, lag := c.applied(); lag <= reach {
				caughtUp, entries = time.Since(reopened), all-seen
			}
		}
		return caughtUp == 0
	})
	l.wait(missed) // and the sizes on

	cancel()
	wg.Wait()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		all, lag := c.applied()
		if lag == 0 {
			break
		}
		if time.Now().After(end) {
			b.Fatalf("the node that came back lacks %d of %d entries a minute after the end of the load", lag, all)
		}
	}
	b.ReportMetric(0, "ns/op") // the run is as long as the flag says
	b.ReportMetric(caughtUp.Seconds(), "catchup-s")
	b.ReportMetric(float64(entries)/caughtUp.Seconds(), "missed-entries/s")
	b.ReportMetric(alone, "cycles/s")
	b.ReportMetric(during, "catchup-cycles/s")
	b.ReportMetric(during/alone, "kept")
	b.ReportMetric(float64(l.failed.Load()), "failed")
	sizes.report(b)
}

// faultyLoad is the cycle. Its calls may fail when leaders change.
type faultyLoad struct{ completed, failed atomic.Int64 }

func (l *faultyLoad) produce(ctx context.Context, b *testing.B, q *codeq.Queue) {
	for ctx.Err() == nil {
		_, err := q.Produce(ctx, codeq.Task{Queue: queueName, Payload: payload})
		l.check(ctx, b, err)
	}
}

func (l *faultyLoad) work(ctx context.Context, b *testing.B, q *codeq.Queue) {
	req := codeq.ClaimRequest{Queues: []string{queueName}}
	for ctx.Err() == nil {
		lease, err := q.Claim(ctx, req)
		if !l.check(ctx, b, err) {
			continue
		}
		if l.check(ctx, b, q.Complete(ctx, lease.Receipt, nil)) {
			l.completed.Add(1)
		}
	}
}

// check reports whether a call has succeeded, and fails the benchmark if a change of leaders does
// not explain the error.
func (l *faultyLoad) check(ctx context.Context, b *testing.B, err error) bool {
	if err == nil || ctx.Err() != nil {
		return err == nil
	}
	for _, transient := range []error{codeq.ErrUncertain, codeq.ErrNotLeader, codeq.ErrLeaseLost} {
		if errors.Is(err, transient) {
			l.failed.Add(1)
			return false
		}
	}
	b.Error(err)
	return false
}

// wait waits for further cycles.
func (l *faultyLoad) wait(cycles int64) {
	for end := l.completed.Load() + cycles; l.completed.Load() < end; {
		time.Sleep(10 * time.Millisecond)
	}
}

// rate measures cycles a second while a condition holds.
func (l *faultyLoad) rate(b *testing.B, holds func() bool) float64 {
	begun, completed := time.Now(), l.completed.Load()
	for holds() || time.Since(begun) < shortest {
		if b.Failed() {
			b.FailNow()
		}
		time.Sleep(10 * time.Millisecond)
	}
	return float64(l.completed.Load()-completed) / time.Since(begun).Seconds()
}

// nodes is three nodes that can be opened again.
type nodes struct {
	b      *testing.B
	dir    string
	opts   codeq.Options
	peers  []codeq.Peer
	queues []*codeq.Queue
}

// newNodes opens three nodes, which end with the benchmark.
func newNodes(b *testing.B, opts codeq.Options) *nodes {
	c := &nodes{b: b, dir: b.TempDir(), opts: opts, queues: make([]*codeq.Queue, 3)}
	first := testkit.FreePorts(b, rand.IntN, len(c.queues))
	for i := range c.queues {
		c.peers = append(c.peers, codeq.Peer{Node: fmt.Sprint("node-", i), Address: fmt.Sprint("127.0.0.1:", first+i)})
	}
	for i := range c.queues {
		c.open(i)
	}
	return c
}

func (c *nodes) open(i int) {
	o := c.opts
	o.Cluster = &codeq.Cluster{Node: c.peers[i].Node, Listen: c.peers[i].Address, Peers: c.peers}
	c.queues[i] = open(c.b, filepath.Join(c.dir, c.peers[i].Node), o)
}

// applied returns the number of entries that the leaders of all shards have applied, and the number
// of these that the third node has not applied.
func (c *nodes) applied() (all, lag uint64) {
	status, err := c.queues[0].ClusterStatus(context.Background())
	require.NoError(c.b, err)
	for _, s := range status.Shards {
		led, has := uint64(unknown), uint64(0)
		for _, r := range s.Replicas {
			if r.Node == s.Leader && r.LastError == "" {
				led = r.Applied
			}
			if r.Node == c.peers[2].Node {
				has = r.Applied
			}
		}
		all, lag = all+led, lag+led-min(has, led)
	}
	return all, lag
}

// sizes has the largest sizes of the directories of nodes, in bytes.
type sizes struct{ log, received, store, late int64 }

// watchSizes reads the sizes until ctx ends. phase returns 16 from the beginning of the last
// quarter.
func watchSizes(ctx context.Context, wg *sync.WaitGroup, b *testing.B, dir string, phase func() int64) *sizes {
	s := new(sizes)
	wg.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
			dirs, err := filepath.Glob(filepath.Join(dir, "node-*"))
			if err != nil {
				b.Error(err)
			}
			for _, node := range dirs {
				now := sizesOf(node, func(path string) string {
					switch part, _, _ := strings.Cut(path[len(node)+1:], string(filepath.Separator)); {
					case part == "raft":
						return "log"
					case strings.HasSuffix(part, ".raft"):
						return "received"
					}
					return "store"
				})
				s.log, s.received, s.store = max(s.log, now["log"]), max(s.received, now["received"]), max(s.store, now["store"])
				if phase() >= 16 {
					s.late = max(s.late, now["log"])
				}
			}
		}
	})
	return s
}

func (s *sizes) report(b *testing.B) {
	b.ReportMetric(float64(s.log)/1e6, "log-MB")
	b.ReportMetric(float64(s.received)/1e6, "received-MB")
	b.ReportMetric(float64(s.store)/1e6, "store-MB")
	b.ReportMetric(float64(s.late)/1e6, "late-log-MB")
}
