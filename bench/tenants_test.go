package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
)

// drainTime is the longest time for the drain of a backlog. Rates are those until then.
const drainTime = 20 * time.Second

// BenchmarkTenants drains a million tasks (with -short, a hundred thousand) that are spread over
// tenants, with Run and 128 workers. The number of tasks in memory is the same in all rows, so many
// tenants have only their next few tasks there. of-one is the rate relative to one tenant with the
// same payload; open-ms is the time from the call of Open to the first claim.
func BenchmarkTenants(b *testing.B) {
	tasks, counts := 1_000_000, []int{1, 10_000, 1_000_000}
	if testing.Short() {
		tasks, counts = 100_000, []int{1, 1_000, 100_000}
	}
	for _, size := range []int{100, 1 << 10} {
		one := 0.0
		for _, tenants := range counts {
			b.Run(fmt.Sprintf("payload=%d/tenants=%d", size, tenants), func(b *testing.B) {
				dir := b.TempDir()
				q := open(b, dir, process(0))
				fillTenants(b, q, []string{queueName}, tenants, tasks, size)
				require.NoError(b, q.Close())
				start := time.Now()
				q = open(b, dir, process(0))
				complete(b, q, queueName)
				opened := time.Since(start)
				stop := startProfiles(b)
				rate, heap := drain(b, q, tasks-1)
				stop()
				reportSteps(b, q)
				if tenants == 1 {
					one = rate
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(rate, "tasks/s")
				if one > 0 {
					b.ReportMetric(rate/one, "of-one")
				}
				b.ReportMetric(ms(opened), "open-ms")
				b.ReportMetric(float64(heap)/1e6, "heap-MB")
			})
		}
	}
}

// drain runs workers until so many tasks are done. heap is the memory in use in the middle.
func drain(b *testing.B, q *codeq.Queue, tasks int) (rate float64, heap uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	var once sync.Once
	note := func() { once.Do(func() { heap = heapInUse() }) }
	start := time.Now()
	done := workOff(ctx, b, q, []string{queueName}, tasks, func(nth int, _ *codeq.Job[[]byte]) {
		if nth >= tasks/2 {
			note()
		}
	})
	took := time.Since(start)
	note()
	return float64(done) / took.Seconds(), heap
}

func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

// fillTenants stores tasks in turn over queues and tenants.
func fillTenants(b *testing.B, q *codeq.Queue, queues []string, tenants, tasks, size int) {
	payload := make([]byte, size)
	fill(b, q, 1, tasks, 1000, func(i int) codeq.Task {
		t := codeq.Task{Queue: queues[i%len(queues)], Payload: payload}
		if tenants > 1 {
			t.Tenant = fmt.Sprint("tenant ", i/len(queues)%tenants)
		}
		return t
	})
}

// BenchmarkTenantsCalls is eight workers that claim and complete with single calls. Each tenant has
// 1,500 tasks of 100 bytes: from three hundred tenants on, more than memory holds.
func BenchmarkTenantsCalls(b *testing.B) {
	for _, tenants := range []int{100, 300, 1000} {
		b.Run(fmt.Sprintf("tenants=%d", tenants), func(b *testing.B) {
			q := newQueue(b, process(0))
			fillTenants(b, q, []string{queueName}, tenants, tenants*1500, 100)
			stop := startProfiles(b)
			start, before := time.Now(), workload.ReadUsage()
			rate := rateOf(b, 8, func(int) error { return cycle(q, take(queueName)) })
			used, cycles := workload.ReadUsage().Since(before), rate*time.Since(start).Seconds()
			stop()
			reportSteps(b, q)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(used.CPU.Microseconds())/cycles, "cpu-us/cycle")
			b.ReportMetric(float64(used.Allocs)/cycles, "allocs/cycle")
			b.ReportMetric(rate, "tasks/s")
			b.ReportMetric(float64(heapInUse())/1e6, "heap-MB")
		})
	}
}

// BenchmarkQueuesBeside is one worker that produces, claims and completes a task
// at a time in a queue of its own, alone, and beside a backlog of others: 60 queues with 3,000
// tasks of 1 KiB each, or a thousand tenants with 150. The backlog is left alone, or drained by
// eight workers.
func BenchmarkQueuesBeside(b *testing.B) {
	var queues []string
	for i := range 60 {
		queues = append(queues, fmt.Sprint("queue ", i))
	}
	const own = "innocent"
	for _, c := range []struct {
		name    string
		queues  []string
		tenants int
		tasks   int
		drained bool
	}{
		{"60-queues-idle", queues, 1, 60 * 3000, false},
		{"60-queues-drained", queues, 1, 60 * 3000, true},
		{"1000-tenants-drained", queues[:1], 1000, 1000 * 150, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			q := newQueue(b, process(0))
			innocent := func(int) error {
				if _, err := q.Produce(context.Background(), codeq.Task{Queue: own, Payload: payload}); err != nil {
					return err
				}
				return cycle(q, take(own))
			}
			alone := rateOf(b, 1, innocent)
			fillTenants(b, q, c.queues, c.tenants, c.tasks, 1<<10)
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			var others atomic.Int64
			if c.drained {
				for w := range 8 {
					wg.Go(func() {
						for i := w; ctx.Err() == nil; i++ {
							if err := cycle(q, take(c.queues[i%len(c.queues)])); err == nil {
								others.Add(1)
							} else if !errors.Is(err, codeq.ErrEmpty) {
								b.Error(err)
							}
						}
					})
				}
			}
			start := time.Now()
			beside := rateOf(b, 1, innocent)
			rate := float64(others.Load()) / time.Since(start).Seconds()
			cancel()
			wg.Wait()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(alone, "alone/s")
			b.ReportMetric(beside, "beside/s")
			b.ReportMetric(beside/alone, "ratio")
			b.ReportMetric(rate, "others/s")
			b.ReportMetric(float64(heapInUse())/1e6, "heap-MB")
		})
	}
}

// take is a claim that does not wait.
func take(queue string) codeq.ClaimRequest {
	return codeq.ClaimRequest{Queues: []string{queue}, NoWait: true}
}
