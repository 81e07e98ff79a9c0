package codeqprom

import (
	"sort"
	"strings"
	"time"

	"codeq"
)

// other is the common label of all queues beyond MaxQueues. In the label of a queue with this name,
// U+FFFD replaces the first character.
const other = "(other)"

// labelIdle is the time until an unused label without a queue is freed.
const labelIdle = 15 * time.Minute

// counters has the sums of all observations.
type counters struct {
	maxQueues int
	named     map[string]time.Time      // last use of each queue's own label; zero: it stays
	queues    map[string]*queueCounters // by label
	commits   map[int]*histogram        // by shard
	missed    struct{ commits, handlers uint64 }
}

// queueCounters has the counters of one label.
type queueCounters struct {
	events        codeq.Totals
	waits, worked *histogram                     // nil: no handler has returned
	batches       *histogram                     // nil: no batch handler has
	verdicts      [codeq.VerdictSuspended]uint64 // of handlers, from VerdictCompleted on
}

func newCounters(maxQueues int) counters {
	return counters{
		maxQueues: maxQueues, named: make(map[string]time.Time), queues: make(map[string]*queueCounters), commits: make(map[int]*histogram),
	}
}

// labelOf returns the label of a queue: its name, if there is a free label, or other.
func (c *counters) labelOf(queue string, now time.Time) string {
	label := strings.ToValidUTF8(queue, "\uFFFD")
	if label == other {
		label = "\uFFFD" + other[1:]
	}
	last, has := c.named[label]
	switch {
	case has && (last.IsZero() || !now.After(last)):
		return label
	case has:
	case label == "" || len(c.named) >= c.maxQueues:
		return other
	default:
		label = strings.Clone(label)
	}
	c.named[label] = now
	return label
}

// forget frees the labels of removed queues with their counters, if all labels are in use. A queue
// that comes back counts from 0.
func (c *counters) forget(now time.Time) {
	if len(c.named) < c.maxQueues {
		return // there are free labels
	}
	for label, last := range c.named {
		if !last.IsZero() && now.Sub(last) > labelIdle {
			delete(c.named, label)
			delete(c.queues, label)
		}
	}
}

// of returns the counters of a label.
func (c *counters) of(label string) *queueCounters {
	q := c.queues[label]
	if q == nil {
		q = new(queueCounters)
		c.queues[label] = q
	}
	return q
}

// add counts an observation.
func (c *counters) add(o *codeq.Observation) {
	now := time.Now()
	for i := range o.Queues {
		d := &o.Queues[i]
		addTotals(&c.of(c.labelOf(d.Queue, now)).events, &d.Totals)
	}
	for i := range o.Commits {
		s := &o.Commits[i]
		h := c.commits[s.Shard]
		if h == nil {
			h = newHistogram(commitBuckets)
			c.commits[s.Shard] = h
		}
		h.observe(s.Took.Seconds())
	}
	for i := range o.Handlers {
		s := &o.Handlers[i]
		q := c.of(c.labelOf(s.Queue, now))
		if q.waits == nil {
			q.waits, q.worked = newHistogram(waitBuckets), newHistogram(handlerBuckets)
		}
		q.waits.observe(s.Wait.Seconds())
		q.worked.observe(s.Took.Seconds())
		q.verdicts[s.Verdict-codeq.VerdictCompleted]++
		if s.Batch > 0 {
			if q.batches == nil {
				q.batches = newHistogram(batchBuckets)
			}
			q.batches.observe(float64(s.Batch))
		}
	}
	c.missed.commits += o.MissedCommits
	c.missed.handlers += o.MissedHandlers
}

func addTotals(to, n *codeq.Totals) {
	to.Produced += n.Produced
	to.Claimed += n.Claimed
	to.Completed += n.Completed
	to.Retried += n.Retried
	to.Expired += n.Expired
	to.Released += n.Released
	to.Unhandled += n.Unhandled
	to.Dead += n.Dead
	to.Canceled += n.Canceled
}

// The upper bounds of histograms, in seconds; of batchBuckets, in tasks.
var (
	waitBuckets    = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600, 6 * 3600}
	handlerBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}
	batchBuckets   = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}
	commitBuckets  = []float64{.00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
)

// histogram counts values.
type histogram struct {
	bounds []float64 // upper bounds, inclusive, ascending
	counts []uint64  // by bucket; the last one is above all bounds
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) {
	h.counts[sort.SearchFloat64s(h.bounds, v)]++
	h.sum += v
}

// cumulative returns the number of values within each bound, and of all.
func (h *histogram) cumulative() (within map[float64]uint64, count uint64) {
	within = make(map[float64]uint64, len(h.bounds))
	for i, bound := range h.bounds {
		count += h.counts[i]
		within[bound] = count
	}
	return within, count + h.counts[len(h.bounds)]
}
