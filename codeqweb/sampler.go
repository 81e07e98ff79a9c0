package codeqweb

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
)

// The sampler samples the queue for all viewers: each second while there are viewers, otherwise
// each minute. It is one goroutine, which ends at Dashboard.Close or the queue's Close.
//
// Its memory is bounded by 14 MiB: two times maxRows rows while the next sample is made, the series
// of seriesQueues queues, and the series of all queues together.
const (
	seriesQueues = 50 // with series of their own
	maxRows      = 10_000
	maxNames     = 512 << 10              // bytes of the names of the rows
	sampleTime   = 5 * time.Second        // for the queue's answer
	slowEvery    = 5 * time.Second        // between two samples of workers and storage
	soonest      = 250 * time.Millisecond // between two messages to viewers
)

// row is a queue in a sample.
type row struct {
	Name   string
	Counts codeq.Counts
	Oldest time.Time // ready time of the oldest ready task; zero: none is ready
	Paused bool
	Held   int // as in codeq.QueueInfo
	// Produced, Completed and Failed are rates per second, since the previous sample.
	Produced, Completed, Failed float64

	Trouble trouble

	totals totals
	normal normal
	limits limits
}

// limits are settings of a queue; 0: no limit.
type limits struct {
	Concurrency, ConcurrencyPerKey int
	Rate                           float64
}

// sample is the state of the queue at one time. It is immutable once published.
type sample struct {
	At      time.Time
	Err     error // the error of the next sample
	Rows    []row // by name
	Queues  int   // the number of queues; Rows has maxRows at most
	All     row   // all queues together; Name is the queue of the oldest task
	Workers []codeq.WorkerInfo
	Storage *codeq.StorageStats // nil: not known

	knowsWorkers bool
	slowAt       time.Time // of Workers and Storage
}

// row returns a queue of the sample, or nil.
func (s *sample) row(name string) *row {
	i, ok := slices.BinarySearchFunc(s.Rows, name, func(r row, name string) int { return cmp.Compare(r.Name, name) })
	if !ok {
		return nil
	}
	return &s.Rows[i]
}

// counts returns the counts of a queue, or of all queues for "".
func (s *sample) counts(queue string) (c codeq.Counts) {
	if queue == "" {
		return s.All.Counts
	}
	if of := s.row(queue); of != nil {
		c = of.Counts
	}
	return c
}

type sampler struct {
	q   *codeq.Queue
	ctx context.Context // ends with the dashboard or the queue
	end func()          // of the dashboard

	asking chan struct{} // capacity 1: held while the queue is sampled
	wake   chan struct{} // capacity 1: a viewer has come
	stale  atomic.Bool   // a request has changed something since the last sample

	viewers viewers

	mu     sync.Mutex // guards the following; not held during calls of the queue
	last   *sample
	all    series
	queues map[string]*series
}

func newSampler(q *codeq.Queue, ctx context.Context, end func()) *sampler {
	return &sampler{
		q: q, ctx: ctx, end: end, asking: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		last: &sample{Err: errors.New("the queue was not asked yet")}, queues: make(map[string]*series),
	}
}

// run samples until the dashboard is closed.
func (s *sampler) run() {
	defer s.viewers.close()
	for {
		_, _ = s.fresh(s.ctx, 900*time.Millisecond)
		s.viewers.publish(s.current())
		published := time.Now()
		wait := untilMinute(published)
		if s.viewers.count() > 0 {
			wait = min(wait, time.Second)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-s.wake: // viewers that join together share a message
			t.Reset(time.Until(published.Add(soonest)))
			select {
			case <-t.C:
			case <-s.ctx.Done():
			}
		case <-s.ctx.Done():
		}
		if t.Stop(); s.ctx.Err() != nil {
			return
		}
	}
}

// watch ends the sampler when the queue is closed: then its subscription ends. It subscribes to
// rare events of a queue that does not exist.
func (s *sampler) watch() {
	for s.ctx.Err() == nil {
		sub, err := s.q.Subscribe(codeq.SubscribeOptions{
			Queues: []string{"codeqweb: the end of the queue"}, Kinds: []codeq.EventKind{codeq.EventCanceled}, Buffer: 1,
		})
		for err == nil {
			_, err = sub.Next(s.ctx)
		}
		sub.Close()
		if errors.Is(err, codeq.ErrClosed) {
			s.end()
			return
		}
		select { // a queue of OpenLocal waits for the next process
		case <-time.After(time.Second):
		case <-s.ctx.Done():
		}
	}
}

func untilMinute(now time.Time) time.Duration {
	return now.Truncate(time.Minute).Add(time.Minute).Sub(now)
}

func (s *sampler) current() *sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// fresh returns a sample that is no older than age. It takes a new one if needed.
func (s *sampler) fresh(ctx context.Context, age time.Duration) (*sample, error) {
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	last := s.current()
	if stale := s.stale.Swap(false); !stale && last.Err == nil && time.Since(last.At) < age {
		return last, nil
	}
	ctx, cancel := context.WithTimeout(ctx, sampleTime)
	defer cancel()
	infos, err := s.q.Info(ctx)
	if err != nil {
		failed := *last
		failed.Err = err
		s.mu.Lock()
		s.last = &failed
		s.mu.Unlock()
		return &failed, err
	}
	next := newSample(infos, last, time.Now())
	s.askSlow(ctx, next, last)
	next.judge()
	s.keep(next, last)
	return next, nil
}

