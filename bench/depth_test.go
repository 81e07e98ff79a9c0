package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"codeq"
	"codeq/bench/workload"
)

var depthBacklog = flag.Int("depth.backlog", 0, "BenchmarkDepth: one more backlog, in tasks")

// depthRow is one feature, which every task uses.
type depthRow struct {
	name   string
	task   func(i, at int) codeq.Task // the i-th of all, at an index of its batch; nil: plain
	handle func(first bool) error     // what a handler returns: whether it is the task's first run; nil: no error
	due    time.Duration              // when tasks are due after they were produced
}

var errDepth = errors.New("try again")

// once returns err in the first run of a task.
func once(err error) func(first bool) error {
	return func(first bool) error {
		if first {
			return err
		}
		return nil
	}
}

var depthRows = []depthRow{
	{name: "plain"},
	{name: "kept", task: func(int, int) codeq.Task { return codeq.Task{Retention: 24 * time.Hour} }},
	{name: "retried", handle: once(codeq.RetryAfter(0, errDepth))},
	{name: "dead", handle: once(codeq.DeadLetter(errDepth))},
	{name: "snoozed", handle: once(codeq.Snooze(0))},
	{name: "groups=1000", task: func(i, _ int) codeq.Task { return codeq.Task{Group: strconv.Itoa(i % 1000)} }},
	{name: "groups=100000", task: func(i, _ int) codeq.Task { return codeq.Task{Group: strconv.Itoa(i % 100_000)} }},
	{name: "key", task: func(i, _ int) codeq.Task { return codeq.Task{Unique: codeq.Unique{Key: strconv.Itoa(i)}} }},
	{name: "key-1h", task: func(i, _ int) codeq.Task {
		return codeq.Task{Unique: codeq.Unique{Key: strconv.Itoa(i), For: time.Hour}}
	}},
	{name: "children", task: func(_, at int) codeq.Task {
		if at%10 == 0 {
			return codeq.Task{}
		}
		return codeq.Task{After: []codeq.ID{codeq.Nth(at - at%10)}}
	}},
	{name: "due", due: time.Second},
	{name: "timeout", task: func(int, int) codeq.Task { return codeq.Task{Timeout: time.Minute} }},
	{name: "headers", task: func(int, int) codeq.Task {
		return codeq.Task{Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "kind": "bench"}}
	}},
	{name: "attempts", task: func(int, int) codeq.Task { return codeq.Task{MaxAttempts: 3} }},
}

// BenchmarkDepth is each feature behind a backlog: 400,000 tasks (40,000 with -short) that use it are
// produced in batches of 1,000 by four callers, and then worked off by Run with 128 workers; at backlog 0
// Run works while they are produced. One caller beside them produces to another queue every 2 ms. What
// it reports as of-plain is a part of the row "plain" of the same run and backlog.
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
			var plain depthResult
			for _, row := range depthRows {
				b.Run(fmt.Sprintf("shards=%d/backlog=%d/%s", shards, backlog, row.name), func(b *testing.B) {
					r := depth(b, row, shards, max(backlog, tasks), backlog > 0)
					if row.name == "plain" {
						plain = r
					}
					b.ReportMetric(0, "ns/op")
					b.ReportMetric(r.produced, "produced/s")
					b.ReportMetric(r.done, "done/s")
					if plain.done > 0 {
						b.ReportMetric(r.produced/plain.produced, "produced-of-plain")
						b.ReportMetric(r.done/plain.done, "done-of-plain")
					}
				})
			}
		}
	}
}

// depthResult is tasks/s.
type depthResult struct{ produced, done float64 }

