package codeq

import (
	"context"
	"iter"
	"slices"
	"time"

	"codeq/internal/engine"
	"codeq/internal/listing"
	"codeq/internal/schema"
)

// ListOptions selects the tasks that [Queue.List] yields.
type ListOptions struct {
	State   State    // required
	Queue   string   // "": all queues
	Tenants []string // none: all tenants; "" stands for tasks without one
	// From and To bound [TaskInfo.At]: at or after From, and before To. Zero: no bound.
	From, To time.Time
}

// List yields the tasks of one state, of all shards in one order:
//
//   - [Ready] and [Leased]: by queue, by priority (the highest first), by tenant, then by the time
//     since when they are ready;
//   - [Scheduled]: by time;
//   - [Blocked]: by queue; tasks that wait for the same parent, group or limit are together;
//   - [Dead], [Done], [Canceled]: by queue, by the time until which they are kept (rounded), then
//     by the time of their produce.
//
// List reads some hundred tasks of a shard at a time. Such a page is linearizable, on a queue by
// itself as in a cluster: it shows the shard at one moment, with what any call had done that
// returned before List began. Later pages, and pages of other shards, are of other moments: a task
// that changes its state meanwhile may be missed. The sequence ends after the first error.
//
// Errors: [ErrInvalid], [ErrCorrupt], [ErrUncertain] and [ErrNotLeader] (in a cluster),
// [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) List(ctx context.Context, opts ListOptions) iter.Seq2[*TaskInfo, error] {
	opts.Tenants = slices.Clone(opts.Tenants)
	return func(yield func(*TaskInfo, error) bool) {
		if err := q.checkCall(ctx); err != nil {
			yield(nil, err)
			return
		}
		if opts.State < Ready || opts.State > Canceled {
			const states = "Ready, Scheduled, Blocked, Leased, Dead, Done or Canceled"
			yield(nil, &InvalidError{"ListOptions.State", opts.State, states})
			return
		}
		heads := make([]*lister, len(q.replicas))
		for i := range heads {
			heads[i] = newLister(opts)
		}
		fetch := func(shard int, l *lister) error {
			return q.ask(ctx, shard, &readOp{completion: newCompletion(callRead), list: l})
		}
		err := listing.Merge(heads, listKey, fetch, func(t *TaskInfo) bool { return yield(t, nil) })
		if err != nil {
			yield(nil, prefixed(err))
		}
	}
}

func listKey(t *TaskInfo) listing.Key {
	return listing.Key{Queue: t.Queue, Tenant: t.Tenant, Priority: t.Priority, ID: t.ID}
}

// listed is a task and its place in the order of its shard.
type listed = listing.Item[TaskInfo]

// lister reads the tasks of one shard, by one call for each page.
type lister = listing.Reader[TaskInfo]

func newLister(o ListOptions) *lister {
	return listing.NewReader(listing.Query{
		State: engine.TaskState(o.State), Queue: o.Queue, Tenants: o.Tenants, From: o.From, To: o.To,
	}, showListed)
}

// showListed converts a stored task; keep reports whether its time is within the bounds of the
// list.
func showListed(o *listing.Query, t *schema.Task) (_ *TaskInfo, keep bool) {
	info := taskInfo(t)
	return info, (o.From.IsZero() || !info.At.Before(o.From)) && (o.To.IsZero() || info.At.Before(o.To))
}
