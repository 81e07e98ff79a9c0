package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"
)

// BatchOptions are the options of [HandleBatch]. A zero field means its documented default.
type BatchOptions struct {
	Max int // how many tasks a batch has at the most, up to [Limits.Batch]. Default: 100, or that limit.
	// Linger is how long a batch waits for more tasks after its first claim, up to a minute, and
	// less than a third of [RunOptions.LeaseFor]. Default 0: it takes those that are ready.
	Linger time.Duration
	// By groups the tasks: a batch has those of one value, as with [ByTenant] and [ByLimitKey].
	// Claims wait for it. It must only read; a panic fails the attempt. Default: one group.
	By func(l *Lease) string
}

// ByTenant is a [BatchOptions].By: a batch has tasks of one tenant.
func ByTenant(l *Lease) string { return l.Tenant }

// ByLimitKey is a [BatchOptions].By: a batch has tasks with the same [Task].LimitKey.
func ByLimitKey(l *Lease) string { return l.LimitKey }

const defaultBatch, maxLinger = 100, time.Minute

// HandleBatch registers a handler of many tasks of a queue at once: a batch, which takes one place
// of [RunOptions].Concurrency. A task alone is a batch of its own after [BatchOptions].Linger.
//
// The handler returns nil, or an error for each job, at its index: a verdict as in [Handle], for
// its task alone. A panic, or another number of errors, fails the attempts of all. A task with a
// payload that cannot be decoded is no job, but a dead letter. SetResult and FollowUp work.
//
// [Queue.Run] renews the leases of all tasks, also while a batch waits for more. [Job.Context] ends
// with its task, as when it is canceled or has lost its lease: the batch goes on for the others,
// and the error of that task has no effect. The handler's ctx ends when all tasks are lost, when
// Run ends, or at the earliest Timeout. It is that of no task: [LeaseFrom], [ReportProgress] and
// [SetMetadata] need a job's. At the end of Run, waiting batches are given back for no attempt.
//
// Tasks of other groups may be claimed meanwhile, and wait: in a Run, up to four times Max. A [Mux]
// with batches has no [Middleware], which wraps handlers of one task: Run refuses both, and an
// invalid option, with an [InvalidError]. Tasks with a [Task.Kind] are left to [HandleKind].
func HandleBatch[T any](m *Mux, queue string, o BatchOptions, h func(context.Context, []*Job[T]) []error, opts ...HandlerOption) {
	enc := m.check("HandleBatch", queue, h == nil, opts)
	if o.Linger < 0 || o.Linger > maxLinger {
		m.refuse(&InvalidError{"BatchOptions.Linger of queue " + strconv.Quote(queue), o.Linger, fmt.Sprint("0 to ", maxLinger)})
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

var errTakesBatches = errors.New("codeq: a batch handler was called for one task")

// batchHandler is the handler of a queue that takes batches. call returns an error for each task.
type batchHandler struct {
	BatchOptions
	call func(context.Context, []*taskContext) []error
}

// of returns the handler for a Run. It refuses options that do not suit those of the Run.
func (h batchHandler) of(queue string, o *RunOptions, l *Limits) (*batchHandler, error) {
	if h.Max < 0 || h.Max > l.Batch {
		return nil, &InvalidError{"BatchOptions.Max of queue " + strconv.Quote(queue), h.Max, atMostTasks(l.Batch)}
	}
	if third := o.LeaseFor / 3; h.Linger >= third {
		return nil, &InvalidError{"BatchOptions.Linger of queue " + strconv.Quote(queue), h.Linger, fmt.Sprintf("less than %v, a third of LeaseFor", third)}
	}
	h.Max = cmp.Or(h.Max, min(defaultBatch, l.Batch))
	return &h, nil
}

func (j *Job[T]) decodeContained() (err error) {
	defer recovered(&err)
	return j.decode()
}

// Context returns the context of the job's task, which ends with it; [LeaseFrom], [LoggerFrom],
// [ReportProgress] and [SetMetadata] take it. It is the parent of a [Handle] handler's ctx, or one
// for each job of [HandleBatch]; for a Job made by neither it is [context.Background].
func (j *Job[T]) Context() context.Context {
	if !j.isMade() {
		return context.Background()
	}
	return j.taskCtx
}

type batchContextKey struct{}

// loggerOfBatch is LoggerFrom for a context that is that of no task.
func loggerOfBatch(ctx context.Context) *slog.Logger {
	if ctx != nil {
		if b, ok := ctx.Value(batchContextKey{}).(*taskBatch); ok {
			return b.runner.queue.opts.Logger.With("queue", b.Key.queue, "tasks", len(b.tasks))
		}
	}
	return silence
}
