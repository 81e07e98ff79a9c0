package workload

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"codeq"
)

// QueueName is the queue of all tasks of the drivers of codeq.
const QueueName = "bench"

// Calls drives codeq by single calls of Produce, Claim and Complete, or by ProduceBatch if the load
// has batches; each waits for its own commit. The producers and workers are spread over the queues:
// the nodes of a cluster, or one queue.
type Calls struct {
	Queues []*codeq.Queue
	// Shape, if not nil, alters the n-th task of a producer of single calls.
	Shape func(producer, n int, t codeq.Task) codeq.Task
	// Retention applies to all tasks.
	Retention time.Duration
}

func (c Calls) Produce(ctx context.Context, producer, n int, payloads [][]byte) error {
	q := c.Queues[producer%len(c.Queues)]
	if len(payloads) > 1 {
		return produceBatch(ctx, q, payloads, c.Retention)
	}
	t := codeq.Task{Queue: QueueName, Payload: payloads[0], Retention: c.Retention}
	if c.Shape != nil {
		t = c.Shape(producer, n, t)
	}
	_, err := q.Produce(ctx, t)
	return err
}

func (c Calls) Work(ctx context.Context, workers int, done func(payload []byte)) error {
	g, ctx := errgroup.WithContext(ctx)
	for i := range workers {
		g.Go(func() error { return work(ctx, c.Queues[i%len(c.Queues)], done) })
	}
	return g.Wait()
}

func work(ctx context.Context, q *codeq.Queue, done func(payload []byte)) error {
	req := codeq.ClaimRequest{Queues: []string{QueueName}}
	for {
		lease, err := q.Claim(ctx, req)
		if err == nil {
			err = q.Complete(ctx, lease.Receipt, nil)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		done(lease.Payload)
	}
}

// Runner drives codeq by ProduceBatch, and by Run with an empty handler. The producers and workers
// are spread over the queues: the nodes of a cluster, or one queue.
type Runner struct {
	Queues    []*codeq.Queue
	Retention time.Duration // of all tasks
	Batch     int           // tasks of a call of the handler at the most; 0: it takes one
}

func (r Runner) Produce(ctx context.Context, producer, _ int, payloads [][]byte) error {
	return produceBatch(ctx, r.Queues[producer%len(r.Queues)], payloads, r.Retention)
}

func (r Runner) Work(ctx context.Context, workers int, done func(payload []byte)) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, q := range r.Queues {
		share := (workers + i) / len(r.Queues)
		g.Go(func() error { return r.run(ctx, q, share, done) })
	}
	return g.Wait()
}

func (r Runner) run(ctx context.Context, q *codeq.Queue, workers int, done func(payload []byte)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var m codeq.Mux
	if r.Batch > 0 {
		codeq.HandleBatch(&m, QueueName, codeq.BatchOptions{Max: r.Batch}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			for _, job := range jobs {
				done(job.Args)
			}
			return nil
		})
	} else {
		codeq.Handle(&m, QueueName, func(_ context.Context, job *codeq.Job[[]byte]) error {
			done(job.Args)
			return nil
		})
	}
	failed := make(chan error, 1)
	err := q.Run(ctx, &m, &codeq.RunOptions{
		Concurrency: workers,
		OnError: func(_ *codeq.Lease, err error) {
			select {
			case failed <- err:
			default:
			}
			cancel(err)
		},
	})
	select {
	case err := <-failed:
		return err
	default:
		return err
	}
}

// Pending counts, since Run does not report when a completion is committed.
func (r Runner) Pending(ctx context.Context) (int64, error) {
	stats, err := r.Queues[0].Stats(ctx)
	of := stats[QueueName]
	return int64(of.Total() - of.Done), err
}

var taskSlices = sync.Pool{New: func() any { return new([]codeq.Task) }}

func produceBatch(ctx context.Context, q *codeq.Queue, payloads [][]byte, retention time.Duration) error {
	tasks := taskSlices.Get().(*[]codeq.Task)
	defer taskSlices.Put(tasks)
	*tasks = (*tasks)[:0]
	for _, p := range payloads {
		*tasks = append(*tasks, codeq.Task{Queue: QueueName, Payload: p, Retention: retention})
	}
	_, err := q.ProduceBatch(ctx, *tasks)
	return err
}
