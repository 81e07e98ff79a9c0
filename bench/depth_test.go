package bench

import (
	"cmp"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

var depthBacklog = flag.Int("depth.backlog", 0, "BenchmarkDepth: one more backlog, in tasks, and as many keys behind")

// BenchmarkDepth measures each feature behind a backlog. Four callers produce 400,000 tasks (40,000
// with -short) that use the feature, in batches of 1,000; then Run with 128 workers works them off.
// At backlog 0 Run works during the production. One more caller produces to another queue every 2
// ms. From the backlog that -depth.backlog adds, only the first 2,000,000 tasks are worked off, but
// all if tasks go on behind the others (workload.FeatureLoad.Worked). With that flag,
// key-1h-behind=N is key-1h after the production and the end of N other tasks with keys for an
// hour.
//
// The rows of three nodes are of a cluster in this process, with callers and workers spread over
// the nodes: memory and blocks are those of all nodes. The metric of-plain is relative to the row
// "plain" of the same run and backlog.
func BenchmarkDepth(b *testing.B) {
	tasks := 400_000
	if testing.Short() {
		tasks /= 10
	}
	backlogs := []int{0, tasks}
	if *depthBacklog > 0 {
		backlogs = append(backlogs, *depthBacklog)
	}
	for _, shards := range []int{1, 4} {
		for _, backlog := range backlogs {
			name := fmt.Sprintf("shards=%d/backlog=%d/", shards, backlog)
			open := func(b *testing.B) []*codeq.Queue {
				return []*codeq.Queue{newQueue(b, process(shards))}
			}
			plain := depthRows(b, name, open, max(backlog, tasks), backlog > 0)
			if backlog == tasks && *depthBacklog > 0 {
				behind := *depthBacklog
				depthRow(b, fmt.Sprintf("%skey-1h-behind=%d", name, behind), open, depthLoad("key-1h", tasks), behind, true, plain)
			}
		}
	}
	depthRows(b, fmt.Sprintf("nodes=3/backlog=%d/", tasks), func(b *testing.B) []*codeq.Queue {
		return openCluster(b, b.TempDir(), process(1))
	}, tasks, true)
}

func depthLoad(feature string, tasks int) workload.FeatureLoad {
	return workload.FeatureLoad{Feature: workload.FeatureNamed(feature), Tasks: tasks, Workers: workers}
}

// depthRows runs all features, and returns the result of plain tasks.
func depthRows(b *testing.B, name string, open func(*testing.B) []*codeq.Queue, tasks int, stocked bool) (plain workload.FeatureResult) {
	for _, f := range workload.Features() {
		r := depthRow(b, name+f.Name, open, depthLoad(f.Name, tasks), 0, stocked, plain)
		if f.Name == "plain" {
			plain = r
		}
	}
	return plain
}

// depthRow is a load after as many other tasks of it as behind says have ended.
func depthRow(b *testing.B, name string, open func(*testing.B) []*codeq.Queue, l workload.FeatureLoad, behind int, stocked bool, plain workload.FeatureResult) (r workload.FeatureResult) {
	b.Run(name, func(b *testing.B) {
		l.Queues = open(b)
		if behind > 0 {
			before := l
			before.First, before.Tasks, before.Whole = l.Tasks, behind, true
			_, err := before.Run(context.Background(), false, nil)
			require.NoError(b, err)
		}
		r = depth(b, l, stocked)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(r.ProducedRate(), "produced/s")
		b.ReportMetric(r.EndedRate(), "done/s")
		if of := cmp.Or(plain, r); l.Feature.Name == "plain" || plain.Ended > 0 {
			b.ReportMetric(r.ProducedRate()/of.ProducedRate(), "produced-of-plain")
			b.ReportMetric(r.EndedRate()/of.EndedRate(), "done-of-plain")
		}
	})
	return r
}

func depth(b *testing.B, l workload.FeatureLoad, stocked bool) workload.FeatureResult {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	beside := produceBeside(ctx, l.Queues[0])
	var hits, misses int64
	stopProfiles := func() {}
	r, err := l.Run(ctx, stocked, func() error {
		stopProfiles = startProfiles(b)
		hits, misses, _ = depthCache(b, l.Queues)
		return nil
	})
	stopProfiles()
	require.NoError(b, err)
	nowHits, nowMisses, cached := depthCache(b, l.Queues)
	hits, misses = nowHits-hits, nowMisses-misses
	cancel()
	waited := <-beside
	b.ReportMetric(float64(hits+misses)/float64(r.Ended), "blocks/task")
	b.ReportMetric(100*float64(hits)/float64(max(hits+misses, 1)), "%hits")
	b.ReportMetric(float64(cached)/1e6, "cache-MB")
	b.ReportMetric(float64(workload.Resident())/1e6, "rss-MB")
	reportTimes(b, "beside", waited)
	reportSteps(b, l.Queues...)
	return r
}

// depthCache returns the hits, misses and bytes of the caches of all nodes.
func depthCache(b *testing.B, queues []*codeq.Queue) (hits, misses, bytes int64) {
	for _, q := range queues {
		st, err := q.StorageStats()
		require.NoError(b, err)
		hits, misses, bytes = hits+st.CacheHits, misses+st.CacheMisses, bytes+st.CacheBytes
	}
	return hits, misses, bytes
}

// produceBeside produces to a queue of its own every 2 ms until ctx ends, and then returns the
// times of the calls.
func produceBeside(ctx context.Context, q *codeq.Queue) <-chan workload.Latencies {
	took := make(chan workload.Latencies, 1)
	go func() {
		var all workload.Latencies
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				slices.Sort(all)
				took <- all
				return
			case <-tick.C:
				start := time.Now()
				if _, err := q.Produce(context.Background(), codeq.Task{Queue: "beside"}); err == nil {
					all = append(all, time.Since(start))
				}
			}
		}
	}()
	return took
}