func depth(b *testing.B, row depthRow, shards, tasks int, stocked bool) (r depthResult) {
	q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: shards})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := q.Close(); err != nil {
			b.Error(err)
		}
	}()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	beside := produceBeside(ctx, q)
	produce := func() {
		start := time.Now()
		if err := produceDepth(ctx, q, row, tasks); err != nil {
			b.Fatal(err)
		}
		r.produced = float64(tasks) / time.Since(start).Seconds()
	}
	if stocked {
		produce()
		time.Sleep(row.due)
	}
	before, err := q.StorageStats()
	if err != nil {
		b.Fatal(err)
	}
	stopProfiles := startProfiles(b)
	start := time.Now()
	ended := make(chan error, 1)
	run, stop := context.WithCancel(ctx)
	go func() {
		ended <- q.Run(run, depthMux(row, tasks, stop), &codeq.RunOptions{Concurrency: workers})
	}()
	if !stocked {
		produce()
	}
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
	r.done = float64(tasks) / time.Since(start).Seconds()
	stopProfiles()
	after, err := q.StorageStats()
	if err != nil {
		b.Fatal(err)
	}
	cancel()
	waited := <-beside
	hits, misses := after.CacheHits-before.CacheHits, after.CacheMisses-before.CacheMisses
	b.ReportMetric(float64(hits+misses)/float64(tasks), "blocks/task")
	b.ReportMetric(100*float64(hits)/float64(max(hits+misses, 1)), "%hits")
	b.ReportMetric(float64(after.CacheBytes)/1e6, "cache-MB")
	b.ReportMetric(float64(workload.Resident())/1e6, "rss-MB")
	b.ReportMetric(float64(waited.Quantile(0.99).Microseconds())/1e3, "beside-p99-ms")
	b.ReportMetric(float64(waited.Quantile(1).Microseconds())/1e3, "beside-max-ms")
	reportSteps(b, q)
	return r
}

// produceDepth produces tasks of a row in batches of 1,000, by four callers.
func produceDepth(ctx context.Context, q *codeq.Queue, row depthRow, tasks int) error {
	const callers, size = 4, 1000
	var next atomic.Int64
	errs := make([]error, callers)
	var done sync.WaitGroup
	for c := range callers {
		done.Go(func() {
			batch := make([]codeq.Task, 0, size)
			for errs[c] == nil {
				from := int(next.Add(size)) - size
				if from >= tasks {
					return
				}
				batch = batch[:0]
				for i := from; i < min(from+size, tasks); i++ {
					var t codeq.Task
					if row.task != nil {
						t = row.task(i, len(batch))
					}
					t.Queue, t.Payload = queueName, binary.BigEndian.AppendUint64(nil, uint64(i))
					if row.due > 0 {
						t.RunAt = time.Now().Add(row.due)
					}
					batch = append(batch, t)
				}
				_, errs[c] = q.ProduceBatch(ctx, batch)
			}
		})
	}
	done.Wait()
	return errors.Join(errs...)
}

// depthMux works tasks of a row off, and calls stop when all have ended.
func depthMux(row depthRow, tasks int, stop func()) *codeq.Mux {
	m, seen := new(codeq.Mux), make([]atomic.Bool, tasks)
	var left atomic.Int64
	left.Store(int64(tasks))
	isLast := row.name == "dead" // its handler fails for good
	codeq.Handle(m, queueName, func(_ context.Context, j *codeq.Job[[]byte]) error {
		var err error
		first := seen[binary.BigEndian.Uint64(j.Payload)].CompareAndSwap(false, true)
		if row.handle != nil {
			err = row.handle(first)
		}
		if (err == nil || isLast) && left.Add(-1) == 0 {
			stop()
		}
		return err
	})
	return m
}

// produceBeside produces to a queue of its own every 2 ms until ctx ends, and then says how long that took.
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

// BenchmarkDepthDead is RedriveAll and Purge of 2,000,000 dead letters (100,000 with -short).
func BenchmarkDepthDead(b *testing.B) {
	dead := 2_000_000
	if testing.Short() {
		dead /= 20
	}
	for name, do := range map[string]func(*codeq.Queue) (int, error){
		"RedriveAll": func(q *codeq.Queue) (int, error) {
			return q.RedriveAll(context.Background(), codeq.DeadLetters{Queue: queueName})
		},
		"Purge": func(q *codeq.Queue) (int, error) {
			return q.Purge(context.Background(), codeq.DeadLetters{Queue: queueName})
		},
	} {
		b.Run(name, func(b *testing.B) {
			ctx := context.Background()
			q := openBench(b, b.TempDir())
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
			row := depthRow{name: "dead", handle: once(codeq.DeadLetter(errDepth))}
			if err := produceDepth(ctx, q, row, dead); err != nil {
				b.Fatal(err)
			}
			run, stop := context.WithCancel(ctx)
			if err := q.Run(run, depthMux(row, dead, stop), &codeq.RunOptions{Concurrency: workers}); err != nil {
				b.Fatal(err)
			}
			stopProfiles := startProfiles(b)
			start := time.Now()
			n, err := do(q)
			if err != nil || n != dead {
				b.Fatal(n, err)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(n)/time.Since(start).Seconds(), "tasks/s")
			stopProfiles()
			reportSteps(b, q)
		})
	}
}

