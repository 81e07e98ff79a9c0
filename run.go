package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/container/recent"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/record"
	"codeq/internal/workerpool"
)

// RunOptions are the options of [Queue.Run]. A zero field means its documented default.
type RunOptions struct {
	// Name is that of the worker, for people: [Queue.Workers] lists it, [Queue.QuietWorkers] finds
	// it, and [TaskInfo.History] has it. Several calls of [Queue.Run] may have the same. Up to 128
	// bytes. Default: the name of the host and the number of the process, such as "web-1:4711".
	Name string
	// Concurrency is how many handlers run at the same time, 1 to 1,000,000; a worker begins when
	// there is a task for it. Default: four times GOMAXPROCS.
	Concurrency int
	// Queues are the queues that [Queue.Run] claims from, in strict order unless Weights are given;
	// see [ClaimRequest]. Default: all queues of the [Mux], by Weights, or with equal weights.
	Queues  []string
	Weights map[string]int
	// LeaseFor is how long a lease lasts without a renewal. [Queue.Run] renews the lease of every
	// running handler, so only a process that stands still for so long loses its tasks. Default:
	// [Options.LeaseFor].
	LeaseFor time.Duration
	// Grace is how long handlers may go on when [Queue.Run] ends; then their context is cancelled
	// and their tasks are given back. On a full disk the outcomes of handlers wait for room as long
	// again. Default: 10 s; negative: no grace.
	Grace time.Duration
	// OnError is called for every failed attempt (a handler's error or a [*PanicError], but not
	// [Snooze]), for every outcome that could not be stored, such as [ErrLeaseLost], and once for a
	// handler that goes on after its [Task.Timeout] (the error matches [ErrHandlersRunning]).
	// Several goroutines call it at a time. If it panics, this is logged. The worker waits for it:
	// a call that blocks for ever blocks its worker for ever, and may keep [Queue.Run] and
	// [Queue.Close] from returning.
	OnError func(l *Lease, err error)
}

// fetchCap is how many tasks one claim of Run takes, and maxConcurrency how many it has at work.
const fetchCap, maxConcurrency = 256, 1_000_000

// Run works on the tasks of the mux's queues until ctx ends: it claims tasks for idle workers,
// calls the handlers, and stores the outcomes. A worker goes on without waiting for the commit; Run
// itself returns after the last commit. [Queue.QuietWorkers] stops it from taking tasks for a
// while.
//
// A lease of Run belongs to the process: it lasts as long as its handler runs, and its renewal
// writes nothing. In a cluster the renewals are stored.
//
// If the process dies, its tasks come back at the next [Open], or, in a cluster, when their leases
// expire, as suspects: one of them may be the reason. Suspects are [Blocked], keep the turns of
// their groups, and start slowly, in random order, beside all other tasks: one of the process (in a
// cluster, of each leader), then twice as many each time those have ended an attempt, well or not,
// or have been at work for [Options.SuspectFor]. If the process dies again, only suspects at work
// stay suspects, and come after the tasks that were at work beside them. A crash is an attempt
// of the only suspect at work, and else among the [TaskInfo].Crashes of each task: ten times
// MaxAttempts of them make a dead letter. [Queue.Close] is none, nor is a lease of [Queue.Claim]
// that expires.
//
// The context of a handler is cancelled when its task's Timeout has
// passed (cause context.DeadlineExceeded), when its lease is lost (cause [ErrLeaseLost],
// [ErrFailed] if its shard has failed, or [ErrNotLeader] or [ErrUncertain] if no leader has
// answered for LeaseFor, as when the node was removed from its cluster), and when Run has waited
// for Grace (cause: that of ctx, or [ErrClosed]).
//
// While there is no room on the disk, the outcomes of handlers wait for it, and their leases do not
// expire.
//
// When ctx ends, or the queue is closed, Run stops claiming, waits up to Grace for its handlers,
// cancels the rest, and gives their tasks back without counting the attempt, unless its
// [Task.Timeout] has passed. It returns nil if ctx ended, [ErrClosed] if the queue was closed, the
// error of a shard that failed, [ErrNotLeader] if the node was removed from its cluster (Run ends
// when it knows that), and [ErrHandlersRunning] if after another Grace (at least a second) some
// handlers still had not returned.
//
// Errors: [ErrInvalid], [ErrNoHandler], [ErrHandlersRunning], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed].
func (q *Queue) Run(ctx context.Context, m *Mux, opts *RunOptions) (err error) {
	defer public(&err)
	_, err = q.runMux(ctx, m, opts, false)
	return err
}

