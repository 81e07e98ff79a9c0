package bench

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

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

// forEach runs f at every durability with one and with two shards.
func forEach(b *testing.B, f func(b *testing.B, q *codeq.Queue)) {
	for _, d := range durabilities {
		for _, shards := range []int{1, 2} {
			b.Run(fmt.Sprintf("durability=%v/shards=%d", d, shards), func(b *testing.B) {
				q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: shards, Durability: d})
				if err != nil {
					b.Fatal(err)
				}
				defer func() {
					if err := q.Close(); err != nil {
						b.Error(err)
					}
				}()
				f(b, q)
			})
		}
	}
}

// measure runs a load for the warm-up and the window, and reports.
func measure(b *testing.B, l workload.Load, d workload.Driver) {
	run := workload.Start(context.Background(), l, d)
	defer func() {
		if err := run.Stop(); err != nil {
			b.Error(err)
		}
	}()
	time.Sleep(*warmup)
	stopProfiles := startProfiles(b)
	res, err := run.Measure(*window)
	stopProfiles()
	if err != nil {
		b.Fatal(err)
	}
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
	if err != nil {
		b.Fatal(err)
	}
	return func() {
		if err := finish(); err != nil {
			b.Error(err)
		}
	}
}

// reportSteps reports the longest steps of an owner since Open, in ms: of the upkeep of the store,
// of the decisions and answers for callers, and of commits.
func reportSteps(b *testing.B, queues ...*codeq.Queue) {
	var shards []codeq.ShardStorage
	for _, q := range queues {
		st, err := q.StorageStats()
		if err != nil {
			b.Fatal(err)
		}
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
	b.ReportMetric(float64(upkeep.Microseconds())/1e3, "upkeep-ms")
	b.ReportMetric(float64(operations.Microseconds())/1e3, "operations-ms")
	b.ReportMetric(float64(commit.Microseconds())/1e3, "commit-ms")
}