// BenchmarkDepthLarge is what a caller beside waits, who produces small tasks to another queue, while others
// produce large operations for 10 s: batches of 1,000 tasks of 8 KiB by four callers, single payloads of 4 MiB
// and of 32 MiB by one.
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
			limits := codeq.Limits{Payload: 32 << 20, BatchBytes: 64 << 20, CommitBytes: 128 << 20}
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1, Limits: limits})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
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
			b.ReportMetric(float64(waited.Quantile(0.5).Microseconds())/1e3, "beside-p50-ms")
			b.ReportMetric(float64(waited.Quantile(0.99).Microseconds())/1e3, "beside-p99-ms")
			b.ReportMetric(float64(waited.Quantile(1).Microseconds())/1e3, "beside-max-ms")
			b.ReportMetric(float64(workload.Resident())/1e6, "rss-MB")
			reportSteps(b, q)
		})
	}
}

// BenchmarkDepthDue is how late tasks run that are due evenly over 30 s, 10,000 and 100,000 a second (over 3 s
// with -short), all produced before.
func BenchmarkDepthDue(b *testing.B) {
	seconds := 30
	if testing.Short() {
		seconds = 3
	}
	for _, rate := range []int{10_000, 100_000} {
		b.Run(fmt.Sprintf("rate=%d", rate), func(b *testing.B) {
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 1})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := q.Close(); err != nil {
					b.Error(err)
				}
			}()
			n := rate * seconds
			first := time.Now().Add(time.Second + time.Duration(n)*4*time.Microsecond) // when all are produced
			produceDue(b, q, n, rate, first)
			if wait := time.Until(first); wait < 0 {
				b.Fatalf("produced %v after the first was due", -wait)
			}
			late := make(workload.Latencies, n)
			var left atomic.Int64
			left.Store(int64(n))
			ctx, stop := context.WithCancel(context.Background())
			defer stop()
			m := new(codeq.Mux)
			codeq.Handle(m, queueName, func(_ context.Context, j *codeq.Job[[]byte]) error {
				i := binary.BigEndian.Uint64(j.Payload)
				late[i] = time.Since(first.Add(time.Duration(i) * time.Second / time.Duration(rate)))
				if left.Add(-1) == 0 {
					stop()
				}
				return nil
			})
			stopProfiles := startProfiles(b)
			if err := q.Run(ctx, m, &codeq.RunOptions{Concurrency: workers}); err != nil {
				b.Fatal(err)
			}
			stopProfiles()
			slices.Sort(late)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(late.Quantile(0.5).Microseconds())/1e3, "late-p50-ms")
			b.ReportMetric(float64(late.Quantile(0.99).Microseconds())/1e3, "late-p99-ms")
			b.ReportMetric(float64(late.Quantile(1).Microseconds())/1e3, "late-max-ms")
			reportSteps(b, q)
		})
	}
}

// produceDue produces n tasks by four callers, of which rate are due each second from first on.
func produceDue(b *testing.B, q *codeq.Queue, n, rate int, first time.Time) {
	const callers, size = 4, 1000
	var callersDone sync.WaitGroup
	for c := range callers {
		callersDone.Go(func() {
			batch := make([]codeq.Task, size)
			for from := c * size; from < n; from += callers * size {
				for i := range batch {
					at := first.Add(time.Duration(from+i) * time.Second / time.Duration(rate))
					batch[i] = codeq.Task{Queue: queueName, Payload: binary.BigEndian.AppendUint64(nil, uint64(from+i)), RunAt: at}
				}
				if _, err := q.ProduceBatch(context.Background(), batch); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	callersDone.Wait()
}
