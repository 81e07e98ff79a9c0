package codeqprom

import (
	"context"
	"errors"
	"sync"
	"time"

	"codeq"
)

// The parts of a scrape, asked concurrently.
const (
	partProcess = iota
	partStorage
	partCluster
	endOfParts
)

var partNames = [endOfParts]string{"process", "storage", "cluster"}

// scrape has the answers of a queue; nil: none.
type scrape struct {
	process *codeq.ProcessInfo
	storage *codeq.StorageStats
	cluster *codeq.ClusterStatus
	errs    [endOfParts]error
}

// probes ask a queue.
type probes struct {
	process probe[*codeq.ProcessInfo]
	storage probe[*codeq.StorageStats]
	cluster probe[*codeq.ClusterStatus]
}

// ask returns the answers within the timeout. Its context ends earlier, so that calls can still
// return partial answers. A closed queue, or one without a cluster, gives no answer and no error.
func (p *probes) ask(q *codeq.Queue, timeout time.Duration) (got scrape) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() {
		got.process, got.errs[partProcess] = p.process.get(ctx, q, timeout*4/5, (*codeq.Queue).ProcessInfo)
	})
	all.Go(func() {
		got.storage, got.errs[partStorage] = p.storage.get(ctx, q, timeout*4/5, func(q *codeq.Queue, _ context.Context) (*codeq.StorageStats, error) {
			return q.StorageStats()
		})
	})
	all.Go(func() {
		got.cluster, got.errs[partCluster] = p.cluster.get(ctx, q, timeout*4/5, (*codeq.Queue).ClusterStatus)
	})
	all.Wait()
	for part, err := range got.errs {
		if errors.Is(err, codeq.ErrClosed) || errors.Is(err, codeq.ErrNoCluster) {
			got.errs[part] = nil
		}
	}
	return got
}

// probe makes one call at a time: concurrent scrapes share its answer. So a call that never returns
// holds one goroutine, however often the queue is scraped.
type probe[T any] struct {
	mu     sync.Mutex
	asking *asking[T] // nil: none
}

type asking[T any] struct {
	queue  *codeq.Queue
	done   chan struct{} // closed when the following is valid
	answer T
	err    error
}

func (p *probe[T]) get(ctx context.Context, q *codeq.Queue, timeout time.Duration, ask func(*codeq.Queue, context.Context) (T, error)) (none T, _ error) {
	p.mu.Lock()
	a := p.asking
	if a == nil || a.queue != q {
		a = &asking[T]{queue: q, done: make(chan struct{})}
		p.asking = a
		go p.run(a, timeout, ask)
	}
	p.mu.Unlock()
	select {
	case <-a.done:
		return a.answer, a.err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

func (p *probe[T]) run(a *asking[T], timeout time.Duration, ask func(*codeq.Queue, context.Context) (T, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	answer, err := ask(a.queue, ctx)
	if err == nil {
		a.answer = answer
	}
	a.err = err
	p.mu.Lock()
	if p.asking == a {
		p.asking = nil
	}
	p.mu.Unlock()
	close(a.done)
}
