package codeq

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/workerpool"
)

// How Run makes batches. A claimed task of a queue with a batch handler joins the open batch of its
// group, or opens one: a job of the pool. Its worker fills the batch by claims of its queue alone,
// until it is full or its Linger is over. Batches of other groups that these open wait for a place.

type batches struct {
	*workerpool.Batches[batchKey, engine.Receipt, *batchTask]
	handlers map[string]*batchHandler // by queue
	grouped  bool                     // one of them has a By
	least    int                      // the smallest Max of them; 0: the Run has other handlers as well
}

type batchKey struct{ queue, group string }

type batchTask struct {
	taskContext
	waited uint32 // how long it was ready before its claim, ms
}

type (
	openBatch   = workerpool.Batch[batchKey, engine.Receipt, *batchTask]
	joiningTask = workerpool.Joining[batchKey, engine.Receipt, *batchTask]
)

// taskBatch is a batch at work, and the context of its handler.
type taskBatch struct {
	*openBatch
	runner *runner
	tasks  []*taskContext
}

// newBatches returns nil if no queue of the Run has a batch handler.
func newBatches(r *runner, handlers map[string]*batchHandler) (*batches, error) {
	bs := &batches{Batches: workerpool.NewBatches[batchKey, engine.Receipt, *batchTask](), handlers: make(map[string]*batchHandler)}
	least, only := 0, true
	for _, queue := range r.opts.Queues {
		if handlers[queue] == nil {
			only = false
			continue
		}
		h, err := handlers[queue].of(queue, &r.opts, &r.queue.opts.Limits)
		if err != nil {
			return nil, err
		}
		bs.handlers[queue], bs.grouped = h, bs.grouped || h.By != nil
		least = min(cmp.Or(least, h.Max), h.Max)
	}
	if len(bs.handlers) == 0 {
		return nil, nil
	}
	if only {
		bs.least = least
	}
	return bs, nil
}

func (bs *batches) claimSize(places, most int) int {
	if bs == nil || bs.least == 0 || bs.grouped {
		return places
	}
	return max(places, min(places*bs.least, most))
}

// take returns the batch of a job; nil: it is a job of one task.
func (bs *batches) take(job engine.Receipt) *openBatch {
	if bs == nil {
		return nil
	}
	return bs.Take(job)
}

func (b *taskBatch) Value(key any) any {
	if key == (batchContextKey{}) {
		return b
	}
	if v := b.runner.values.Value(key); v != nil {
		return v
	}
	return b.openBatch.Value(key)
}

func (r *runner) addBatches(grants []engine.Grant) int {
	n := len(grants)
	jobs := r.joinBatches(grants)
	if len(jobs) > 0 {
		r.pool.Add(jobs)
	}
	if len(jobs) < n {
		r.pool.Share(n - len(jobs))
	}
	return n
}

// joinBatches adds claimed tasks to batches, and returns the jobs for the pool, in the memory of
// grants: tasks of other handlers, and those that have opened a batch.
func (r *runner) joinBatches(grants []engine.Grant) (jobs []engine.Grant) {
	jobs = grants[:0]
	tasks := make([]batchTask, len(grants)) // one allocation for all
	joining, of := make([]joiningTask, 0, len(grants)), make([]engine.Grant, 0, len(grants))
	for i, g := range grants {
		h := r.batches.handlers[g.Queue]
		if h == nil {
			jobs = append(jobs, g)
			continue
		}
		f := &tasks[i]
		f.runner, f.waited = r, g.Wait
		if err := f.decode(&g); err != nil {
			r.report(&Lease{ID: g.Receipt.ID, Receipt: receiptOf(g.Receipt)}, base.Prefixed(err))
			continue
		}
		if f.lease.Kind != "" { // for another handler
			jobs = append(jobs, g)
			continue
		}
		joining, of = append(joining, joiningTask{Key: batchKey{queue: g.Queue}, Max: h.Max, Job: g.Receipt, Task: f}), append(of, g)
	}
	if r.batches.grouped {
		joining, of = r.group(joining, of)
	}
	r.batches.Join(joining, func(i int) { jobs = append(jobs, of[i]) })
	for i := range of { // after Join, since Cancel adds the receipt before it looks at the batches
		if receipt := of[i].Receipt; r.canceledReceipts.Has(receipt) {
			r.lose(map[engine.Receipt]error{receipt: errCanceled(receiptOf(receipt))})
		}
	}
	return jobs
}

