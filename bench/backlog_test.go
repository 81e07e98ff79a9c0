package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"codeq"
)

// BenchmarkBacklog compares a queue that was empty with one that has ten million ready tasks, over
// four queues and three priorities. It reports the rate at which 32 producers store tasks with
// single calls, the rate at which 128 workers claim and complete them with single calls, and the
// time from Open to the first claim.
func BenchmarkBacklog(b *testing.B) {
	const ready = 10_000_000
	b.Run(fmt.Sprintf("ready=%d", ready), func(b *testing.B) {
		if testing.Short() {
			b.Skip("takes a minute and more")
		}
		resetPeak()
		dir := b.TempDir()
		q := open(b, dir)
		produceEmpty, claimEmpty := backlogRates(b, q)
		fill(b, q, ready)
		total := stored(b, q)
		stopProfiles := startProfiles(b)
		produceDeep, claimDeep := backlogRates(b, q)
		stopProfiles()
		if err := q.Close(); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		q = open(b, dir)
		if _, err := q.Claim(context.Background(), backlogClaim); err != nil {
			b.Fatal(err)
		}
		reopen := time.Since(start)
		if err := q.Close(); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(total), "ready")
		b.ReportMetric(produceEmpty, "empty-produces/s")
		b.ReportMetric(produceDeep, "produces/s")
		b.ReportMetric(produceDeep/produceEmpty, "produce-ratio")
		b.ReportMetric(claimEmpty, "empty-claims/s")
		b.ReportMetric(claimDeep, "claims/s")
		b.ReportMetric(claimDeep/claimEmpty, "claim-ratio")
		b.ReportMetric(float64(reopen.Microseconds())/1e3, "reopen-ms")
		b.ReportMetric(peak(b)/1e6, "peak-rss-MB")
	})
}

var (
	backlogQueues = []string{"mail", "images", "reports", queueName}
	backlogClaim  = codeq.ClaimRequest{Queues: backlogQueues}
)

func open(b *testing.B, dir string) *codeq.Queue {
	q, err := codeq.Open(dir, &codeq.Options{Durability: codeq.DurabilityProcess})
	if err != nil {
		b.Fatal(err)
	}
	return q
}

// backlogTask spreads tasks over the queues and three priorities.
func backlogTask(n int) codeq.Task {
	return codeq.Task{Queue: backlogQueues[n%4], Priority: n / 4 % 3, Payload: payload}
}

// fill produces tasks in batches until so many are stored.
func fill(b *testing.B, q *codeq.Queue, tasks int) {
	const size = 1000
	var wg sync.WaitGroup
	work := make(chan int)
	for range 4 {
		wg.Go(func() {
			batch := make([]codeq.Task, size)
			for n := range work {
				for i := range batch {
					batch[i] = backlogTask(n + i)
				}
				if _, err := q.ProduceBatch(context.Background(), batch); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for n := 0; n < tasks; n += size {
		work <- n
	}
	close(work)
	wg.Wait()
}

func stored(b *testing.B, q *codeq.Queue) (total uint64) {
	stats, err := q.Stats(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range stats {
		total += c.Total()
	}
	return total
}

// backlogRates produces for a quarter of the window, and then claims for the same time. Claims take
// the older tasks first. The queue has as many tasks afterwards as before, or more.
func backlogRates(b *testing.B, q *codeq.Queue) (produces, claims float64) {
	produces = ratePerSecond(b, producers, func(ctx context.Context, n int) error {
		_, err := q.Produce(ctx, backlogTask(n))
		return err
	})
	req := backlogClaim
	req.NoWait = true
	claims = ratePerSecond(b, workers, func(ctx context.Context, _ int) error {
		l, err := q.Claim(ctx, req)
		if err != nil {
			return err
		}
		return q.Complete(ctx, l.Receipt, nil)
	})
	return produces, claims
}

// ratePerSecond starts callers, which call f for a quarter of the window, or until f returns
// ErrEmpty.
func ratePerSecond(b *testing.B, callers int, f func(ctx context.Context, n int) error) float64 {
	ctx := context.Background()
	start := time.Now()
	end := start.Add(*window / 4)
	calls := make([]int, callers)
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			n := 0
			for ; time.Now().Before(end); n++ {
				if err := f(ctx, n*callers+c); errors.Is(err, codeq.ErrEmpty) {
					break
				} else if err != nil {
					b.Error(err)
					break
				}
			}
			calls[c] = n
		})
	}
	wg.Wait()
	total := 0
	for _, n := range calls {
		total += n
	}
	return float64(total) / time.Since(start).Seconds()
}

// resetPeak resets the peak of the resident memory, on Linux.
func resetPeak() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

// peak is the largest resident memory since resetPeak, in bytes; 0 if /proc does not say.
func peak(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	_, rest, ok := strings.Cut(string(status), "VmHWM:")
	var kib float64
	if !ok {
		return 0
	}
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		b.Error(err)
	}
	return kib * 1024
}