// runMux is Run. With untilEmpty it also ends, and returns nil, when nothing can be claimed at the
// moment and no handler runs. claimed is how many tasks it has claimed.
func (q *Queue) runMux(ctx context.Context, m *Mux, opts *RunOptions, untilEmpty bool) (claimed int, err error) {
	if err := q.checkCall(ctx); err != nil {
		return 0, err
	}
	if err := q.onlyHere("Run"); err != nil {
		return 0, err
	}
	r, err := q.newRun(ctx, m, opts)
	if err != nil {
		return 0, err
	}
	if err := q.enter(); err != nil {
		return 0, err
	}
	defer q.calls.Done()
	r.req.NoWait = untilEmpty
	err = r.run(ctx)
	return r.pool.Claimed(), err
}

// runner is one call of Run: it claims tasks for its workers, calls the handlers, and stores the
// outcomes.
type runner struct {
	number   uint32 // among those of the process, from 1
	since    time.Time
	queue    *Queue
	handlers map[string]handler // by queue, wrapped in the middleware
	batches  *batches           // nil: no handler takes batches
	opts     RunOptions
	req      ClaimRequest   // NoWait: the runner ends when there is nothing to do
	list     *dispatch.List // of req, if it is long

	values context.Context // holds the values of the handlers' contexts; never ends

	claims           context.Context // of run; it ends when nothing is claimed any more
	pool             *workerpool.Pool[engine.Grant, atWork]
	canceledReceipts recent.Shared[engine.Receipt] // receipts of canceled tasks
	failed           atomic.Pointer[error]
	stopClaims       context.CancelCauseFunc

	renewers []*leaseRenewer // one for each shard
	// storing ends when the outcomes of handlers do not wait for room any longer.
	storing     context.Context
	stopStoring context.CancelCauseFunc
	reports     sync.WaitGroup // of handlers, under way to their shards
	forwards    chan struct{}  // bounds the completions under way to other nodes: one element for each
}

// atWork is what a handler works on: a *taskContext, or a *taskBatch.
type atWork interface{ workerpool.Task }

// tasksOf returns the tasks of a handler.
func tasksOf(t atWork) []*taskContext {
	if b, ok := t.(*taskBatch); ok {
		return b.tasks
	}
	return []*taskContext{t.(*taskContext)}
}

// worker runs the handlers of a runner, one at a time.
type worker = workerpool.Worker[engine.Grant, atWork]

func (q *Queue) newRun(ctx context.Context, m *Mux, opts *RunOptions) (*runner, error) {
	r := &runner{queue: q, forwards: make(chan struct{}, q.opts.InboxDepth)}
	if opts != nil {
		r.opts = *opts
	}
	o := &r.opts
	o.Queues, o.Weights = slices.Clone(o.Queues), maps.Clone(o.Weights)
	if err := checkNewName("RunOptions.Name", o.Name, record.MaxWorker); err != nil {
		return nil, err
	}
	o.Name = cmp.Or(o.Name, workerpool.ProcessName())
	o.Concurrency = cmp.Or(o.Concurrency, 4*runtime.GOMAXPROCS(0))
	if o.Concurrency < 0 || o.Concurrency > maxConcurrency {
		return nil, &InvalidError{"RunOptions.Concurrency", o.Concurrency, fmt.Sprint("1 to ", maxConcurrency)}
	}
	o.Grace = cmp.Or(o.Grace, 10*time.Second)
	o.LeaseFor = cmp.Or(o.LeaseFor, q.opts.LeaseFor)
	var err error
	if r.handlers, err = m.compose(); err != nil {
		return nil, err
	}
	if len(o.Queues) == 0 {
		o.Queues = m.Queues()
		if len(o.Weights) == 0 {
			o.Weights = map[string]int{o.Queues[0]: 1} // all equally
		}
	}
	for _, name := range o.Queues {
		if r.handlers[name] == nil {
			return nil, fmt.Errorf("%w: queue %q: register one by Handle", ErrNoHandler, name)
		}
	}
	r.req = ClaimRequest{Queues: o.Queues, Weights: o.Weights, LeaseFor: o.LeaseFor, Worker: o.Name}
	if err := r.req.check("RunOptions", &q.opts.Limits); err != nil {
		return nil, err
	}
	if len(o.Queues) == 1 { // there is only one order
		r.req.Weights = nil
	}
	if r.batches, err = newBatches(r, m.batches); err != nil {
		return nil, err
	}
	r.list = dispatch.NewList(r.req.Queues, r.req.appendWeights(nil))
	r.values = context.WithoutCancel(ctx)
	r.storing, r.stopStoring = context.WithCancelCause(context.Background())
	r.pool = workerpool.New(workerpool.Config{
		Workers: o.Concurrency, Batch: min(fetchCap, q.opts.Limits.Batch), Grace: o.Grace, Log: q.opts.log,
		Crash: func(what string, value any, stack []byte) { r.crash(panicError(what, value, stack)) },
	}, r)
	return r, nil
}

