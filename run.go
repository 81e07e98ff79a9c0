package codeq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/heartbeat"
	"codeq/internal/recent"
)

// RunOptions are the options of Run. A zero field means its documented default.
type RunOptions struct {
	// Concurrency is how many handlers run at the same time. Default: four times GOMAXPROCS.
	Concurrency int
	// Queues are the queues from which Run claims, in strict order unless Weights are given; see
	// ClaimRequest. Default: all queues of the Mux, by Weights, or with equal weights.
	Queues  []string
	Weights map[string]int
	// LeaseFor is how long a lease lasts that is not renewed. Run renews the lease of every running
	// handler, so only a process that stands still for so long loses its tasks. Default:
	// Options.LeaseFor.
	LeaseFor time.Duration
	// Grace is how long handlers may go on when Run ends; then their context is cancelled and their
	// tasks are given back. On a full disk the outcomes of handlers wait for room as long again.
	// Default: 10 s; negative: no grace.
	Grace time.Duration
	// OnError is called for every failed attempt (a handler's error or a *PanicError, but not
	// Snooze) and for every outcome that could not be stored, such as ErrLeaseLost. Several
	// goroutines call it at a time. If it panics, this is logged. The worker waits for it: a call
	// that blocks for ever blocks its worker for ever, and may keep Run and Close from returning.
	OnError func(l *Lease, err error)
}

// fetchCap is how many tasks one claim of Run takes at the most.
const fetchCap = 256

// Run works on the tasks of the mux's queues until ctx ends: it claims tasks for idle workers,
// calls the handlers, and stores the outcomes. Workers go on without waiting for the commit; Run
// itself returns after the last commit.
//
// A lease of Run belongs to the process: it lasts as long as its handler runs, and its renewal
// writes nothing. If the process dies the task is ready again at the next Open, with the attempt
// counted. In a cluster the renewals are stored, and the tasks of a process that dies are ready
// again when their leases expire. The context of a handler is cancelled when its task's Timeout has
// passed (cause context.DeadlineExceeded), when its lease is lost (cause [ErrLeaseLost], or
// [ErrFailed] if its shard has failed), and when Run has waited for Grace (cause: that of ctx, or
// [ErrClosed]).
//
// While there is no room on the disk, the outcomes of handlers wait for it, and their leases do not
// expire.
//
// When ctx ends, or the queue is closed, Run stops claiming, waits up to Grace for its handlers,
// cancels the rest, and gives their tasks back without counting the attempt. It returns nil if ctx
// ended, [ErrClosed] if the queue was closed, the error of a shard that failed, and
// [ErrHandlersRunning] if after another Grace (at least a second) some handlers still had not
// returned.
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
	return r.claimed, err
}

// runner is one call of Run. Tasks go from the fetchers through jobs to the workers:
//
//	fetcher   takes free places, claims that many tasks at the most, puts them into jobs
//	worker    takes a task from jobs, calls its handler, hands its completion to
//	          the shard, and frees the place
//
// A worker that ends a task takes the next one without going to sleep. One worker at a time is
// woken: it takes a task, and wakes the next worker if tasks are left. So slow handlers occupy all
// workers after some microseconds, and fast ones do not pay for waking them.
type runner struct {
	number   uint32 // among those of the process, from 1
	queue    *Queue
	handlers map[string]handler // by queue, wrapped in the middleware
	opts     RunOptions
	req      ClaimRequest   // NoWait: the runner ends when there is nothing to do
	list     *dispatch.List // of req, if it is long

	values context.Context // holds the values of the handlers' contexts; never ends

	mu           sync.Mutex     // guards what follows
	jobs         []engine.Grant // claimed, not yet started; from next on
	next         int
	claimed      int  // number of tasks so far
	free         int  // places that no task and no claim occupies
	fetcherWaits bool // a fetcher waits for free to become positive
	idle         int  // workers that wait on wake
	waking       bool // a worker has been woken and is on its way to jobs
	ended        bool // no further jobs: workers end
	wake         *sync.Cond
	room         *sync.Cond
	workers      []*worker

	canceledReceipts recent.Shared[Receipt] // receipts of canceled tasks
	crash            func(error)            // ends Run with an error

	renewers []*leaseRenewer // one for each shard
	running  sync.WaitGroup  // workers
	stored   sync.WaitGroup  // completions under way
	// storing ends when the outcomes of handlers do not wait for room any longer.
	storing     context.Context
	stopStoring context.CancelCauseFunc
	forwards    chan struct{} // bounds the completions under way to other nodes: one element for each
}

