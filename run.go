package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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
	// Name is that of the worker, for people: see [Queue.Workers], [Queue.QuietWorkers] and
	// [TaskInfo.History]. Up to 128 bytes. Default: host and process, as "web-1:4711".
	Name string
	// Concurrency is how many handlers run at a time, 1 to 1,000,000. Default: 4 times GOMAXPROCS.
	Concurrency int
	// Queues are the queues that [Queue.Run] claims from, in strict order unless Weights are given;
	// see [ClaimRequest]. Default: all queues of the [Mux], by Weights, or with equal weights.
	Queues  []string
	Weights map[string]int
	// LeaseFor is how long a lease lasts without a renewal by [Queue.Run]: only a process that
	// stands still for so long loses its tasks. Default: [Options.LeaseFor].
	LeaseFor time.Duration
	// Grace is how long handlers may go on when [Queue.Run] ends; then their context ends, and
	// tasks are given back. On a full disk outcomes wait as long again. Default: 10 s; negative: 0.
	Grace time.Duration
	// UnhandledFor is how long a task may go without a handler of its kind ([HandleKind]): then it
	// becomes a dead letter. Default 0: for ever.
	UnhandledFor time.Duration
	// KeepLogs, unless nil, keeps with each task what its handlers write to [LoggerFrom] at this
	// level or above, such as [slog.LevelInfo], whatever [Options].Logger shows: see
	// [TaskInfo.Logs]. No redaction of payloads reaches it: log no secrets.
	KeepLogs slog.Leveler
	// ReplaceStuck is how many handlers at the same time give their places to others when they go
	// on after their [Task.Timeout], for as long again or a second, unless their task was lost or
	// canceled. Their tasks stay leased until they return. Default: 0, they keep their places.
	ReplaceStuck int
	// OnError is called for every failed attempt (a handler's error or a [*PanicError], but not
	// [Snooze]), every outcome that could not be stored, such as [ErrLeaseLost], and once for a
	// handler that goes on after its [Task.Timeout] ([ErrHandlersRunning]), by several goroutines
	// at a time. A panic is logged. The worker waits for it: a call that blocks may keep
	// [Queue.Run] and [Queue.Close] from returning.
	OnError func(l *Lease, err error)
}

// fetchCap is how many tasks one claim of Run takes, and maxConcurrency how many it has at work.
const fetchCap, maxConcurrency = 256, 1_000_000

// Run works on the tasks of the mux's queues until ctx ends: it claims tasks for idle workers,
// calls the handlers, and stores the outcomes. A worker does not wait for the commit; Run returns
// after the last one. [Queue.QuietWorkers] stops it for a while. A lease of Run lasts as long as
// its handler runs; its renewal writes nothing, except in a cluster.
//
// If the process dies, its tasks come back at the next [Open], or, in a cluster, when their leases
// expire, as suspects: one may be the reason. Suspects are [Blocked], keep the turns of their
// groups, and start slowly, in random order, beside all other tasks: one of the process (in a
// cluster, of each leader), then twice as many each time those have ended an attempt, or have been
// at work for [Options.SuspectFor]. Another death leaves only those at work as suspects. It is an
// attempt of a single one, else one of the [TaskInfo].Crashes of each: ten times MaxAttempts make a
// dead letter. [Queue.Close] is no death, nor is a lease of [Queue.Claim] that expires.
//
// The context of a handler ends after its task's Timeout (cause context.DeadlineExceeded), with its
// lease (cause [ErrLeaseLost], [ErrFailed] if its shard has failed, or [ErrNotLeader] or
// [ErrUncertain] if no leader has answered for LeaseFor, as for a removed node), and when Run has
// waited for Grace (cause: that of ctx, or [ErrClosed]). While the disk has no room, outcomes wait
// for it, and leases of handlers do not expire.
//
// When ctx ends, or the queue is closed, Run stops claiming, waits up to Grace for its handlers,
// cancels the rest, and gives their tasks back for no attempt, unless their [Task.Timeout] has
// passed. It returns nil if ctx ended, [ErrClosed] if the queue was closed, the error of a shard
// that failed, [ErrNotLeader] if the node was removed, and [ErrHandlersRunning] if some handlers
// have not returned after another Grace (at least a second).
//
// Errors: [ErrInvalid], [ErrNoHandler], [ErrHandlersRunning], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed].
func (q *Queue) Run(ctx context.Context, m *Mux, opts *RunOptions) (err error) {
	defer public(&err)
	_, err = q.runMux(ctx, m, opts, false)
	return err
}

