package codeqprom

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"codeq"
)

// Options are the options of [New]. A zero field means its documented default.
type Options struct {
	// Queues lists the queues that always have their own labels.
	Queues []string
	// MaxQueues bounds the queues with their own labels, including Queues. Default: 200.
	MaxQueues int
	// Timeout bounds the time that a scrape waits for the queue; then it goes on without the
	// missing parts. It should be shorter than Prometheus' scrape_timeout. Default: 1 s.
	Timeout time.Duration
	// ReportErrors makes a scrape that lacks a part report the error, as an invalid metric.
	// promhttp.HandlerOpts.ErrorHandling then decides: by default the whole response is an error,
	// with ContinueOnError the error is logged. Default: the error is only counted, by
	// codeq_scrape_errors_total, and the response has all other metrics.
	ReportErrors bool
}

const defaultMaxQueues = 200

// Collector is a [prometheus.Collector] of one queue. Its methods are safe for concurrent use.
// [New] makes it. For several queues in one process, register each with its own label:
//
//	prometheus.WrapRegistererWith(prometheus.Labels{"db": "mail"}, registry).MustRegister(metrics)
type Collector struct {
	opts   Options
	queue  atomic.Pointer[codeq.Queue]
	probes probes

	mu       sync.Mutex // guards the following
	observed bool       // there is an Observer
	told     counters
	failed   [endOfParts]uint64 // scrapes without a part
}

// New returns a Collector without a queue. Nil opts mean all defaults.
func New(opts *Options) *Collector {
	c := new(Collector)
	if opts != nil {
		c.opts = *opts
	}
	if c.opts.MaxQueues <= 0 {
		c.opts.MaxQueues = defaultMaxQueues
	}
	if c.opts.Timeout <= 0 {
		c.opts.Timeout = time.Second
	}
	c.told = newCounters(max(c.opts.MaxQueues, len(c.opts.Queues)))
	for _, queue := range c.opts.Queues {
		c.told.labelOf(queue, time.Time{})
	}
	return c
}

// Observer returns the codeq.Options.Observer that counts for the Collector, and then calls next
// with the same argument: the application's own Observer, or nil. A panic of next does not affect
// the Collector.
func (c *Collector) Observer(next func(*codeq.Observation)) func(*codeq.Observation) {
	c.mu.Lock()
	c.observed = true
	c.mu.Unlock()
	return func(o *codeq.Observation) {
		c.observe(o)
		if next != nil {
			next(o)
		}
	}
}

func (c *Collector) observe(o *codeq.Observation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told.add(o)
}

// Watch sets the queue for the gauges, in place of the previous one; nil: none. When q is closed,
// its gauges are no longer exported; the counters stay.
func (c *Collector) Watch(q *codeq.Queue) { c.queue.Store(q) }

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range all {
		ch <- d
	}
}

// Collect implements [prometheus.Collector]. It takes at most [Options.Timeout], and little time of
// the queue: see codeq.Queue.ProcessInfo.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	e := &export{now: time.Now()}
	var got scrape
	if q := c.queue.Load(); q != nil {
		got = c.probes.ask(q, c.opts.Timeout)
	}
	for _, t := range c.count(&got, e.now) {
		e.queue(t)
	}
	e.process(&got)
	e.storage(got.storage)
	e.raft(got.cluster)
	c.exportCounters(e)
	for _, m := range e.metrics { // no lock is held: the receiver may be slow
		ch <- m
	}
	if c.opts.ReportErrors {
		for part, err := range got.errs {
			if err != nil {
				ch <- prometheus.NewInvalidMetric(scrapeErrors, &partError{part, err})
			}
		}
	}
}

// count sums the gauges of all shards by label, and counts the failed parts. If the scrape has the
// queues, it frees the labels of other queues.
func (c *Collector) count(got *scrape, now time.Time) map[string]*queueGauges {
	c.mu.Lock()
	defer c.mu.Unlock()
	for part, err := range got.errs {
		if err != nil {
			c.failed[part]++
		}
	}
	if got.process == nil {
		return nil
	}
	sum := make(map[string]*queueGauges)
	for i := range got.process.Shards {
		for k := range got.process.Shards[i].Queues {
			of := &got.process.Shards[i].Queues[k]
			label := c.told.labelOf(of.Queue, now)
			if c.observed {
				c.told.of(label) // from 0 on, for rates
			}
			t := sum[label]
			if t == nil {
				t = &queueGauges{label: label}
				sum[label] = t
			}
			t.add(of)
		}
	}
	c.told.forget(now)
	return sum
}

// queueGauges has the gauges of one label.
type queueGauges struct {
	label  string
	counts codeq.Counts
	oldest time.Time
	held   int
}

func (t *queueGauges) add(of *codeq.QueueInfo) {
	a, b := &t.counts, &of.Counts
	a.Ready += b.Ready
	a.Scheduled += b.Scheduled
	a.Blocked += b.Blocked
	a.Leased += b.Leased
	a.Dead += b.Dead
	a.Done += b.Done
	a.Canceled += b.Canceled
	t.held += of.Held
	if at := of.OldestReady; !at.IsZero() && (t.oldest.IsZero() || at.Before(t.oldest)) {
		t.oldest = at
	}
}

// partError is the error of a part of a scrape.
type partError struct {
	part int
	err  error
}

func (e *partError) Error() string { return "codeqprom: " + partNames[e.part] + ": " + e.err.Error() }
func (e *partError) Unwrap() error { return e.err }
