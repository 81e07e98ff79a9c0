package codeqprom_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/bench/workload"
	"codeq/codeqprom"
)

var (
	warmup = flag.Duration("warmup", time.Second, "time before the window of BenchmarkFullCycle")
	window = flag.Duration("window", 3*time.Second, "window of BenchmarkFullCycle")
)

// serve serves the metrics of a Collector.
func serve(b *testing.B, c *codeqprom.Collector) (url string) {
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	s := httptest.NewServer(promhttp.HandlerFor(r, promhttp.HandlerOpts{}))
	b.Cleanup(s.Close)
	return s.URL
}

// scrape reads the metrics as Prometheus does, and returns the size of the page.
func scrape(url string) (int64, error) {
	r, err := http.Get(url)
	if err != nil {
		return 0, err
	}
	defer func() { _ = r.Body.Close() }()
	if r.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %s", r.Status)
	}
	return io.Copy(io.Discard, r.Body)
}

func openIn(b *testing.B, opts codeq.Options) *codeq.Queue {
	q, err := codeq.Open(b.TempDir(), &opts)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, q.Close()) })
	return q
}

// BenchmarkScrape is a scrape of so many queues, each with a ready task: the whole, as Prometheus
// asks for it, and how long a group of the shard's owner has taken meanwhile (99.9 % of them).
func BenchmarkScrape(b *testing.B) {
	for _, queues := range []int{10, 200, 10_000} {
		b.Run(fmt.Sprint("queues=", queues), func(b *testing.B) {
			c := codeqprom.New(nil)
			q := openIn(b, codeq.Options{Shards: 2, Observer: c.Observer(nil)})
			c.Watch(q)
			var batch []codeq.Task
			for i := range queues {
				batch = append(batch, codeq.Task{Queue: fmt.Sprint("queue ", i)}, codeq.Task{Queue: fmt.Sprint("queue ", i)})
				if len(batch) >= 1000 || i == queues-1 {
					produce(b, q, batch...)
					batch = batch[:0]
				}
			}
			url := serve(b, c)
			var bytes int64
			before := groups(b, q)
			for b.Loop() {
				var err error
				bytes, err = scrape(url)
				require.NoError(b, err)
			}
			during := groups(b, q)
			during.Count -= before.Count
			for i := range during.Buckets {
				during.Buckets[i] -= before.Buckets[i]
			}
			b.ReportMetric(float64(bytes), "page-B")
			b.ReportMetric(float64(during.Quantile(0.999).Microseconds()), "us/p999-group")
		})
	}
}

// groups are the groups of all owners.
func groups(b *testing.B, q *codeq.Queue) (sum codeq.StepStats) {
	st, err := q.StorageStats()
	require.NoError(b, err)
	for i := range st.Shards {
		s := &st.Shards[i].Steps[codeq.StepGroup]
		sum.Count, sum.Max = sum.Count+s.Count, max(sum.Max, s.Max)
		for k, n := range s.Buckets {
			sum.Buckets[k] += n
		}
	}
	return sum
}

// BenchmarkFullCycle is 32 producers and 128 workers that make single calls of Produce, Claim and
// Complete, without a Collector, and with one that is scraped each second.
func BenchmarkFullCycle(b *testing.B) {
	for _, watched := range []bool{false, true} {
		b.Run(fmt.Sprint("scraped=", watched), func(b *testing.B) {
			opts := codeq.Options{Shards: 2}
			c := codeqprom.New(nil)
			if watched {
				opts.Observer = c.Observer(nil)
			}
			q := openIn(b, opts)
			if watched {
				c.Watch(q)
				url, stop, done := serve(b, c), make(chan struct{}), make(chan error)
				go func() {
					for {
						select {
						case <-stop:
							done <- nil
							return
						case <-time.After(time.Second):
						}
						if _, err := scrape(url); err != nil {
							done <- err
							return
						}
					}
				}()
				defer func() {
					close(stop)
					require.NoError(b, <-done)
				}()
			}
			run := workload.Start(context.Background(), workload.Load{}, workload.Calls{Queues: []*codeq.Queue{q}})
			defer func() { require.NoError(b, run.Stop()) }()
			time.Sleep(*warmup)
			res, err := run.Measure(*window)
			require.NoError(b, err)
			b.ReportMetric(0, "ns/op")
			if res.FellBehind() {
				b.Skip("discarded: completions fell behind")
			}
			b.ReportMetric(res.Rate(), "cycles/s")
		})
	}
}