func (r *runner) run(own context.Context) error {
	log := r.queue.opts.log
	ctx, stop := guard.Until(own, r.queue.closing, ErrClosed, log, "watch of Run", func(what string, value any, stack []byte) error {
		err := panicError(what, value, stack)
		r.failed.CompareAndSwap(nil, &err)
		return err
	})
	defer func() { _ = stop(nil) }()
	if n := r.queue.node; n != nil { // it waits for leaders as long as the claims do
		if err := n.Insist(ctx, func() error { return n.want(ctx, engine.WantCancels) }); err != nil {
			if err = stop(err); own.Err() != nil {
				return nil
			}
			return err
		}
		defer n.interests.Release(engine.WantCancels)
	}
	ctx, r.stopClaims = context.WithCancelCause(ctx)
	defer r.stopClaims(nil)
	r.claims = ctx
	var renewing sync.WaitGroup
	r.since = r.queue.opts.private.Wall()
	r.number = r.queue.runs.Add(r)
	defer r.queue.runs.Remove(r.number)
	for i := range r.queue.replicas {
		h := &leaseRenewer{Heartbeat: workerpool.NewHeartbeat(), runner: r, shard: i}
		r.renewers = append(r.renewers, h)
		begin := func() { h.renewedAt = r.queue.opts.private.Mono() }
		renewing.Go(func() {
			contain(log, "heartbeat", func() { h.Run(r.opts.LeaseFor/3, begin, h.renew) }, r.crash)
		})
	}
	fetchers := len(r.queue.replicas)
	if r.req.NoWait { // a single fetcher knows how many tasks are at work
		fetchers = 1
	}
	r.pool.Run(ctx, fetchers, r.crash)
	if r.list != nil {
		for i := range r.queue.replicas {
			if s := r.queue.shard(i); s != nil {
				notify(s.inbox, &internal, func(s *shard) { s.claims.DropSet(r.list) })
			}
		}
	}
	cause := context.Cause(ctx)
	var err error
	if running := r.pool.Drain(cause); running > 0 {
		err = fmt.Errorf("%w: %d", ErrHandlersRunning, running)
	}
	r.stopStoring(nil)
	r.reports.Wait() // all handlers' contexts have ended
	for _, h := range r.renewers {
		h.Stop()
	}
	renewing.Wait()
	switch reason := r.failed.Load(); {
	case err != nil && reason != nil:
		return errors.Join(*reason, err)
	case err != nil:
		return err
	case reason != nil:
		return *reason
	case errors.Is(cause, ErrClosed):
		return ErrClosed
	}
	return nil
}

// crash ends claims with an error, which Run returns.
func (r *runner) crash(err error) {
	r.failed.CompareAndSwap(nil, &err)
	r.stopClaims(err)
}

