package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"
)

// BatchOptions are the options of [HandleBatch]. A zero field means its documented default.
type BatchOptions struct {
	// Max is how many tasks a batch has at the most, up to [Limits.Batch]. Default: 100.
	Max int
	// Linger is how long a batch waits for more tasks after its first one was claimed, up to a
	// minute, and less than a third of [RunOptions.LeaseFor]. Default 0: it takes those that are
	// ready.
	Linger time.Duration
	// By groups the tasks: those of a batch have the same value, as with [ByTenant] and
	// [ByLimitKey]. It must return quickly, since claims wait for it, and must only read the lease.
	// If it panics, the attempt of the task has failed. Default: nil, one group.
	By func(l *Lease) string
}

// ByTenant is a [BatchOptions].By: a batch has tasks of one tenant.
func ByTenant(l *Lease) string { return l.Tenant }

// ByLimitKey is a [BatchOptions].By: a batch has tasks with the same [Task].LimitKey.
func ByLimitKey(l *Lease) string { return l.LimitKey }

const defaultBatch, maxLinger = 100, time.Minute

// HandleBatch registers a handler that works on many tasks of a queue at once: a batch, which takes
// one place of [RunOptions].Concurrency. A task with which no other is ready is a batch of its own,
// after [BatchOptions].Linger.
//
// The handler returns nil, or an error for each job, at its index: each is a verdict as in
// [Handle], and each task ends as that says, whatever the others do. If the handler panics, or
// returns another number of errors, the attempts of all have failed. A payload that cannot be
// decoded makes a dead letter of its task alone: the handler does not get it. SetResult and
// FollowUp work for each [Job].
//
// [Queue.Run] renews the leases of all tasks, also while a batch waits for more. [Job.Context] ends
// with its task, as the context of a handler of one does: a task that is canceled, or has lost its
// lease, leaves the batch to the others, and its error has no effect. The ctx of the handler ends
// when all tasks are lost, when [Queue.Run] ends, or at the earliest of the tasks' Timeouts. It is
// that of no task: [LeaseFrom], [ReportProgress] and [SetMetadata] need the one of a job. At the
// end of Run, tasks of batches that have not begun are given back, and no attempt counts.
//
// While a batch is filled, tasks of other groups may be claimed, which wait for a place: no more
// are claimed when four times Max of a Run wait. A [Mux] with batches has no [Middleware], which
// wraps handlers of one task: [Queue.Run] refuses both, and an invalid option, with an
// [InvalidError].
func HandleBatch[T any](m *Mux, queue string, o BatchOptions, h func(context.Context, []*Job[T]) []error, opts ...PayloadOption) {
	enc := m.check("HandleBatch", queue, h == nil, opts)
	if o.Linger < 0 || o.Linger > maxLinger {
		m.refuse(&InvalidError{"BatchOptions.Linger of queue " + strconv.Quote(queue), o.Linger, fmt.Sprint("0 to ", maxLinger)})
	}
	if o.Max == 0 {
		o.Max = defaultBatch
	}
	m.handlers[queue] = func(context.Context, *Lease, *taskContext) error { return errTakesBatches }
	if m.batches == nil {
		m.batches = make(map[string]*batchHandler)
	}
	m.batches[queue] = &batchHandler{o, func(ctx context.Context, tasks []*taskContext) []error {
		errs, all := make([]error, len(tasks)), make([]Job[T], len(tasks))
		jobs := make([]*Job[T], 0, len(tasks))
		at := make([]int, 0, len(tasks)) // indices of the jobs in tasks
		for i, f := range tasks {
			job := &all[i]
			*job = Job[T]{Lease: &f.lease, taskCtx: f, encoding: enc}
			if errs[i] = job.decodeContained(); errs[i] == nil {
				jobs, at = append(jobs, job), append(at, i)
			}
		}
		if len(jobs) == 0 {
			return errs
		}
		told := h(ctx, jobs)
		if told != nil && len(told) != len(jobs) {
			err := fmt.Errorf("codeq: the batch handler of queue %s returned %d errors for %d jobs", queue, len(told), len(jobs))
			for i := range errs {
				errs[i] = errors.Join(errs[i], err)
			}
			return errs
		}
		for i, err := range told {
			errs[at[i]] = err
		}
		return errs
	}}
}

// errTakesBatches is of a programming error of codeq.
var errTakesBatches = errors.New("codeq: a batch handler was called for one task")

// batchHandler is the handler of a queue that takes batches. call returns an error for each task.
type batchHandler struct {
	BatchOptions
	call func(context.Context, []*taskContext) []error
}

// check refuses options that do not suit those of a Run.
func (h *batchHandler) check(queue string, o *RunOptions, l *Limits) error {
	if h.Max < 0 || h.Max > l.Batch {
		return &InvalidError{"BatchOptions.Max of queue " + strconv.Quote(queue), h.Max, atMostTasks(l.Batch)}
	}
	if third := o.LeaseFor / 3; h.Linger >= third {
		return &InvalidError{"BatchOptions.Linger of queue " + strconv.Quote(queue), h.Linger, fmt.Sprintf("less than %v, a third of LeaseFor", third)}
	}
	return nil
}

// decodeContained is decode; a panic of the codec is an error.
func (j *Job[T]) decodeContained() (err error) {
	defer recovered(&err)
	return j.decode()
}

// Context returns the context of the job's task: it ends with the task, and [LeaseFrom],
// [LoggerFrom], [ReportProgress] and [SetMetadata] take it. In a handler of [HandleBatch] each job
// has its own; that of a [Handle] handler is the parent of the handler's ctx. For a Job that none
// of the two has made it is [context.Background].
func (j *Job[T]) Context() context.Context {
	if !j.isMade() {
		return context.Background()
	}
	return j.taskCtx
}

// batchContextKey is the key under which a batch is a value of its context.
type batchContextKey struct{}

// loggerOfBatch is LoggerFrom for a context that is that of no task.
func loggerOfBatch(ctx context.Context) *slog.Logger {
	if ctx == nil {
		return silence
	}
	b, ok := ctx.Value(batchContextKey{}).(*taskBatch)
	if !ok {
		return silence
	}
	return b.runner.queue.opts.Logger.With("queue", b.Key.queue, "tasks", len(b.tasks))
}
