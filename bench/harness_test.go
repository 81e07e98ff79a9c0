package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/bench/workload"
)

var (
	warmup   = flag.Duration("warmup", 2*time.Second, "time before the window of a benchmark")
	window   = flag.Duration("window", 20*time.Second, "time that a benchmark measures")
	profiles = flag.String("profiles", "", "directory for CPU, allocation, heap, block, mutex and goroutine profiles of each benchmark")
)

const (
	producers = 32
	workers   = 128
	batch     = 64
	queueName = workload.QueueName
)

var payload = []byte(`{"bench":true}`)

var durabilities = []codeq.Durability{codeq.DurabilityNone, codeq.DurabilityProcess, codeq.DurabilityDisk}

// process are the options of a queue with the durability *process*; 0 shards: the default.
func process(shards int) codeq.Options {
	return codeq.Options{Shards: shards, Durability: codeq.DurabilityProcess}
}

// newQueue opens a queue in a new directory.
func newQueue(b *testing.B, opts codeq.Options) *codeq.Queue { return open(b, b.TempDir(), opts) }

// open opens the queue of a directory. It is closed at the end of the benchmark at the latest.
func open(b *testing.B, dir string, opts codeq.Options) *codeq.Queue {
	q, err := codeq.Open(dir, &opts)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, q.Close()) })
	return q
}

// forEach runs f at every durability with one and with two shards.
func forEach(b *testing.B, f func(b *testing.B, q *codeq.Queue)) {
	for _, d := range durabilities {
		for _, shards := range []int{1, 2} {
			b.Run(fmt.Sprintf("durability=%v/shards=%d", d, shards), func(b *testing.B) {
				f(b, newQueue(b, codeq.Options{Shards: shards, Durability: d}))
			})
		}
	}
}

// fill stores n tasks in batches, by some callers. task returns the i-th task.
func fill(b *testing.B, q *codeq.Queue, callers, n, batch int, task func(i int) codeq.Task) {
	require.NoError(b, workload.Fill(context.Background(), []*codeq.Queue{q}, callers, n, batch, task))
}

// stock stores n tasks of a queue.
func stock(b *testing.B, q *codeq.Queue, queue string, n int) {
	fill(b, q, 1, n, 1000, func(int) codeq.Task { return codeq.Task{Queue: queue, Payload: payload} })
}

// cycle claims and completes a task.
func cycle(q *codeq.Queue, req codeq.ClaimRequest) error {
	l, err := q.Claim(context.Background(), req)
	if err != nil {
		return err
	}
	return q.Complete(context.Background(), l.Receipt, nil)
}

// complete waits for a task of a queue, and completes it.
func complete(b *testing.B, q *codeq.Queue, queue string) {
	require.NoError(b, cycle(q, codeq.ClaimRequest{Queues: []string{queue}}))
}

// workOff runs the workers until they have handled n tasks of the queues, or until ctx ends. It
// calls handle with each task and its number, and returns the number of tasks.
func workOff(ctx context.Context, b *testing.B, q *codeq.Queue, queues []string, n int, handle func(nth int, j *codeq.Job[[]byte])) int {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var done atomic.Int64
	m := new(codeq.Mux)
	for _, queue := range queues {
		codeq.Handle(m, queue, func(_ context.Context, j *codeq.Job[[]byte]) error {
			nth := int(done.Add(1))
			handle(nth, j)
			if nth == n {
				stop()
			}
			return nil
		})
	}
	require.NoError(b, q.Run(ctx, m, &codeq.RunOptions{Concurrency: workers}))
	return int(done.Load())
}

// rateOf returns the calls of f a second by some callers, for a quarter of the window. A caller
// ends when f returns codeq.ErrEmpty. f gets the number of the call.
func rateOf(b *testing.B, callers int, f func(n int) error) float64 {
	start := time.Now()
	end := start.Add(*window / 4)
	var calls atomic.Int64
	var g errgroup.Group
	for c := range callers {
		g.Go(func() error {
			for n := c; time.Now().Before(end); n += callers {
				if err := f(n); errors.Is(err, codeq.ErrEmpty) {
					return nil
				} else if err != nil {
					return err
				}
				calls.Add(1)
			}
			return nil
		})
	}
	require.NoError(b, g.Wait())
	return float64(calls.Load()) / time.Since(start).Seconds()
}