// BenchmarkDepthDead is RedriveAllDead and PurgeDead of 2,000,000 dead letters (100,000 with
// -short).
func BenchmarkDepthDead(b *testing.B) {
	dead := 2_000_000
	if testing.Short() {
		dead /= 20
	}
	for name, do := range map[string]func(*codeq.Queue) (int, error){
		"RedriveAllDead": func(q *codeq.Queue) (int, error) {
			return q.RedriveAllDead(context.Background(), codeq.DeadFilter{Queue: queueName})
		},
		"PurgeDead": func(q *codeq.Queue) (int, error) {
			return q.PurgeDead(context.Background(), codeq.DeadFilter{Queue: queueName})
		},
	} {
		b.Run(name, func(b *testing.B) {
			q := newQueue(b, process(0))
			l := depthLoad("dead", dead)
			l.Queues = []*codeq.Queue{q}
			_, err := l.Run(context.Background(), true, nil)
			require.NoError(b, err)
			stopProfiles := startProfiles(b)
			start := time.Now()
			n, err := do(q)
			require.NoError(b, err)
			require.Equal(b, dead, n)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(n)/time.Since(start).Seconds(), "tasks/s")
			stopProfiles()
			reportSteps(b, q)
		})
	}
}

// BenchmarkDepthLarge measures the waits of a caller that produces small tasks to another queue
// while other callers produce large operations for 10 s: batches of 1,000 tasks of 8 KiB from four
// callers, single payloads of 4 MiB and of 32 MiB from one.
func BenchmarkDepthLarge(b *testing.B) {
	for _, load := range []struct {
		name                 string
		callers, batch, size int
	}{
		{"batch=1000x8KiB", 4, 1000, 8 << 10},
		{"payload=4MiB", 1, 1, 4 << 20},
		{"payload=32MiB", 1, 1, 32 << 20},
	} {
		b.Run(load.name, func(b *testing.B) {
			opts := process(1)
			opts.Limits = codeq.Limits{Payload: 32 << 20, BatchBytes: 64 << 20, CommitBytes: 128 << 20}
			q := newQueue(b, opts)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			beside := produceBeside(ctx, q)
			stopProfiles := startProfiles(b)
			var bytes atomic.Int64
			var callers sync.WaitGroup
			for range load.callers {
				callers.Go(func() {
					tasks := make([]codeq.Task, load.batch)
					for i := range tasks {
						tasks[i] = codeq.Task{Queue: queueName, Payload: make([]byte, load.size)}
					}
					for ctx.Err() == nil {
						if _, err := q.ProduceBatch(context.Background(), tasks); err != nil {
							b.Error(err)
							return
						}
						bytes.Add(int64(load.batch * load.size))
					}
				})
			}
			callers.Wait()
			waited := <-beside
			stopProfiles()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(bytes.Load())/10e6, "MB/s")
			reportTimes(b, "beside", waited)
			b.ReportMetric(float64(workload.Resident())/1e6, "rss-MB")
			reportSteps(b, q)
		})
	}
}

// BenchmarkDepthDue measures the delay of scheduled tasks. They are due evenly over 30 s (3 s with
// -short), 10,000 and 100,000 a second, and all produced before.
func BenchmarkDepthDue(b *testing.B) {
	seconds := 30
	if testing.Short() {
		seconds = 3
	}
	for _, rate := range []int{10_000, 100_000} {
		b.Run(fmt.Sprintf("rate=%d", rate), func(b *testing.B) {
			q := newQueue(b, process(1))
			n := rate * seconds
			// The first task is due after all are produced.
			first := time.Now().Add(time.Second + time.Duration(n)*4*time.Microsecond)
			due := func(i int) time.Time { return first.Add(time.Duration(i) * time.Second / time.Duration(rate)) }
			fill(b, q, 4, n, 1000, func(i int) codeq.Task {
				return codeq.Task{Queue: queueName, Payload: binary.BigEndian.AppendUint64(nil, uint64(i)), RunAt: due(i)}
			})
			if wait := time.Until(first); wait < 0 {
				b.Fatalf("produced %v after the first was due", -wait)
			}
			late := make(workload.Latencies, n)
			stopProfiles := startProfiles(b)
			workOff(context.Background(), b, q, []string{queueName}, n, func(_ int, j *codeq.Job[[]byte]) {
				i := int(binary.BigEndian.Uint64(j.Payload))
				late[i] = time.Since(due(i))
			})
			stopProfiles()
			slices.Sort(late)
			b.ReportMetric(0, "ns/op")
			reportTimes(b, "late", late)
			reportSteps(b, q)
		})
	}
}
