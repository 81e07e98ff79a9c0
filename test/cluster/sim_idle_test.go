package cluster_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"codeq"
	"codeq/internal/simtest"
)

// WaitIdle returns only if its queues were idle at some moment of the call.

// idle checks that a queue with a task is not idle.
func (p *simProbe) idle() {
	patience := p.upTo(time.Second)
	if ok, _ := p.do(simtest.Read, func(ctx context.Context, q *codeq.Queue) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return q.WaitIdle(ctx, p.queue)
	}); ok && p.state != 0 {
		p.fails("WaitIdle has returned")
	}
}

// chains runs chains of follow-ups from shard to shard, each in its own queue. The queue is not
// idle before the last task is completed. Other clients wait for that.
func (c *simClient) chains() {
	for n := 0; !c.ending(); n++ {
		time.Sleep(c.upTo(3 * time.Second))
		c.chain(fmt.Sprintf("chain %d-%d", c.number, n), 1+c.rng.IntN(10))
	}
}

func (c *simClient) chain(queue string, length int) {
	task := func() codeq.Task {
		return codeq.Task{Queue: queue, Group: fmt.Sprint(c.rng.IntN(8)), MaxAttempts: 1000}
	}
	call, ok := c.call(simtest.Produce, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
		_, err := q.Produce(ctx, task())
		return err
	})
	if !ok || call.Outcome != simtest.Done {
		return
	}
	var over atomic.Bool
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer over.Store(true)
	for range 2 {
		w := &simClient{schedule: c.schedule, number: c.number, home: c.rng.IntN(100), rng: rand.New(rand.NewPCG(c.rng.Uint64(), 0))}
		waiting.Go(func() { w.awaitEnd(queue, &over) })
	}
	for ; length > 0 && !c.ending(); length-- {
		var l *codeq.Lease
		call, ok := c.call(simtest.Claim, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) (err error) {
			l, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: simGroupLease})
			return err
		})
		if !ok || call.Outcome != simtest.Done {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		next := []codeq.Task{task()}
		if length == 1 {
			next = nil
			over.Store(true)
		}
		c.call(simtest.Complete, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error {
			return q.Complete(ctx, l.Receipt, nil, next...)
		})
	}
}

// awaitEnd calls WaitIdle again and again, and checks that the queue is not idle before over.
func (c *simClient) awaitEnd(queue string, over *atomic.Bool) {
	for !over.Load() {
		call, ok := c.call(simtest.Read, func(ctx context.Context, q *codeq.Queue, _ *simtest.Call) error { return q.WaitIdle(ctx, queue) })
		if ok && call.Outcome == simtest.Done && !over.Load() {
			c.h.Fail("WaitIdle of %s has returned amid the chain: %v", queue, call)
			return
		}
		time.Sleep(c.upTo(200 * time.Millisecond))
	}
}