// sizesOf adds up the sizes of the files below a directory, by their kinds. Files may vanish
// meanwhile.
func sizesOf(dir string, kind func(path string) string) map[string]int64 {
	sizes := make(map[string]int64)
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil
		}
		if info, err := e.Info(); err == nil {
			sizes[kind(path)] += info.Size()
		}
		return nil
	})
	return sizes
}

// measure runs a load for the warm-up and the window, and reports.
func measure(b *testing.B, l workload.Load, d workload.Driver) {
	run := workload.Start(context.Background(), l, d)
	defer func() { require.NoError(b, run.Stop()) }()
	time.Sleep(*warmup)
	stopProfiles := startProfiles(b)
	res, err := run.Measure(*window)
	stopProfiles()
	require.NoError(b, err)
	b.ReportMetric(0, "ns/op") // -window sets the length of the run
	if res.FellBehind() {
		b.Skipf("discarded: completions fell behind: %d created, %d completed in %v", res.Created, res.Completed, res.Elapsed)
	}
	cycles := float64(res.Cycles())
	b.ReportMetric(res.Rate(), "cycles/s")
	b.ReportMetric(float64(res.Usage.CPU.Nanoseconds())/1e3/cycles, "cpu-us/cycle")
	b.ReportMetric(float64(res.Usage.Allocs)/cycles, "allocs/cycle")
	b.ReportMetric(float64(res.Usage.AllocBytes)/cycles, "B/cycle")
	if len(res.Latencies) > 0 {
		b.ReportMetric(float64(res.Latencies.Quantile(0.5).Microseconds()), "p50-us")
		b.ReportMetric(float64(res.Latencies.Quantile(0.99).Microseconds()), "p99-us")
	}
	b.ReportMetric(float64(workload.Resident())/1e6, "rss-MB")
}

// startProfiles begins the profiles that -profiles asks for.
func startProfiles(b *testing.B) (stop func()) {
	if *profiles == "" {
		return func() {}
	}
	finish, err := workload.Profile(*profiles, b.Name())
	require.NoError(b, err)
	return func() { require.NoError(b, finish()) }
}

// reportSteps reports the longest steps of an owner since Open, in ms: of the upkeep of the store,
// of the decisions and answers for callers, and of commits.
func reportSteps(b *testing.B, queues ...*codeq.Queue) {
	var shards []codeq.ShardStorage
	for _, q := range queues {
		st, err := q.StorageStats()
		require.NoError(b, err)
		shards = append(shards, st.Shards...)
	}
	var upkeep, operations, commit time.Duration
	for _, s := range shards {
		for _, step := range s.Upkeep {
			switch step.Kind {
			case codeq.UpkeepGroup: // all of them
			case codeq.UpkeepCommit:
				commit = max(commit, step.Max)
			case codeq.UpkeepOperations, codeq.UpkeepServe, codeq.UpkeepSeal, codeq.UpkeepRelease:
				operations = max(operations, step.Max)
			default:
				upkeep = max(upkeep, step.Max)
			}
		}
	}
	b.ReportMetric(ms(upkeep), "upkeep-ms")
	b.ReportMetric(ms(operations), "operations-ms")
	b.ReportMetric(ms(commit), "commit-ms")
}

// reportTimes reports the median, the 99th percentile and the maximum, in milliseconds.
func reportTimes(b *testing.B, name string, of workload.Latencies) {
	b.ReportMetric(ms(of.Quantile(0.5)), name+"-p50-ms")
	b.ReportMetric(ms(of.Quantile(0.99)), name+"-p99-ms")
	b.ReportMetric(ms(of.Quantile(1)), name+"-max-ms")
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
