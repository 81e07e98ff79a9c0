package codeq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Do runs the handler of one task, or of a batch, and stores the outcome.
func (r *runner) Do(w *worker, g engine.Grant) {
	if b := r.batches.take(g.Receipt); b != nil {
		r.doBatch(w, b)
		return
	}
	f := &taskContext{runner: r}
	l := &f.lease
	if err := f.decode(&g); err != nil {
		r.report(&Lease{ID: g.Receipt.ID, Receipt: receiptOf(g.Receipt)}, base.Prefixed(err))
		return
	}
	f.Begin(l.Timeout)
	if !w.Own(f) {
		r.giveBack(l.Receipt, call.Fail{How: engine.FailReturn}, f)
		return
	}
	if r.canceledReceipts.Has(g.Receipt) { // after own, since cancel adds the receipt before it looks at the workers
		r.cancelIfLost(w, map[engine.Receipt]error{g.Receipt: errCanceled(l.Receipt)})
		_, _ = w.Disown()
		r.returned(l)
		return
	}
	if l.Timeout > 0 {
		f.Watch(&r.reports, r.queue.opts.log, func() {
			if t, ours := w.Task(); ours && t == atWork(f) {
				r.countOverdue(w, f, f)
			}
		})
	}
	var begun time.Time // zero without an observer
	if r.queue.opts.teller != nil {
		begun = time.Now()
	}
	returned := false
	defer func() {
		if !returned { // runtime.Goexit: this goroutine ends, another takes over
			r.storeOutcome(w, f, g.Wait, begun, f.verdict(failureOf(errGoexit)))
			w.Restart()
		}
	}()
	failed := r.call(f)
	returned = true
	r.storeOutcome(w, f, g.Wait, begun, failed)
}

var errGoexit = errors.New("codeq: the handler ended its goroutine")

// storeOutcome stores the outcome of a task after its handler has ended; failed is nil if it
// succeeded. waited is how long the task was ready before its claim, in milliseconds.
func (r *runner) storeOutcome(w *worker, f *taskContext, waited uint32, begun time.Time, failed *failure) {
	var took time.Duration
	if !begun.IsZero() {
		took = time.Since(begun)
	}
	f.End(nil)
	ours, lost := w.Disown() // or the task was given back, or its lease was lost
	r.store(f, ours, lost, HandlerSample{Wait: time.Duration(waited) * time.Millisecond, Took: took}, failed)
}

// store stores the outcome of a task, and completes its sample. Its arguments are as in verdictOn.
func (r *runner) store(f *taskContext, ours bool, lost error, sample HandlerSample, failed *failure) {
	if ours && failed == nil {
		failed = r.complete(f)
	}
	if ours && failed != nil {
		r.fail(f, failed)
	}
	if !ours && (lost != nil || f.Mark(markEnded)) {
		r.returned(&f.lease)
	}
	if r.queue.opts.teller != nil && !(failed != nil && failed.op.How == engine.FailUnhandled) {
		sample.Queue, sample.Tenant, sample.Attempt = f.lease.Queue, f.lease.Tenant, f.lease.Attempt
		sample.Verdict = verdictOn(ours, lost, failed)
		o := r.queue.opts.teller.Begin()
		o.addHandler(sample)
		r.queue.opts.teller.End(o.isFull())
	}
}

// returned tells the shard, which has kept limits and turns, that a handler has outlived its lease.
func (r *runner) returned(l *Lease) {
	shard := r.queue.shardOf(l.ID)
	op := &failOp{completion: newCompletion(callFail), Fail: call.Fail{Receipt: l.Receipt.inner(), How: engine.FailReturn}}
	op.Gone = r.queue.closing // it waits for room on the disk
	if s := r.queue.shard(shard); s != nil {
		_ = s.inbox.Pass(op) // an owner that has ended keeps nothing for it
	} else if n := r.queue.node; n != nil {
		go contain(n.log, "end of a handler", func() { _, _ = n.do(n.ctx, shard, op) }, nil)
	}
}

// call runs the handler, and the methods of its error. A panic is an error.
func (r *runner) call(f *taskContext) (failed *failure) {
	if err := r.handle(f); err != nil {
		failed = failureOf(err)
	}
	return f.verdict(failed)
}

func (r *runner) handle(f *taskContext) (err error) {
	defer recovered(&err)
	l := &f.lease
	if l.Kind == "" {
		return r.handlers[l.Queue](f, l, f)
	}
	if h := r.kinds[taskKind{l.Queue, l.Kind}]; h != nil {
		return h(f, l, f)
	}
	return r.unhandled(l)
}

