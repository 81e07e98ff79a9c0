package peers

import (
	"context"
	"errors"
	"sync"

	"github.com/joncrlsn/dque"

	"codeq/bench/workload"
)

// referenceSubjects returns queues without leases: a worker that dies loses its task.
//
// dque in turbo mode (without fsync), 10,000 items a segment. Two goroutines dequeue, since each
// item wakes all waiting ones.
//
// Pebble does the four key writes of a cycle of codeq, in its best order, 64 cycles a commit, by
// one goroutine.
func referenceSubjects() []subject {
	return []subject{
		{
			Name: "dque/turbo/single", Queue: "dque", Driven: "Enqueue, DequeueBlock",
			Keeps: "crash: what was taken and not done; power: any", Class: process, Batch: 1, open: openDque,
		},
		{
			Name: "pebble/none/batch", Queue: "raw Pebble", Driven: "four key writes a cycle, 64 cycles a commit",
			Keeps: "crash: the last writes; power: the same and more", Class: none, Batch: batchSize, Load: workload.Load{Producers: 1},
			open: func(_ context.Context, dir string, l workload.Load) (*peer, error) {
				r, err := workload.OpenRawPebble(dir, l.Producers, l.Workers)
				if err != nil {
					return nil, err
				}
				return &peer{driver: r, version: moduleVersion("github.com/cockroachdb/pebble/v2"), closers: []func() error{r.Close}}, nil
			},
		},
	}
}

func openDque(_ context.Context, dir string, _ workload.Load) (*peer, error) {
	q, err := dque.New("queue", dir, 10_000, func() any { return new(dqueItem) })
	if err != nil {
		return nil, err
	}
	p := &peer{driver: dqueDriver{q}, version: moduleVersion("github.com/joncrlsn/dque")}
	p.onClose(func() error {
		if err := q.Close(); !errors.Is(err, dque.ErrQueueClosed) {
			return err
		}
		return nil
	})
	if err := q.TurboOn(); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

type dqueItem struct{ Payload []byte }

type dqueDriver struct{ q *dque.DQue }

func (d dqueDriver) Produce(_ context.Context, _, _ int, payloads [][]byte) error {
	return d.q.Enqueue(&dqueItem{payloads[0]})
}

func (d dqueDriver) Work(ctx context.Context, _ int, done func(payload []byte)) error {
	var wg sync.WaitGroup
	var errs [2]error
	for i := range errs {
		wg.Go(func() {
			for {
				item, err := d.q.DequeueBlock()
				if err != nil {
					errs[i] = err
					return
				}
				done(item.(*dqueItem).Payload)
			}
		})
	}
	// Only ctx ends the queue. The error of a goroutine is returned when the load ends.
	<-ctx.Done()
	err := d.q.Close()
	wg.Wait()
	for _, e := range errs {
		if !errors.Is(e, dque.ErrQueueClosed) {
			err = errors.Join(err, e)
		}
	}
	return err
}