// group sets the groups of tasks, and returns those with one: the attempts of others have failed.
func (r *runner) group(joining []joiningTask, of []engine.Grant) (grouped []joiningTask, its []engine.Grant) {
	failed := guard.EachUser("BatchOptions.By", len(joining), func(i int) {
		t := &joining[i]
		if by := r.batches.handlers[t.Key.queue].By; by != nil {
			t.Key.group = by(&t.Task.lease)
		}
	}, func(value any, stack []byte) error { return &PanicError{value, stack} }, errGoexit)
	for i, t := range joining {
		if err := failed[i]; err != nil {
			r.fail(&t.Task.taskContext, failureOf(err))
			continue
		}
		grouped, its = append(grouped, t), append(its, of[i])
	}
	return grouped, its
}

// fill claims tasks for a batch until it is full or its Linger is over; false: Run ends.
func (r *runner) fill(b *openBatch) bool {
	f := workerpool.Filling[engine.Grant]{Claims: r.claims, Ready: len(r.queue.replicas)} // a claim takes tasks of one shard
	if !r.req.NoWait {
		f.Until = b.Since.Add(r.batches.handlers[b.Key.queue].Linger)
	}
	f.Room = func(full context.CancelFunc) int { return r.batches.Room(b, full) }
	f.Claim = func(ctx context.Context, room int, noWait bool) (n int, others []engine.Grant, err error) {
		req := ClaimRequest{Queues: []string{b.Key.queue}, Max: room, NoWait: noWait, LeaseFor: r.opts.LeaseFor, Worker: r.opts.Name}
		op, err := r.claim(ctx, &req)
		if err != nil {
			return 0, nil, err
		}
		defer op.unref()
		return len(op.Grants), slices.Clone(r.joinBatches(op.Grants)), nil
	}
	return r.pool.Fill(&f)
}

func (r *runner) doBatch(w *worker, open *openBatch) {
	defer r.batches.Drop(open)
	if !r.fill(open) {
		r.giveBackBatch(open, r.giveBackUnbegun)
		return
	}
	b := &taskBatch{openBatch: open, runner: r}
	r.batches.Begin(open, func(t *batchTask) time.Duration {
		b.tasks = append(b.tasks, &t.taskContext)
		t.Begin(t.lease.Timeout)
		return t.lease.Timeout
	})
	if len(b.tasks) == 0 { // all were canceled
		return
	}
	if !w.Own(b) {
		r.giveBackBatch(open, r.giveBackUnbegun)
		return
	}
	for i, f := range b.tasks {
		if f.lease.Timeout > 0 {
			f.Watch(&r.reports, r.queue.opts.log, func() {
				if r.batches.IsAtWork(open, i) {
					r.countOverdue(w, b, f)
				}
			})
		}
	}
	begun := time.Now()
	failures := make([]*failure, len(b.tasks))
	returned := false
	defer func() {
		if !returned { // runtime.Goexit: this goroutine ends, another takes over
			for i, f := range b.tasks {
				failures[i] = f.verdict(failureOf(errGoexit))
			}
			r.storeBatch(w, b, begun, failures)
			w.Restart()
		}
	}()
	for i, err := range b.handle() {
		if err != nil {
			failures[i] = failureOf(err)
		}
		failures[i] = b.tasks[i].verdict(failures[i])
	}
	returned = true
	r.storeBatch(w, b, begun, failures)
}

// handle calls the handler. A panic is an error of all tasks.
func (b *taskBatch) handle() (errs []error) {
	var panicked error
	func() {
		defer recovered(&panicked)
		errs = b.runner.batches.handlers[b.Key.queue].call(b, b.tasks)
	}()
	if panicked != nil {
		errs = make([]error, len(b.tasks))
		for i := range errs {
			errs[i] = panicked
		}
	}
	return errs
}

func (r *runner) storeBatch(w *worker, b *taskBatch, begun time.Time, failures []*failure) {
	took := time.Since(begun)
	b.End(nil)
	tasks := r.batches.End
	ours, _ := w.Disown()
	if !ours { // the end of Run has taken it, and gives its tasks back
		tasks = r.batches.Tasks
	}
	size := len(b.tasks)
	for i, t := range tasks(b.openBatch) {
		sample := HandlerSample{Wait: time.Duration(t.Task.waited) * time.Millisecond, Took: took, Batch: size}
		size = 0
		r.store(&t.Task.taskContext, ours && !t.Over, t.Lost, sample, failures[i])
	}
}

// giveBackBatch gives back the tasks of a batch, at the same time, so that they share a commit.
func (r *runner) giveBackBatch(b *openBatch, how func(*taskContext)) {
	var all sync.WaitGroup
	for _, t := range r.batches.End(b) {
		if !t.Over {
			all.Go(func() {
				contain(r.queue.opts.log, "task that comes back", func() { how(&t.Task.taskContext) }, nil)
			})
		}
	}
	all.Wait()
}

func (r *runner) giveBackUnbegun(f *taskContext) {
	r.giveBack(f.lease.Receipt, call.Fail{How: engine.FailReturn}, f)
}