// fail gives a failed attempt to the shard, as complete does.
func (r *runner) fail(f *taskContext, failed *failure) {
	l, op := &f.lease, &failed.op
	f.storeCursors()
	op.Notes = f.lastNotes()
	if op.How != engine.FailRelease && op.How != engine.FailSuspend && op.How != engine.FailUnhandled {
		r.report(l, failed.err)
	}
	op.Policy = r.policyOf(l)
	op.completion, op.Receipt, op.Gone = newCompletion(callFail), l.Receipt.inner(), r.storing.Done()
	r.end(op, l)
}

// complete gives the completion to the shard, without a wait, or returns why it cannot be stored.
func (r *runner) complete(f *taskContext) *failure {
	l := &f.lease
	op := r.queue.completeOp(l.Receipt)
	op.Notes = f.lastNotes()
	if out := f.given(); out != nil {
		failed := out.fill(op)
		if failed == nil {
			err := neverStored(call.CheckRoute(op.Next, r.queue.shardOf(l.ID), len(r.queue.replicas), r.queue.opts.Limits.ofCommit()))
			if err == nil {
				err = r.queue.checkParents(r.storeContext(), "Complete", op.Next)
				public(&err)
			}
			if err != nil {
				failed = failureOf(err)
			}
		}
		if failed != nil {
			r.queue.recycleComplete(op)
			return failed
		}
	}
	op.Retention, op.Gone = r.policyOf(l).Kept(), r.storing.Done()
	r.end(op, l)
	return nil
}

// policyOf returns the policy of a task's handler; nil: it has none, or a node knows none.
func (r *runner) policyOf(l *Lease) *record.Policy {
	q := r.queue
	if len(r.policies) == 0 || q.needsFormat(q.shardOf(l.ID), "policies", keys.FormatOfSteps) != nil {
		return nil
	}
	return r.policies[taskKind{l.Queue, l.Kind}]
}

// end gives the operation that ends a lease to its shard, and does not wait for it.
func (r *runner) end(op leaseEnd, l *Lease) {
	*op.of() = ofRunner{r, l}
	r.pool.Outcomes.Add(1)
	s := r.queue.shard(r.queue.shardOf(l.ID))
	if s == nil {
		r.forwards <- struct{}{}
		go func() {
			defer func() { <-r.forwards }()
			r.forward(op, l)
		}()
		return
	}
	if err := s.inbox.Push(context.Background(), op, nil); err != nil {
		op.settle(err)
	}
}

// forward sends an operation to the node that leads its shard, and waits for it.
func (r *runner) forward(op leaseEnd, l *Lease) {
	defer r.pool.Outcomes.Done()
	err := guarded(r.queue.opts.log, "end of a lease elsewhere", func() error {
		op.of().runner = nil // a caller waits: this goroutine
		tryAgain(op)
		settled, err := r.queue.do(r.storeContext(), r.queue.shardOf(l.ID), op)
		if settled {
			op.recycle(r.queue)
		}
		public(&err)
		return err
	})
	if err != nil {
		r.report(l, err)
	}
}

// settled takes the outcome of op from the shard's owner, which must not wait for a hook.
func (r *runner) settled(op leaseEnd, err error) {
	l := op.of().lease
	if errors.Is(err, ErrNotLeader) { // this node has led the shard until now
		go r.forward(op, l)
		return
	}
	op.recycle(r.queue)
	if err == nil {
		r.pool.Outcomes.Done()
		return
	}
	refusal := err // a copy, because public would move err to the heap for every outcome
	public(&refusal)
	go func() {
		defer r.pool.Outcomes.Done()
		contain(r.queue.opts.log, "report of an outcome", func() { r.report(l, refusal) }, nil)
	}()
}

// storeContext ends when the runner waits no longer for an operation that waits on another node.
func (r *runner) storeContext() context.Context {
	if r.queue.node == nil || r.storing.Err() != nil {
		return context.Background()
	}
	return r.storing
}

// report calls OnError on a new goroutine, which may end or panic there, and waits for it.
func (r *runner) report(l *Lease, err error) {
	if r.opts.OnError == nil {
		return
	}
	done := make(chan struct{})
	go guard.RunUser("OnError", func() {
		defer close(done)
		r.opts.OnError(l, err)
	}, func(value any, stack []byte) {
		r.queue.opts.log.Error("OnError has panicked", "value", fmt.Sprint(value), "stack", string(stack))
	})
	<-done
}
