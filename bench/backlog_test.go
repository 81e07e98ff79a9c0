package bench

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
		q := open(b, dir, process(0))
		produceEmpty, claimEmpty := backlogRates(b, q)
		fill(b, q, 4, ready, 1000, backlogTask)
		stats, err := q.Stats(context.Background())
		require.NoError(b, err)
		total := uint64(0)
		for _, c := range stats {
			total += c.Total()
		}
		stopProfiles := startProfiles(b)
		produceDeep, claimDeep := backlogRates(b, q)
		stopProfiles()
		require.NoError(b, q.Close())
		start := time.Now()
		q = open(b, dir, process(0))
		_, err = q.Claim(context.Background(), codeq.ClaimRequest{Queues: backlogQueues})
		require.NoError(b, err)
		reopen := time.Since(start)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(total), "ready")
		b.ReportMetric(produceEmpty, "empty-produces/s")
		b.ReportMetric(produceDeep, "produces/s")
		b.ReportMetric(produceDeep/produceEmpty, "produce-ratio")
		b.ReportMetric(claimEmpty, "empty-claims/s")
		b.ReportMetric(claimDeep, "claims/s")
		b.ReportMetric(claimDeep/claimEmpty, "claim-ratio")
		b.ReportMetric(ms(reopen), "reopen-ms")
		b.ReportMetric(peak()/1e6, "peak-rss-MB")
	})
}

var backlogQueues = []string{"mail", "images", "reports", queueName}

// backlogTask spreads tasks over the queues and three priorities.
func backlogTask(n int) codeq.Task {
	return codeq.Task{Queue: backlogQueues[n%4], Priority: n / 4 % 3, Payload: payload}
}

// backlogRates produces for a quarter of the window, and then claims for the same time. Claims take
// the older tasks first. The queue has as many tasks afterwards as before, or more.
func backlogRates(b *testing.B, q *codeq.Queue) (produces, claims float64) {
	produces = rateOf(b, producers, func(n int) error {
		_, err := q.Produce(context.Background(), backlogTask(n))
		return err
	})
	req := codeq.ClaimRequest{Queues: backlogQueues, NoWait: true}
	return produces, rateOf(b, workers, func(int) error { return cycle(q, req) })
}

// resetPeak resets the peak of the resident memory, on Linux.
func resetPeak() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

// peak is the largest resident memory since resetPeak, in bytes; 0 if /proc does not say.
func peak() float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	var kib float64
	_, _ = fmt.Sscan(rest, &kib) // 0 if it is not there
	return kib * 1024
}