// runMux is Run; with untilEmpty it also ends when nothing can be claimed and no handler runs.
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

// runner is one call of Run.
type runner struct {
	number   uint32 // among those of the process, from 1
	since    time.Time
	queue    *Queue
	handlers map[string]handler // by queue, wrapped in the middleware
	kinds    map[taskKind]handler
	policies map[taskKind]*record.Policy // of handlers
	batches  *batches                    // nil: no handler takes batches
	opts     RunOptions
	req      ClaimRequest   // NoWait: the runner ends when there is nothing to do
	list     *dispatch.List // of req, if it is long

	values context.Context // holds the values of the handlers' contexts; never ends

	claims           context.Context // of run; it ends when nothing is claimed any more
	pool             *workerpool.Pool[engine.Grant, atWork]
	canceledReceipts recent.Shared[engine.Receipt] // receipts of canceled tasks
	unhandledKinds   recent.Shared[taskKind]       // the log has named them
	failed           atomic.Pointer[error]
	stopClaims       context.CancelCauseFunc

	renewals []*workerpool.Renewal[engine.Receipt] // one for each shard
	// storing ends when the outcomes of handlers do not wait for room any longer.
	storing     context.Context
	stopStoring context.CancelCauseFunc
	reports     sync.WaitGroup // of handlers, under way to their shards
	forwards    chan struct{}  // bounds the completions under way to other nodes: one element for each
}