func (q *Queue) newRun(ctx context.Context, m *Mux, opts *RunOptions) (*runner, error) {
	r := &runner{queue: q, forwards: make(chan struct{}, q.opts.InboxDepth)}
	if opts != nil {
		r.opts = *opts
	}
	o := &r.opts
	o.Queues, o.Weights = slices.Clone(o.Queues), maps.Clone(o.Weights)
	if o.Concurrency == 0 {
		o.Concurrency = 4 * runtime.GOMAXPROCS(0)
	}
	if o.Concurrency < 0 {
		return nil, &InvalidError{"RunOptions.Concurrency", o.Concurrency, "1 or more"}
	}
	if o.Grace == 0 {
		o.Grace = 10 * time.Second
	}
	if o.LeaseFor == 0 {
		o.LeaseFor = q.opts.LeaseFor
	}
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
			return nil, fmt.Errorf("%w: queue %q", ErrNoHandler, name)
		}
	}
	r.req = ClaimRequest{Queues: o.Queues, Weights: o.Weights, LeaseFor: o.LeaseFor}
	if err := r.req.check(&q.opts.Limits); err != nil {
		return nil, err
	}
	if len(o.Queues) == 1 { // there is only one order
		r.req.Weights = nil
	}
	r.list = dispatch.NewList(r.req.Queues, r.req.appendWeights(nil))
	r.values = context.WithoutCancel(ctx)
	r.storing, r.stopStoring = context.WithCancelCause(context.Background())
	r.free = o.Concurrency
	r.wake, r.room = sync.NewCond(&r.mu), sync.NewCond(&r.mu)
	return r, nil
}

