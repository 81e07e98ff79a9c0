package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/bench/workload"
)

const (
	longQueue = "long"
	longLease = time.Second
	longWork  = 5 * longLease
)

// BenchmarkLongHandlers is BenchmarkClusterRun, at *process* with three shards, beside handlers
// that last for five leases of a second each: none, and 1,000 on each node (100 with -short). Their
// leases are renewed three times a second. In a cluster a renewal is stored. First the handlers run
// alone for half of the window. The benchmark fails if one of them loses its lease. It reports,
// beside the metrics of BenchmarkClusterRun,
//
//	renewals/s     of leases, in all
//	log-B/renewal  bytes of Raft's log on one node, while the handlers are alone
//	alone-cpu-%    processor time of all nodes, of one processor, while the handlers are alone
func BenchmarkLongHandlers(b *testing.B) {
	each := 1000
	if testing.Short() {
		each = 100
	}
	for _, handlers := range []int{0, each} {
		b.Run(fmt.Sprintf("handlers=%d", handlers), func(b *testing.B) { longHandlers(b, handlers) })
	}
}

func longHandlers(b *testing.B, each int) {
	const nodes, shards = 3, 3
	dir := b.TempDir()
	queues := openCluster(b, dir, process(shards))
	stop := beginLong(b, queues, each)
	defer stop()
	if each > 0 {
		time.Sleep(*warmup)
		renewals := float64(each*nodes) * 3 * window.Seconds() / 2 / longLease.Seconds()
		log, usage := logBytes(dir), workload.ReadUsage()
		time.Sleep(*window / 2)
		b.ReportMetric(float64(logBytes(dir)-log)/nodes/renewals, "log-B/renewal")
		b.ReportMetric(100*workload.ReadUsage().Since(usage).CPU.Seconds()/(window.Seconds()/2), "alone-cpu-%")
	}
	measure(b, workload.Load{Batch: batch, Backlog: 2 * producers * batch}, workload.Runner{Queues: queues})
	b.ReportMetric(float64(each*nodes)*3/longLease.Seconds(), "renewals/s")
}

// beginLong runs the given number of long handlers on each node. Each handler produces the next
// task at its end.
func beginLong(b *testing.B, queues []*codeq.Queue, each int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running atomic.Int64
	var runs errgroup.Group
	if each > 0 {
		stock(b, queues[0], longQueue, each*len(queues))
		for _, q := range queues {
			var m codeq.Mux
			codeq.Handle(&m, longQueue, func(ctx context.Context, job *codeq.Job[[]byte]) error {
				running.Add(1)
				defer running.Add(-1)
				select {
				case <-time.After(longWork):
				case <-ctx.Done():
					return ctx.Err()
				}
				job.FollowUp(codeq.Task{Queue: longQueue, Payload: job.Args})
				return nil
			})
			runs.Go(func() error {
				return q.Run(ctx, &m, &codeq.RunOptions{
					Concurrency: each, LeaseFor: longLease, Grace: time.Millisecond,
					OnError: func(l *codeq.Lease, err error) {
						if ctx.Err() == nil {
							b.Errorf("task %s: %v", l.ID, err)
						}
					},
				})
			})
		}
	}
	for end := time.Now().Add(time.Minute); running.Load() < int64(each*len(queues)); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("%d handlers run", running.Load())
		}
	}
	return func() {
		cancel()
		require.NoError(b, runs.Wait())
	}
}

// logBytes is the size of the logs of Raft of all nodes.
func logBytes(dir string) int64 {
	return sizesOf(dir, func(path string) string { return filepath.Base(filepath.Dir(path)) + filepath.Ext(path) })["raft.log"]
}