// askSlow samples workers and storage, every slowEvery: workers cost a message to the other nodes.
func (s *sampler) askSlow(ctx context.Context, next, last *sample) {
	next.Workers, next.Storage, next.knowsWorkers, next.slowAt = last.Workers, last.Storage, last.knowsWorkers, last.slowAt
	if next.At.Sub(last.slowAt) < slowEvery {
		return
	}
	next.slowAt = next.At
	if storage, err := s.q.StorageStats(); err == nil {
		next.Storage = storage
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if workers, err := s.q.Workers(ctx); err == nil {
		next.Workers, next.knowsWorkers = workers, true
	}
}

// judge notes the faults of each queue.
func (s *sample) judge() {
	worked, all := workedOn(s.Workers)
	all = all || !s.knowsWorkers
	for i := range s.Rows {
		r := &s.Rows[i]
		r.Trouble = troubleOf(r, s.At, all || worked[r.Name])
	}
}

// newSample converts the infos of the queue.
func newSample(infos []codeq.QueueInfo, last *sample, now time.Time) *sample {
	n := &sample{At: now, Queues: len(infos), Rows: make([]row, 0, min(len(infos), maxRows))}
	took, names := now.Sub(last.At).Seconds(), 0
	before := last.Rows // both are sorted by name
	var happened totals
	for i := range infos {
		info := &infos[i]
		r := row{Name: info.Queue, Counts: info.Counts, Oldest: info.OldestReady, Paused: info.Settings.Paused, Held: info.Held, totals: totalsOf(&info.Totals)}
		r.limits = limits{info.Settings.Concurrency, info.Settings.ConcurrencyPerKey, info.Settings.Rate}
		for len(before) > 0 && before[0].Name < r.Name {
			before = before[1:]
		}
		// The totals of a queue in its first sample may be old: they do not count.
		if len(before) > 0 && before[0].Name == r.Name {
			d := r.totals.since(before[0].totals)
			happened.add(d)
			r.setRates(d, took, &before[0])
			r.normal = before[0].normal.after(&r, now, took)
		}
		n.addToAll(&r)
		if names += len(r.Name); len(n.Rows) < maxRows && names <= maxNames {
			n.Rows = append(n.Rows, r)
		}
	}
	n.All.setRates(happened, took, &last.All)
	n.All.totals = last.All.totals // sums of the differences between samples
	n.All.totals.add(happened)
	return n
}

// setRates sets the rates. An interval of less than half a second keeps those of before.
func (r *row) setRates(d totals, seconds float64, before *row) {
	if seconds < 0.5 {
		r.Produced, r.Completed, r.Failed = before.Produced, before.Completed, before.Failed
		return
	}
	r.Produced, r.Completed, r.Failed = float64(d.produced)/seconds, float64(d.completed)/seconds, float64(d.failed)/seconds
}

func (s *sample) addToAll(r *row) {
	s.All.Held += r.Held
	a, c := &s.All.Counts, &r.Counts
	a.Ready, a.Scheduled, a.Blocked, a.Leased = a.Ready+c.Ready, a.Scheduled+c.Scheduled, a.Blocked+c.Blocked, a.Leased+c.Leased
	a.Dead, a.Done, a.Canceled = a.Dead+c.Dead, a.Done+c.Done, a.Canceled+c.Canceled
	if !r.Oldest.IsZero() && (s.All.Oldest.IsZero() || r.Oldest.Before(s.All.Oldest)) {
		s.All.Oldest, s.All.Name = r.Oldest, r.Name
	}
}

// keep makes a sample the current one, and adds it to the series.
func (s *sampler) keep(next, last *sample) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = next
	begins := last.At.IsZero()
	s.all.add(&next.All, &last.All, next.At, last.At, begins)
	for i := range next.Rows {
		r := &next.Rows[i]
		of := s.queues[r.Name]
		if of == nil && len(s.queues) < seriesQueues && r.Counts.Total() > 0 {
			of = s.begin(r.Name, next.At)
		}
		if of == nil {
			continue
		}
		before := last.row(r.Name)
		if before == nil {
			of.add(r, r, next.At, last.At, true)
			continue
		}
		of.add(r, before, next.At, last.At, begins)
	}
}

// begin adds the series of a queue, and evicts the least recently used one if there are too many.
// REQUIRES: mu is held.
func (s *sampler) begin(name string, now time.Time) *series {
	if len(s.queues) >= seriesQueues {
		oldest := ""
		for other, of := range s.queues {
			if oldest == "" || of.used.Before(s.queues[oldest].used) {
				oldest = other
			}
		}
		delete(s.queues, oldest)
	}
	of := &series{used: now}
	s.queues[name] = of
	return of
}

// points returns the points of a queue, or of all queues for "", in a resolution, the oldest first.
// It begins the series of a queue that has none.
func (s *sampler) points(queue string, in resolution) []point {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := &s.all
	if queue != "" {
		if of = s.queues[queue]; of == nil {
			r := s.last.row(queue)
			if r == nil {
				return nil
			}
			of = s.begin(queue, time.Now())
			of.start(r.totals)
		}
		of.used = time.Now()
	}
	return of.rings[in].all()
}

// backlogs returns the ready tasks of queues over the last hour, of those that have a series.
func (s *sampler) backlogs(names []string) map[string][]point {
	s.mu.Lock()
	defer s.mu.Unlock()
	of := make(map[string][]point, len(names))
	for _, name := range names {
		if series := s.queues[name]; series != nil {
			points := series.rings[byMinute].all()
			of[name] = points[max(0, len(points)-60):]
		}
	}
	return of
}