// atWork is the work of a handler: a *taskContext, or a *taskBatch.
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
	if o.UnhandledFor < 0 {
		return nil, &InvalidError{"RunOptions.UnhandledFor", o.UnhandledFor, "0 or more"}
	}
	if o.ReplaceStuck < 0 {
		return nil, &InvalidError{"RunOptions.ReplaceStuck", o.ReplaceStuck, "0 or more"}
	}
	o.Grace = cmp.Or(o.Grace, 10*time.Second)
	o.LeaseFor = cmp.Or(o.LeaseFor, q.opts.LeaseFor)
	var err error
	if r.handlers, r.kinds, err = m.compose(); err != nil {
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
	r.policies = maps.Clone(m.policies)
	if r.batches, err = newBatches(r, m.batches); err != nil {
		return nil, err
	}
	r.list = dispatch.NewList(r.req.Queues, r.req.appendWeights(nil))
	r.values = context.WithoutCancel(ctx)
	r.storing, r.stopStoring = context.WithCancelCause(context.Background())
	r.pool = workerpool.New(workerpool.Config{
		Workers: o.Concurrency, Batch: min(fetchCap, q.opts.Limits.Batch), Replace: o.ReplaceStuck, Grace: o.Grace, Log: q.opts.log,
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
		if err := n.Insist(ctx, func() error { return n.interests.Keep(ctx, engine.WantCancels) }); err != nil {
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
		h := r.newRenewal(i)
		r.renewals = append(r.renewals, h)
		renewing.Go(func() { contain(log, "heartbeat", h.Run, r.crash) })
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
	for _, h := range r.renewals {
		h.Stop()
	}
	renewing.Wait()
	if reason := r.failed.Load(); reason != nil {
		err = errors.Join(*reason, err)
	}
	if err == nil && errors.Is(cause, ErrClosed) {
		return ErrClosed
	}
	return err
}

// crash ends claims with an error, which Run returns.
func (r *runner) crash(err error) {
	r.failed.CompareAndSwap(nil, &err)
	r.stopClaims(err)
}

// claim is Queue.claim; the leases are renewed.
func (r *runner) claim(ctx context.Context, req *ClaimRequest) (*claimOp, error) {
	op, err := r.queue.claim(ctx, req, r)
	if err == nil {
		for _, h := range r.renewals {
			h.Wake()
		}
	}
	return op, err
}

// Claim adds claimed tasks to the pool.
func (r *runner) Claim(ctx context.Context, places int) (int, error) {
	req := r.req
	req.Max = r.batches.claimSize(places, min(fetchCap, r.queue.opts.Limits.Batch))
	op, err := r.claim(ctx, &req)
	if err != nil {
		if req.NoWait && errors.Is(err, ErrEmpty) {
			err = nil
		}
		return 0, err
	}
	defer op.unref()
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
	f.storeCursors()
	op := call.Fail{How: engine.FailReturn | engine.StillRuns, Notes: f.lastNotes()}
	if end, ok := f.Deadline(); ok && time.Until(end) <= 0 {
		err := r.reportOverdue(f)
		op.How, op.Wait, op.Cause = engine.FailRetry|engine.StillRuns, -1, err.Error()
		op.Policy = r.policyOf(&f.lease)
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

// countOverdue counts the attempt of a task whose handler goes on after its Timeout. Another one
// gets the place of the handler, that of all or one of its tasks.
func (r *runner) countOverdue(w *worker, all atWork, f *taskContext) {
	if w.Replace(all); !all.Mark(markStuck) {
		r.queue.stuck.Add(1)
	}
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

// newRenewal renews the leases of the running handlers in one shard.
func (r *runner) newRenewal(shard int) *workerpool.Renewal[engine.Receipt] {
	return &workerpool.Renewal[engine.Receipt]{
		Heartbeat: workerpool.NewHeartbeat(), For: r.opts.LeaseFor, Now: r.queue.opts.private.Mono, Waits: r.queue.node != nil,
		AtWork: func() (leases []engine.Receipt) {
			r.eachAtWork(func(f *taskContext) {
				if r.queue.shardOf(f.lease.ID) == shard {
					leases = append(leases, f.lease.Receipt.inner())
				}
			})
			return leases
		},
		Renew: func(leases []engine.Receipt) (map[engine.Receipt]error, error) {
			b := &call.Renew{Receipts: leases, Duration: record.Millis(r.opts.LeaseFor)}
			_, err := r.queue.do(context.Background(), shard, rule(callRenew, b))
			lost := make(map[engine.Receipt]error, len(b.Lost))
			for i, receipt := range b.Lost {
				lost[receipt] = b.Errs[i]
			}
			return lost, err
		},
		Lose: r.lose,
	}
}

// eachAtWork calls f for each task at work, those of batches included.
func (r *runner) eachAtWork(f func(*taskContext)) {
	for _, w := range r.pool.Workers() {
		if t, ok := w.Task(); ok {
			if one, is := t.(*taskContext); is {
				f(one)
			}
		}
	}
	if r.batches != nil {
		r.batches.AtWork(func(t *batchTask) { f(&t.taskContext) })
	}
}

// lose ends the tasks that have lost their leases, and a batch without any other.
func (r *runner) lose(lost map[engine.Receipt]error) {
	for _, w := range r.pool.Workers() {
		r.cancelIfLost(w, lost)
	}
	if r.batches == nil {
		return
	}
	for _, l := range r.batches.Lose(func(t *batchTask) error { return lost[t.lease.Receipt.inner()] }) {
		l.End()
		if r.report(&l.Task.lease, l.Cause); !l.Begun {
			r.returned(&l.Task.lease) // there is no handler
		}
	}
}

// Cancel cancels the handler of a canceled task. The shard's owner calls it, and waits for no hook.
func (r *runner) Cancel(lease engine.Receipt) {
	r.queue.notices.Go(func() {
		contain(r.queue.opts.log, "cancel of a handler", func() {
			r.canceledReceipts.Add(lease)
			r.lose(map[engine.Receipt]error{lease: errCanceled(receiptOf(lease))})
		}, nil) // if it panics, the next renewal of the lease cancels the handler
	})
}

func errCanceled(r Receipt) error { return fmt.Errorf("%w: %s", ErrCanceled, r.ID) }

// cancelIfLost cancels the running handler of a worker if its lease is among the lost.
func (r *runner) cancelIfLost(w *worker, lost map[engine.Receipt]error) {
	t, cause := w.TakeAway(func(t atWork) error {
		if f, one := t.(*taskContext); one {
			return lost[f.lease.Receipt.inner()]
		}
		return nil
	})
	if cause != nil {
		t.End(cause)
		r.report(&t.(*taskContext).lease, cause)
	}
}
