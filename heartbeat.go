package codeq

import (
	"context"
	"fmt"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/record"
	"codeq/internal/workerpool"
)

// leaseRenewer renews the leases of a Run's running handlers whose tasks lie in one shard, so that
// a shard that stalls delays the renewals of no other. It renews three times in the length of a
// lease, and sleeps while no handler runs.
type leaseRenewer struct {
	*workerpool.Heartbeat // woken when handlers are about to run
	runner                *runner
	shard                 int
	renewedAt             time.Time // when the shard last renewed leases
}

func (h *leaseRenewer) run() {
	h.Run(h.runner.opts.LeaseFor/3, func() { h.renewedAt = h.runner.queue.opts.private.Mono() }, h.renew)
}

// renew renews the leases of the running handlers, and cancels those whose lease is lost.
func (h *leaseRenewer) renew() (running bool) {
	r := h.runner
	b := &call.Renew{Duration: record.Millis(r.opts.LeaseFor)}
	for _, w := range r.pool.Workers() {
		if f, ok := w.Task(); ok && r.queue.shardOf(f.lease.ID) == h.shard {
			b.Receipts = append(b.Receipts, f.lease.Receipt.inner())
		}
	}
	if len(b.Receipts) == 0 {
		return false
	}
	lost := make(map[engine.Receipt]error)
	now := r.queue.opts.private.Mono
	asked := now()
	_, err := r.queue.do(context.Background(), h.shard, rule(callRenew, b))
	switch {
	case err == nil:
		h.renewedAt = asked
	case r.queue.node != nil && now().Sub(h.renewedAt) < r.opts.LeaseFor: // there is no new leader yet
		return true
	default:
		for _, receipt := range b.Receipts {
			lost[receipt] = err
		}
	}
	for i, receipt := range b.Lost {
		lost[receipt] = b.Errs[i]
	}
	for _, w := range r.pool.Workers() {
		r.cancelIfLost(w, lost)
	}
	return true
}

// Cancel cancels the handler of a task that was canceled. The shard's owner calls it, and so it
// does not wait for hooks.
func (r *runner) Cancel(lease engine.Receipt) {
	r.queue.notices.Go(func() {
		contain(r.queue.opts.log, "cancel of a handler", func() {
			r.canceledReceipts.Add(lease)
			lost := map[engine.Receipt]error{lease: errCanceled(receiptOf(lease))}
			for _, w := range r.pool.Workers() {
				if r.cancelIfLost(w, lost) {
					return
				}
			}
		}, nil) // if it panics, the next renewal of the lease cancels the handler
	})
}

func errCanceled(r Receipt) error { return fmt.Errorf("%w: %s", ErrCanceled, r.ID) }

// cancelIfLost cancels the running handler of a worker if its lease is among the lost.
func (r *runner) cancelIfLost(w *worker, lost map[engine.Receipt]error) bool {
	f, cause := w.TakeAway(func(f *taskContext) error { return lost[f.lease.Receipt.inner()] })
	if cause == nil {
		return false
	}
	f.End(cause)
	r.report(&f.lease, cause)
	return true
}
