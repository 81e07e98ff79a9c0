package codeqprom_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/bench/workload"
	"codeq/codeqprom"
	"codeq/codeqweb"
)

var (
	warmup = flag.Duration("warmup", time.Second, "time before each window of BenchmarkWatched")
	window = flag.Duration("window", 3*time.Second, "each window of BenchmarkWatched")
	rounds = flag.Int("rounds", 5, "how many windows BenchmarkWatched has of each kind")
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

// BenchmarkScrape measures a full scrape, as by Prometheus, of so many queues with one ready task
// each. It also reports the time of the shard owner's groups during the scrape (99.9th percentile).
func BenchmarkScrape(b *testing.B) {
	for _, queues := range []int{10, 200, 10_000} {
		b.Run(fmt.Sprint("queues=", queues), func(b *testing.B) {
			c := codeqprom.New(nil)
			q := openIn(b, codeq.Options{Shards: 2, Observer: c.Observer(nil)})
			c.Watch(q)
			require.NoError(b, workload.Fill(b.Context(), []*codeq.Queue{q}, 1, 2*queues, 1000, func(i int) codeq.Task {
				return codeq.Task{Queue: fmt.Sprint("queue ", i/2)}
			}))
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
func groups(b *testing.B, q *codeq.Queue) (sum codeq.UpkeepStats) {
	st, err := q.StorageStats()
	require.NoError(b, err)
	for i := range st.Shards {
		s := &st.Shards[i].Upkeep[codeq.UpkeepGroup]
		sum.Count, sum.Max = sum.Count+s.Count, max(sum.Max, s.Max)
		for k, n := range s.Buckets {
			sum.Buckets[k] += n
		}
	}
	return sum
}

// watching is how a queue is watched while it is loaded.
type watching struct {
	name              string
	observed, scraped bool // by a Collector's Observer; each second, by HTTP
	viewers           int  // of the dashboard's overview, by HTTP
}

// BenchmarkWatched is 32 producers and 128 workers that make single calls of Produce, Claim and
// Complete: on a queue without monitoring, on one with an Observer, on one that Prometheus scrapes
// as well, and on one that also has viewers of the dashboard. Each round loads all queues in turn.
// It reports medians of the rates, of their ratios to the first one, and of the processor time for
// a cycle, with the requests of Prometheus and the viewers.
func BenchmarkWatched(b *testing.B) {
	ways := []watching{
		{name: "alone"}, {name: "observed", observed: true}, {name: "scraped", observed: true, scraped: true},
		{name: "viewed", observed: true, scraped: true, viewers: 3},
	}
	loads := make([]*watchedLoad, len(ways))
	for i, way := range ways {
		loads[i] = newWatchedLoad(b, way)
	}
	rates, ratios, costs := make([][]float64, len(ways)), make([][]float64, len(ways)), make([][]float64, len(ways))
	for round := range *rounds {
		for i := range loads {
			if round%2 == 1 { // later loads may find a slower disk
				i = len(loads) - 1 - i
			}
			res := loads[i].measure(b)
			rates[i] = append(rates[i], res.Rate())
			costs[i] = append(costs[i], float64(res.Usage.CPU.Nanoseconds())/1e3/float64(res.Cycles()))
		}
		for i := range loads {
			ratios[i] = append(ratios[i], rates[i][round]/rates[0][round])
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, way := range ways {
		b.ReportMetric(median(rates[i]), way.name+"-cycles/s")
		b.ReportMetric(median(costs[i]), way.name+"-cpu-us")
		if i > 0 {
			b.ReportMetric(median(ratios[i]), way.name+"/alone")
			b.Logf("%s/alone: %.3f", way.name, ratios[i])
		}
	}
}

func median(all []float64) float64 {
	slices.Sort(all)
	return (all[(len(all)-1)/2] + all[len(all)/2]) / 2
}

// watchedLoad is a queue and its monitoring.
type watchedLoad struct {
	watching
	q          *codeq.Queue
	metrics    string // URL; "": not scraped
	dashboard  string // URL; "": there is none
	background errgroup.Group
}

func newWatchedLoad(b *testing.B, way watching) *watchedLoad {
	l := &watchedLoad{watching: way}
	opts := codeq.Options{Shards: 2}
	c := codeqprom.New(nil)
	if way.observed {
		opts.Observer = c.Observer(nil)
	}
	l.q = openIn(b, opts)
	if way.scraped {
		c.Watch(l.q)
		l.metrics = serve(b, c)
	}
	if way.viewers > 0 {
		d := codeqweb.Handler(l.q, nil)
		s := httptest.NewServer(d)
		b.Cleanup(func() {
			s.Close()
			require.NoError(b, d.Close())
		})
		l.dashboard = s.URL
	}
	return l
}

// measure loads the queue for a while.
func (l *watchedLoad) measure(b *testing.B) workload.Result {
	ctx, stop := context.WithCancel(context.Background())
	defer func() {
		stop()
		require.NoError(b, l.background.Wait())
	}()
	if l.metrics != "" {
		l.background.Go(func() error { return scrapeEachSecond(ctx, l.metrics) })
	}
	for range l.viewers {
		l.background.Go(func() error { return view(ctx, l.dashboard) })
	}
	run := workload.Start(context.Background(), workload.Load{}, workload.Calls{Queues: []*codeq.Queue{l.q}})
	defer func() { require.NoError(b, run.Stop()) }()
	time.Sleep(*warmup)
	res, err := run.Measure(*window)
	require.NoError(b, err)
	if res.FellBehind() {
		b.Fatal("completions fell behind")
	}
	return res
}

func scrapeEachSecond(ctx context.Context, url string) error {
	each := time.NewTicker(time.Second)
	defer each.Stop()
	for {
		select {
		case <-each.C:
			if _, err := scrape(url); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// view follows the overview until ctx ends.
func view(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/live?page=overview", nil)
	if err != nil {
		return err
	}
	r, err := http.DefaultClient.Do(request)
	switch {
	case ctx.Err() != nil && err != nil:
		return nil
	case err != nil:
		return err
	}
	defer func() { _ = r.Body.Close() }()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", r.Status)
	}
	if _, err := io.Copy(io.Discard, r.Body); ctx.Err() == nil {
		return fmt.Errorf("the stream has ended: %v", err)
	}
	return nil
}
