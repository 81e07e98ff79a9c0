package codeq

import (
	"context"
	"sync"
	"time"
)

// heart keeps the leases of the running handlers of a Run alive. It beats
// three times in the length of a lease, and rests while no handler runs.
type heart struct {
	runner *runner
	woken  chan struct{} // capacity 1: handlers are about to run
	quit   chan struct{}
	once   sync.Once
}

func newHeart(r *runner) *heart {
	return &heart{runner: r, woken: make(chan struct{}, 1), quit: make(chan struct{})}
}

// kick ends the rest.
func (h *heart) kick() {
	select {
	case h.woken <- struct{}{}:
	default:
	}
}

func (h *heart) stop() { h.once.Do(func() { close(h.quit) }) }

func (h *heart) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-h.woken:
		case <-h.quit:
			return
		}
		for running := true; running; {
			timer.Reset(h.runner.opts.LeaseFor / 3)
			select {
			case <-timer.C:
			case <-h.quit:
				return
			}
			running = h.beat()
		}
	}
}

// beat renews the leases of all running handlers, and cancels those whose
// lease is lost.
func (h *heart) beat() (running bool) {
	r := h.runner
	byShard := make(map[*shard]*renewOp)
	for _, w := range r.workers {
		w.mu.Lock()
		if w.lease != nil {
			s := r.queue.shardOf(w.lease.ID)
			op := byShard[s]
			if op == nil {
				op = &renewOp{completion: newCompletion(), duration: millis(r.opts.LeaseFor)}
				byShard[s] = op
			}
			op.receipts = append(op.receipts, w.lease.Receipt)
			running = true
		}
		w.mu.Unlock()
	}
	lost := make(map[Receipt]error)
	for s, op := range byShard {
		if _, err := s.do(context.Background(), op, &op.completion); err != nil {
			for _, receipt := range op.receipts {
				lost[receipt] = err
			}
		}
		for _, receipt := range op.lost {
			lost[receipt] = leaseLost(receipt)
		}
	}
	for _, w := range r.workers {
		w.forfeit(lost)
	}
	return running
}

// forfeit cancels the running handler if its lease is among the lost.
func (w *worker) forfeit(lost map[Receipt]error) {
	w.mu.Lock()
	l, cancel := w.lease, w.cancel
	if l == nil || lost[l.Receipt] == nil {
		w.mu.Unlock()
		return
	}
	w.lease = nil
	w.mu.Unlock()
	cancel(lost[l.Receipt])
	w.runner.report(l, lost[l.Receipt])
}

// renewOp moves the deadlines of leases that belong to this process. Nothing
// is written.
type renewOp struct {
	completion
	receipts []Receipt
	duration uint64    // ms
	lost     []Receipt // those not in force
}

func (op *renewOp) resolve(s *shard) {
	s.settle(op)
	for _, receipt := range op.receipts {
		if ls := s.held(receipt); ls != nil {
			s.renew(ls, op.duration)
		} else {
			op.lost = append(op.lost, receipt)
		}
	}
}
