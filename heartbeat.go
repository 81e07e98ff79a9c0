package codeq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/engine"
	"codeq/internal/recent"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// leaseRenewer renews the leases of a Run's running handlers whose tasks lie in one shard, so that
// a shard that stalls delays the renewals of no other. It renews three times in the length of a
// lease, and sleeps while no handler runs.
type leaseRenewer struct {
	runner    *runner
	shard     int
	woken     chan struct{} // capacity 1: handlers are about to run
	quit      chan struct{}
	renewedAt time.Time // when the shard last renewed leases
	once      sync.Once
}

func newLeaseRenewer(r *runner, shard int) *leaseRenewer {
	return &leaseRenewer{runner: r, shard: shard, woken: make(chan struct{}, 1), quit: make(chan struct{})}
}

// wake ends the sleep.
func (h *leaseRenewer) wake() {
	select {
	case h.woken <- struct{}{}:
	default:
	}
}

func (h *leaseRenewer) stop() { h.once.Do(func() { close(h.quit) }) }

func (h *leaseRenewer) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-h.woken:
		case <-h.quit:
			return
		}
		h.renewedAt = time.Now()
		for running := true; running; {
			timer.Reset(h.runner.opts.LeaseFor / 3)
			select {
			case <-timer.C:
			case <-h.quit:
				return
			}
			running = h.renew()
		}
	}
}

// renew renews the leases of the running handlers, and cancels those whose lease is lost.
func (h *leaseRenewer) renew() (running bool) {
	r := h.runner
	op := &renewOp{completion: newCompletion(), duration: record.Millis(r.opts.LeaseFor)}
	for _, w := range r.pool.Workers() {
		if f, ok := w.Task(); ok && r.queue.shardOf(f.lease.ID) == h.shard {
			op.receipts = append(op.receipts, f.lease.Receipt)
		}
	}
	if len(op.receipts) == 0 {
		return false
	}
	lost := make(map[Receipt]error)
	asked := time.Now()
	_, err := r.queue.do(context.Background(), h.shard, op)
	switch {
	case err == nil:
		h.renewedAt = asked
	case r.queue.node != nil && time.Since(h.renewedAt) < r.opts.LeaseFor: // there is no new leader yet
		return true
	default:
		for _, receipt := range op.receipts {
			lost[receipt] = err
		}
	}
	for i, receipt := range op.lost {
		lost[receipt] = op.errs[i]
	}
	for _, w := range r.pool.Workers() {
		r.cancelIfLost(w, lost)
	}
	return true
}

// cancel cancels the handler of a task that was canceled. The shard's owner calls it, and so it
// does not wait for hooks.
func (r *runner) cancel(receipt Receipt) {
	r.queue.notices.Go(func() {
		contain(r.queue.opts.log, "cancel of a handler", func() {
			r.canceledReceipts.add(receipt)
			lost := map[Receipt]error{receipt: errCanceled(receipt)}
			for _, w := range r.pool.Workers() {
				if r.cancelIfLost(w, lost) {
					return
				}
			}
		}, nil) // if it panics, the next renewal of the lease cancels the handler
	})
}

// canceledList holds receipts of canceled tasks whose handlers must not begin.
type canceledList struct {
	some   atomic.Bool
	mu     sync.Mutex // guards leases
	leases recent.Set[Receipt]
}

func (v *canceledList) add(r Receipt) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.leases.Add(r)
	v.some.Store(true)
}

func (v *canceledList) has(r Receipt) bool {
	if !v.some.Load() {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.leases.Has(r)
}

func errCanceled(r Receipt) error { return fmt.Errorf("%w: %s", ErrCanceled, r.ID) }

// cancelIfLost cancels the running handler of a worker if its lease is among the lost.
func (r *runner) cancelIfLost(w *worker, lost map[Receipt]error) bool {
	f, ok := w.TakeAway(func(f *taskContext) bool { return lost[f.lease.Receipt] != nil })
	if !ok {
		return false
	}
	cause := lost[f.lease.Receipt]
	f.End(cause)
	r.report(&f.lease, cause)
	return true
}

// renewOp extends leases that belong to this process. Without a cluster nothing is written.
type renewOp struct {
	completion
	receipts []Receipt
	duration uint64    // ms
	lost     []Receipt // those not in force
	errs     []error   // why
}

func (op *renewOp) resolve(s *shard) {
	s.settle(op)
	for _, receipt := range op.receipts {
		if err := s.Extend(receipt.inner(), op.duration); err != nil {
			op.lost = append(op.lost, receipt)
			op.errs = append(op.errs, err)
		}
	}
}

func (op *renewOp) encode(dst []byte) (callKind, []byte) {
	return callRenew, appendReceipts(wire.AppendUint(dst, op.duration), op.receipts)
}

func (op *renewOp) decode(r *wire.Reader) { op.duration, op.receipts = r.Uint(), readReceipts(r) }

func (op *renewOp) encodeReply(dst []byte) []byte {
	dst = appendReceipts(dst, op.lost)
	for _, err := range op.errs {
		dst = wire.AppendBool(dst, errors.Is(err, ErrCanceled))
	}
	return dst
}

func (op *renewOp) decodeReply(r *wire.Reader) {
	op.lost = readReceipts(r)
	for _, receipt := range op.lost {
		op.errs = append(op.errs, engine.LeaseLost(receipt.inner(), r.Bool()))
	}
}

func (op *renewOp) again() { op.lost, op.errs, op.err = nil, nil, nil }