func (r *runner) run(ctx context.Context) error {
	if n := r.queue.node; n != nil {
		if err := n.wantCancels(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
	claimCtx, stopClaims := context.WithCancelCause(ctx)
	stopOnClose := make(chan struct{})
	var closer sync.WaitGroup
	var failed atomic.Pointer[error]
	r.crash = func(err error) {
		failed.CompareAndSwap(nil, &err)
		stopClaims(err)
	}
	log := r.queue.opts.log
	closer.Go(func() {
		contain(log, "watch of Run", func() {
			select {
			case <-r.queue.closing:
				stopClaims(ErrClosed)
			case <-stopOnClose:
			}
		}, r.crash)
	})
	// Fetchers that wait for a free place are woken to see that claims are over.
	unhook := context.AfterFunc(claimCtx, func() {
		contain(log, "end of claims", r.wakeFetchers, func(error) { r.wakeFetchers() })
	})

	for range r.opts.Concurrency {
		r.workers = append(r.workers, &worker{runner: r})
	}
	r.number = r.queue.runs.Add(r) // after the workers exist: cancels look at them
	defer r.queue.runs.Remove(r.number)
	var fetchers sync.WaitGroup
	for _, w := range r.workers {
		w.start()
	}
	var renewing sync.WaitGroup
	for i := range r.queue.replicas {
		h := &leaseRenewer{Heart: heartbeat.New(), runner: r, shard: i}
		r.renewers = append(r.renewers, h)
		renewing.Go(func() { contain(log, "heartbeat", h.run, r.crash) })
	}
	count := len(r.queue.replicas)
	if r.req.NoWait { // a single fetcher knows how many tasks are at work
		count = 1
	}
	for range count {
		fetchers.Go(func() {
			contain(log, "fetcher", func() {
				if err := r.fetch(claimCtx); err != nil && claimCtx.Err() == nil {
					r.crash(err)
				}
			}, r.crash)
		})
	}

	fetchers.Wait()
	if r.list != nil {
		for i := range r.queue.replicas {
			if s := r.queue.shard(i); s != nil {
				_ = s.inbox.pass(&dropSetOp{r.list}) // a shard that is closing drops it anyway
			}
		}
	}
	cause := context.Cause(claimCtx)
	close(stopOnClose)
	closer.Wait()
	unhook()
	err := r.drain(cause)
	for _, h := range r.renewers {
		h.Stop()
	}
	renewing.Wait()
	stopClaims(nil)
	switch reason := failed.Load(); {
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

// fetch claims tasks for free workers until ctx ends, or with NoWait until none can be claimed and
// none is at work.
func (r *runner) fetch(ctx context.Context) error {
	req := r.req
	for {
		r.mu.Lock()
		for r.free == 0 && ctx.Err() == nil {
			r.fetcherWaits = true
			r.room.Wait()
		}
		if ctx.Err() != nil {
			r.mu.Unlock()
			return context.Cause(ctx)
		}
		req.Max = min(r.free, fetchCap, r.queue.opts.Limits.Batch)
		atWork := r.opts.Concurrency - r.free
		r.free -= req.Max
		r.mu.Unlock()

		op, err := r.queue.claim(ctx, &req, r)
		if err != nil {
			r.release(req.Max)
			if req.NoWait && errors.Is(err, ErrEmpty) {
				if atWork == 0 {
					return nil
				}
				r.awaitFewer(ctx, atWork)
				continue
			}
			return err
		}
		for _, h := range r.renewers {
			h.Wake()
		}
		r.mu.Lock()
		if r.next == len(r.jobs) {
			r.jobs, r.next = r.jobs[:0], 0
		}
		r.jobs = append(r.jobs, op.Grants...)
		r.claimed += len(op.Grants)
		r.wakeWorker()
		r.mu.Unlock()
		r.release(req.Max - len(op.Grants))
		op.unref()
	}
}

// awaitFewer waits until fewer tasks are at work, or ctx ends. REQUIRES: there is one fetcher.
func (r *runner) awaitFewer(ctx context.Context, atWork int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.opts.Concurrency-r.free >= atWork && ctx.Err() == nil {
		r.fetcherWaits = true
		r.room.Wait()
	}
}

// wakeFetchers wakes the fetchers that wait for a free place, to check whether ctx has ended.
func (r *runner) wakeFetchers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.room.Broadcast()
}

// wakeWorker wakes an idle worker for the jobs. REQUIRES: mu is held.
func (r *runner) wakeWorker() {
	if r.idle > 0 && !r.waking {
		r.waking = true
		r.wake.Signal()
	}
}

// release frees places.
func (r *runner) release(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.releaseLocked(n)
}

// releaseLocked is release for a caller who holds mu.
func (r *runner) releaseLocked(n int) {
	if r.free += n; r.fetcherWaits {
		r.fetcherWaits = false
		r.room.Broadcast()
	}
}

// drain waits for the handlers to end: for the grace period by themselves, then by their context.
// It returns when their outcomes are stored.
func (r *runner) drain(cause error) error {
	defer r.awaitStored()
	r.mu.Lock()
	waiting := r.jobs[r.next:]
	r.jobs, r.next = nil, 0
	r.ended = true
	r.mu.Unlock()
	r.wake.Broadcast()
	r.stored.Go(func() {
		contain(r.queue.opts.log, "tasks that come back", func() {
			for i := range waiting {
				r.giveBack(receiptOf(waiting[i].Receipt), nil)
			}
		}, nil) // if it panics, the other tasks come back when their leases expire
	})
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		contain(r.queue.opts.log, "wait for workers", r.running.Wait, nil)
	}()
	if within(idle, r.opts.Grace) {
		return nil
	}
	var taken []*Lease
	for _, w := range r.workers {
		if l := w.stop(cause); l != nil {
			taken = append(taken, l)
		}
	}
	for _, l := range taken { // each waits for a commit; by now every handler knows
		r.giveBack(l.Receipt, l)
	}
	if within(idle, max(r.opts.Grace, time.Second)) {
		return nil
	}
	r.stopStoring(errRunEnds) // for workers whose handlers have ended
	running := 0
	for _, w := range r.workers {
		if w.busy() {
			running++
		}
	}
	if running == 0 {
		<-idle
		return nil
	}
	return fmt.Errorf("%w: %d", ErrHandlersRunning, running)
}

// awaitStored returns when the outcomes of all handlers are stored, or refused: they do not wait
// longer for room on the disk than Run waits for handlers.
func (r *runner) awaitStored() {
	done := make(chan struct{})
	go func() {
		r.stored.Wait()
		close(done)
	}()
	if !within(done, max(r.opts.Grace, time.Second)) {
		r.stopStoring(errRunEnds)
		<-done
	}
	r.stopStoring(nil)
}

var errRunEnds = fmt.Errorf("%w: there was no room until the end of Run", ErrDiskFull)

func within(done <-chan struct{}, d time.Duration) bool {
	if d <= 0 {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// giveBack returns a task as if it had not been claimed.
func (r *runner) giveBack(receipt Receipt, l *Lease) {
	op := failOp{how: engine.FailReturn}
	op.gone = r.storing.Done() // it waits for room on the disk
	err := r.queue.failed(r.storeContext(), receipt, op, nil)
	if err != nil && l != nil {
		r.report(l, err)
	}
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
	go containUser(r.queue.opts.log, "OnError", func() {
		defer close(done)
		r.opts.OnError(l, err)
	})
	<-done
}

// worker runs one handler at a time.
type worker struct {
	runner *runner

	mu      sync.Mutex   // guards what follows
	taskCtx *taskContext // of the running handler; nil: none runs
	ours    bool         // the worker still has the task; false: it was given back, or its lease was lost
	stopped bool         // no handler may run any more
}

// start starts the worker's goroutine.
func (w *worker) start() {
	w.runner.running.Go(func() { contain(w.runner.queue.opts.log, "worker", w.work, w.runner.crash) })
}

// work takes tasks until there will be no more.
func (w *worker) work() {
	r := w.runner
	r.mu.Lock()
	for {
		for r.next == len(r.jobs) && !r.ended {
			r.idle++
			r.wake.Wait()
			r.idle--
			r.waking = false
		}
		if r.ended {
			r.mu.Unlock()
			return
		}
		g := r.jobs[r.next]
		r.jobs[r.next] = engine.Grant{}
		r.next++
		if r.next < len(r.jobs) {
			r.wakeWorker()
		}
		r.mu.Unlock()
		w.do(&g)
		r.mu.Lock()
		r.releaseLocked(1)
	}
}

// do runs the handler of one task and stores the outcome.
func (w *worker) do(g *engine.Grant) {
	r := w.runner
	f := &taskContext{runner: r}
	l := &f.lease
	if err := decodeGrant(g, l); err != nil {
		r.report(&Lease{ID: g.Receipt.ID, Receipt: receiptOf(g.Receipt)}, err)
		return
	}
	if !w.own(f) {
		r.giveBack(l.Receipt, l)
		return
	}
	if r.canceledReceipts.Has(l.Receipt) { // after own, since cancel adds the receipt before it looks at the workers
		w.cancelIfLost(map[engine.Receipt]error{g.Receipt: errCanceled(l.Receipt)})
		w.disown()
		return
	}
	if l.Timeout > 0 {
		f.deadline = time.Now().Add(l.Timeout)
	}
	returned := false
	defer func() {
		if !returned { // runtime.Goexit: this goroutine ends, another takes over
			w.settle(f, errGoexit)
			r.release(1)
			w.start()
		}
	}()
	err := w.call(f)
	returned = true
	w.settle(f, err)
}

var errGoexit = errors.New("codeq: the handler ended its goroutine")

// settle stores the outcome of a task whose handler has ended.
func (w *worker) settle(f *taskContext, err error) {
	f.end(nil)
	switch {
	case !w.disown(): // the task was given back, or its lease was lost
	case err != nil:
		w.fail(&f.lease, err)
	default:
		w.complete(f)
	}
}

// call runs the handler and turns a panic into an error.
func (w *worker) call(f *taskContext) (err error) {
	defer recovered(&err)
	return w.runner.handlers[f.lease.Queue](f, &f.lease, f)
}

// fail gives a failed attempt to the shard, as complete does.
func (w *worker) fail(l *Lease, err error) {
	r := w.runner
	op := failOpOf(err)
	if op.how != engine.FailRelease {
		r.report(l, err)
	}
	op.completion, op.receipt, op.gone = newCompletion(), l.Receipt, r.storing.Done()
	r.end(&op, l)
}

// complete gives the completion to the shard and does not wait for it.
func (w *worker) complete(f *taskContext) {
	r, l := w.runner, &f.lease
	op := r.queue.completeOp(l.Receipt)
	if f.out != nil {
		err := f.out.fill(op)
		if err == nil {
			err = r.queue.checkFollowUps(op)
		}
		if err != nil { // the output can never be stored
			r.queue.recycleComplete(op)
			w.fail(l, DeadLetter(err))
			return
		}
	}
	op.gone = r.storing.Done()
	r.end(op, l)
}

// end gives the operation that ends a lease to its shard, and does not wait for it.
func (r *runner) end(op leaseEnd, l *Lease) {
	*op.of() = ofRunner{r, l}
	r.stored.Add(1)
	s := r.queue.shard(r.queue.shardOf(l.ID))
	if s == nil {
		r.forwards <- struct{}{}
		go func() {
			defer func() { <-r.forwards }()
			r.forward(op, l)
		}()
		return
	}
	if err := s.inbox.push(context.Background(), op); err != nil {
		op.settle(err)
	}
}

// forward sends an operation to the node that leads its shard, and waits for it.
func (r *runner) forward(op leaseEnd, l *Lease) {
	defer r.stored.Done()
	err := guarded(r.queue.opts.log, "end of a lease elsewhere", func() error {
		op.of().runner = nil // a caller waits: this goroutine
		op.again()
		settled, err := r.queue.do(r.storeContext(), r.queue.shardOf(l.ID), op)
		if settled {
			op.recycle(r.queue)
		}
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
		r.stored.Done()
		return
	}
	go func() {
		defer r.stored.Done()
		contain(r.queue.opts.log, "report of an outcome", func() { r.report(l, err) }, nil)
	}()
}

// own gives the worker a task for its handler. It returns false when handlers may not run any more.
func (w *worker) own(f *taskContext) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return false
	}
	w.taskCtx, w.ours = f, true
	return true
}

// disown notes that the handler has ended. It returns false if the task was taken away meanwhile,
// so that the outcome of the handler is dropped.
func (w *worker) disown() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	ours := w.ours
	w.taskCtx, w.ours = nil, false
	return ours
}

// stop cancels the running handler and takes its task away. It returns nil if there is none.
func (w *worker) stop(cause error) *Lease {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	if w.taskCtx != nil {
		w.taskCtx.end(cause)
	}
	if !w.ours {
		return nil
	}
	w.ours = false
	return &w.taskCtx.lease
}

func (w *worker) busy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.taskCtx != nil
}
