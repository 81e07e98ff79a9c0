package workload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq"
)

// Feature is a property of all tasks of a load.
type Feature struct {
	Name   string
	task   func(i, at int) codeq.Task // the i-th task, at an index of its batch; nil: plain
	handle func(first bool) error     // returns the handler's error; nil: no error
	fails  bool                       // for good, in the first run
	due    time.Duration              // delay from Produce to due
	// behind: the second part of each task comes behind all ready tasks, so that working off the
	// first ones does only a part of the work.
	behind bool
}

var errFeature = errors.New("try again")

// once returns err in the first run of a task.
func once(err error) func(first bool) error {
	return func(first bool) error {
		if first {
			return err
		}
		return nil
	}
}

var features = []Feature{
	{Name: "plain"},
	{Name: "kept", task: func(int, int) codeq.Task { return codeq.Task{Retention: 24 * time.Hour} }},
	{Name: "retried", handle: once(codeq.RetryAfter(0, errFeature)), behind: true},
	{Name: "dead", handle: once(codeq.DeadLetter(errFeature)), fails: true},
	{Name: "snoozed", handle: once(codeq.Snooze(0)), behind: true},
	{Name: "groups=1000", task: func(i, _ int) codeq.Task { return codeq.Task{Group: strconv.Itoa(i % 1000)} }},
	{Name: "groups=100000", task: func(i, _ int) codeq.Task { return codeq.Task{Group: strconv.Itoa(i % 100_000)} }},
	{Name: "key", task: func(i, _ int) codeq.Task { return codeq.Task{Unique: codeq.Unique{Key: strconv.Itoa(i)}} }},
	{Name: "key-1h", task: func(i, _ int) codeq.Task {
		return codeq.Task{Unique: codeq.Unique{Key: strconv.Itoa(i), For: time.Hour}}
	}},
	{Name: "children", behind: true, task: func(_, at int) codeq.Task {
		if at%10 == 0 {
			return codeq.Task{}
		}
		return codeq.Task{After: []codeq.ID{codeq.Nth(at - at%10)}}
	}},
	{Name: "due", due: time.Second, behind: true},
	{Name: "timeout", task: func(int, int) codeq.Task { return codeq.Task{Timeout: time.Minute} }},
	{Name: "headers", task: func(int, int) codeq.Task {
		return codeq.Task{Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "kind": "bench"}}
	}},
	{Name: "attempts", task: func(int, int) codeq.Task { return codeq.Task{MaxAttempts: 3} }},
}

// Features returns all features, the plain task first.
func Features() []Feature { return features }

// FeatureNamed returns a feature. REQUIRES: its name is in Features.
func FeatureNamed(name string) Feature {
	for _, f := range features {
		if f.Name == name {
			return f
		}
	}
	panic("no feature " + name)
}

const (
	featureProducers = 4
	featureBatch     = 1000
	workedAtMost     = 2_000_000
)

// FeatureLoad is a load of tasks with one feature: produced in batches of 1,000 by four callers,
// and worked off by Run. Callers and workers are spread over the queues.
type FeatureLoad struct {
	Feature Feature
	Queues  []*codeq.Queue // the nodes of a cluster, or one queue
	First   int            // number of the first task, so that keys differ
	Tasks   int
	Workers int  // of all Run
	Whole   bool // all tasks are worked off, without a maximum
}

// Worked returns the number of tasks that Work waits for: at most 2,000,000, but all tasks if the
// load is whole or its feature is behind.
func (l FeatureLoad) Worked() int {
	if l.Whole || l.Feature.behind {
		return l.Tasks
	}
	return min(l.Tasks, workedAtMost)
}

// FeatureResult has the numbers of tasks and the durations of a load.
type FeatureResult struct {
	Produced, Ended int
	Producing       time.Duration
	Working         time.Duration // includes producing, if concurrent
}

// ProducedRate returns produced tasks a second.
func (r FeatureResult) ProducedRate() float64 { return float64(r.Produced) / r.Producing.Seconds() }

// EndedRate returns ended tasks a second.
func (r FeatureResult) EndedRate() float64 { return float64(r.Ended) / r.Working.Seconds() }

// Add adds another round.
func (r *FeatureResult) Add(o FeatureResult) {
	r.Produced, r.Producing = r.Produced+o.Produced, r.Producing+o.Producing
	r.Ended, r.Working = r.Ended+o.Ended, r.Working+o.Working
}

// Run produces the tasks and works them off: stocked ones when all are produced and due, others
// meanwhile. If before is not nil, it is called before the first task is worked on.
func (l FeatureLoad) Run(ctx context.Context, stocked bool, before func() error) (r FeatureResult, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	produce := func() error {
		start := time.Now()
		err := l.Produce(ctx)
		r.Produced, r.Producing = l.Tasks, time.Since(start)
		return err
	}
	if stocked {
		if err := produce(); err != nil {
			return r, err
		}
		select {
		case <-time.After(l.Feature.due):
		case <-ctx.Done():
			return r, context.Cause(ctx)
		}
	}
	if before != nil {
		if err := before(); err != nil {
			return r, err
		}
	}
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		r.Ended, err = l.Work(ctx)
		r.Working = time.Since(start)
		return err
	})
	if !stocked {
		g.Go(produce)
	}
	return r, g.Wait()
}

// Produce stores the tasks.
func (l FeatureLoad) Produce(ctx context.Context) error {
	return Fill(ctx, l.Queues, featureProducers, l.Tasks, featureBatch, func(i int) (t codeq.Task) {
		if l.Feature.task != nil {
			t = l.Feature.task(l.First+i, i%featureBatch)
		}
		t.Queue, t.Payload = QueueName, binary.BigEndian.AppendUint64(nil, uint64(i))
		if l.Feature.due > 0 {
			t.RunAt = time.Now().Add(l.Feature.due)
		}
		return t
	})
}

// Work runs tasks until Worked tasks have ended, and returns the number of ended ones: some more
// may be under way.
func (l FeatureLoad) Work(ctx context.Context) (int, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var seen []atomic.Uint32 // a bit for each task after its first run
	if l.Feature.handle != nil {
		seen = make([]atomic.Uint32, (l.Tasks+31)/32)
	}
	var ended atomic.Int64
	worked := int64(l.Worked())
	m := new(codeq.Mux)
	codeq.Handle(m, QueueName, func(_ context.Context, j *codeq.Job[[]byte]) error {
		var err error
		if seen != nil {
			i := binary.BigEndian.Uint64(j.Payload)
			bit := uint32(1) << (i % 32)
			err = l.Feature.handle(seen[i/32].Or(bit)&bit == 0)
		}
		if (err == nil || l.Feature.fails) && ended.Add(1) == worked {
			cancel(errStopped)
		}
		return err
	})
	var runs sync.WaitGroup
	for n, q := range l.Queues {
		workers := l.Workers / len(l.Queues)
		if n < l.Workers%len(l.Queues) {
			workers++
		}
		runs.Go(func() {
			err := q.Run(ctx, m, &codeq.RunOptions{Concurrency: workers, OnError: func(_ *codeq.Lease, err error) {
				if !errors.Is(err, errFeature) {
					cancel(err)
				}
			}})
			if err != nil {
				cancel(err)
			}
		})
	}
	runs.Wait()
	if err := context.Cause(ctx); !errors.Is(err, errStopped) {
		return 0, fmt.Errorf("%s: after %d tasks: %w", l.Feature.Name, ended.Load(), err)
	}
	return int(ended.Load()), nil
}