// Claim adds claimed tasks to the pool.
func (r *runner) Claim(ctx context.Context, places int) (int, error) {
	req := r.req
	req.Max = r.batches.claimSize(places, min(fetchCap, r.queue.opts.Limits.Batch))
	op, err := r.queue.claim(ctx, &req, r)
	if err != nil {
		if req.NoWait && errors.Is(err, ErrEmpty) {
			err = nil
		}
		return 0, err
	}
	defer op.unref()
	for _, h := range r.renewers {
		h.Wake()
	}
	if r.batches != nil {
		return r.addBatches(op.Grants), nil
	}
	r.pool.Add(op.Grants)
	return len(op.Grants), nil
}

// GiveBack gives back tasks that no worker has begun.
func (r *runner) GiveBack(grants []engine.Grant) {
	for i := range grants {
		if b := r.batches.take(grants[i].Receipt); b != nil {
			r.giveBackBatch(b, r.giveBackUnbegun)
			r.batches.Drop(b)
			continue
		}
		r.giveBack(receiptOf(grants[i].Receipt), call.Fail{How: engine.FailReturn}, nil)
	}
}

// TakeBack gives back the tasks of a handler that goes on.
func (r *runner) TakeBack(t atWork) {
	if b, ok := t.(*taskBatch); ok {
		r.giveBackBatch(b.openBatch, r.takeBack)
		return
	}
	r.takeBack(t.(*taskContext))
}

func (r *runner) takeBack(f *taskContext) {
	op := call.Fail{How: engine.FailReturn | engine.StillRuns, Notes: f.lastNotes()}
	if end, ok := f.Deadline(); ok && time.Until(end) <= 0 {
		err := r.reportOverdue(f)
		op.How, op.Wait, op.Cause = engine.FailRetry|engine.StillRuns, -1, err.Error()
	}
	r.giveBack(f.lease.Receipt, op, f)
	if f.Mark(markEnded) {
		r.returned(&f.lease)
	}
}

// Hurry ends all waits of outcomes for room.
func (r *runner) Hurry() { r.stopStoring(errRunEnds) }

var errRunEnds = fmt.Errorf("%w: there was no room until the end of Run", ErrDiskFull)

// giveBack gives back a task. f is nil if no worker has it.
func (r *runner) giveBack(receipt Receipt, op call.Fail, f *taskContext) {
	op.Gone = r.storing.Done() // it waits for room on the disk
	err := r.queue.failed(r.storeContext(), receipt, op, nil)
	if public(&err); err != nil && f != nil {
		r.report(&f.lease, err)
	}
}

// countOverdue counts the attempt of a handler that goes on after its Timeout.
func (r *runner) countOverdue(f *taskContext) {
	op := call.Fail{How: engine.FailOverdue, RoomWait: call.RoomWait{Gone: r.storing.Done()}}
	_ = r.queue.failed(r.storing, f.lease.Receipt, op, nil) // if the lease is lost, the worker learns of it
	_ = r.reportOverdue(f)
}

// reportOverdue reports, once, a handler that goes on after its Timeout.
func (r *runner) reportOverdue(f *taskContext) error {
	l := &f.lease
	err := fmt.Errorf("%w after the Timeout of %v (%w); the attempt counts", ErrHandlersRunning, l.Timeout, context.DeadlineExceeded)
	if !f.Mark(markOverdue) {
		r.queue.opts.log.Warn("handler goes on after its Timeout; the attempt counts",
			"task", l.ID, "queue", l.Queue, "attempt", l.Attempt, "timeout", l.Timeout, "worker", r.opts.Name)
		r.report(l, err)
	}
	return err
}

// storeContext returns a context that ends when the runner does not wait any longer for an
// operation that waits on another node.
func (r *runner) storeContext() context.Context {
	if r.queue.node == nil || r.storing.Err() != nil {
		return context.Background()
	}
	return r.storing
}

// report calls OnError, and waits for it. It uses a new goroutine, which OnError may end or let
// panic.
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
				r.countOverdue(f)
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
	r.store(f, ours, lost, waited, took, failed)
}

// store stores the outcome of a task. ours, lost and failed are as in verdictOn.
func (r *runner) store(f *taskContext, ours bool, lost error, waited uint32, took time.Duration, failed *failure) {
	if ours && failed == nil {
		failed = r.complete(f)
	}
	if ours && failed != nil {
		r.fail(f, failed)
	}
	if !ours && (lost != nil || f.Mark(markEnded)) {
		r.returned(&f.lease)
	}
	if r.queue.opts.teller != nil {
		o := r.queue.opts.teller.Begin()
		o.addHandler(HandlerSample{
			Queue: f.lease.Queue, Tenant: f.lease.Tenant, Attempt: f.lease.Attempt,
			Wait: time.Duration(waited) * time.Millisecond, Took: took, Verdict: verdictOn(ours, lost, failed),
		})
		r.queue.opts.teller.End(o.isFull())
	}
}

// returned tells the shard that a handler has returned after the end of its lease: limits and turns
// were kept for it.
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
	return r.handlers[f.lease.Queue](f, &f.lease, f)
}

// fail gives a failed attempt to the shard, as complete does.
func (r *runner) fail(f *taskContext, failed *failure) {
	l, op := &f.lease, &failed.op
	op.Notes = f.lastNotes()
	if op.How != engine.FailRelease && op.How != engine.FailSuspend {
		r.report(l, failed.err)
	}
	op.completion, op.Receipt, op.Gone = newCompletion(callFail), l.Receipt.inner(), r.storing.Done()
	r.end(op, l)
}

// complete gives the completion to the shard and does not wait for it; or it returns why the output
// cannot be stored.
func (r *runner) complete(f *taskContext) *failure {
	l := &f.lease
	op := r.queue.completeOp(l.Receipt)
	op.Notes = f.lastNotes()
	if f.out != nil {
		err := f.out.fill(op)
		if err == nil {
			err = call.CheckRoute(op.Next, r.queue.shardOf(l.ID), len(r.queue.replicas), r.queue.opts.Limits.ofCommit())
		}
		if err != nil {
			err = DeadLetter(base.Prefixed(translated(err)))
		} else {
			err = r.queue.checkParents(r.storeContext(), "Complete", op.Next)
			public(&err)
		}
		if err != nil {
			r.queue.recycleComplete(op)
			return failureOf(err)
		}
	}
	op.Gone = r.storing.Done()
	r.end(op, l)
	return nil
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

// settled is called by the shard's owner with the outcome of op; the owner must not wait for a
// hook.
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

// leaseRenewer renews the leases of a Run's running handlers in one shard, so that a stalled shard
// delays the renewals of no other. It renews three times in the length of a lease, and sleeps while
// no handler runs.
type leaseRenewer struct {
	*workerpool.Heartbeat // woken when handlers are about to run
	runner                *runner
	shard                 int
	renewedAt             time.Time // when the shard last renewed leases
}

// renew renews the leases of the running handlers, and cancels handlers that have lost theirs.
func (h *leaseRenewer) renew() (running bool) {
	r := h.runner
	b := &call.Renew{Duration: record.Millis(r.opts.LeaseFor)}
	for _, w := range r.pool.Workers() {
		if t, ok := w.Task(); ok {
			if f, one := t.(*taskContext); one && r.queue.shardOf(f.lease.ID) == h.shard {
				b.Receipts = append(b.Receipts, f.lease.Receipt.inner())
			}
		}
	}
	b.Receipts = r.appendOfBatches(b.Receipts, h.shard)
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
	r.loseOfBatches(lost)
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
			r.loseOfBatches(lost)
		}, nil) // if it panics, the next renewal of the lease cancels the handler
	})
}

func errCanceled(r Receipt) error { return fmt.Errorf("%w: %s", ErrCanceled, r.ID) }

// cancelIfLost cancels the running handler of a worker if its lease is among the lost.
func (r *runner) cancelIfLost(w *worker, lost map[engine.Receipt]error) bool {
	t, cause := w.TakeAway(func(t atWork) error {
		if f, one := t.(*taskContext); one {
			return lost[f.lease.Receipt.inner()]
		}
		return nil
	})
	if cause == nil {
		return false
	}
	t.End(cause)
	r.report(&t.(*taskContext).lease, cause)
	return true
}
