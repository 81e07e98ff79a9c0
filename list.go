package codeq

import (
	"bytes"
	"cmp"
	"context"
	"iter"
	"slices"
	"strings"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/listing"
	"codeq/internal/schema"
)

// ListOptions selects the tasks that List yields.
type ListOptions struct {
	State   State    // required
	Queue   string   // "": all queues
	Tenants []string // none: all tenants; "" stands for tasks without one
	// From and To bound TaskInfo.At: at or after From, and before To. Zero: no bound.
	From, To time.Time
}

// List yields the tasks of one state, of all shards in one order:
//
//   - Ready and Leased: by queue, by priority (the highest first), by tenant, then by the time
//     since when they are ready;
//   - Scheduled: by time;
//   - Blocked: by queue; tasks that wait for the same parent, group or limit are together;
//   - Dead, Done, Canceled: by queue, by the time until which they are kept (rounded), then by the
//     time of their produce.
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
		order, ok := listOrders[opts.State]
		if !ok {
			const states = "Ready, Scheduled, Blocked, Leased, Dead, Done or Canceled"
			yield(nil, &InvalidError{"ListOptions.State", opts.State, states})
			return
		}
		var heads []*lister // by shard; nil: nothing is left
		for range q.replicas {
			heads = append(heads, newLister(opts))
		}
		for {
			var first *lister
			for shard, l := range heads {
				if l == nil {
					continue
				}
				if err := q.fill(ctx, shard, l); err != nil {
					yield(nil, prefixed(err))
					return
				}
				if len(l.Page) == 0 {
					heads[shard] = nil
					continue
				}
				if first == nil || order(&l.Page[0], &first.Page[0]) < 0 {
					first = l
				}
			}
			if first == nil {
				return
			}
			t := first.Page[0].Task
			first.Page = first.Page[1:]
			if !yield(t, nil) {
				return
			}
		}
	}
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

// listOrders are the orders in which the shards keep the tasks of each state.
var listOrders = map[State]func(a, b *listed) int{
	Ready: byLane, Leased: byLane, Scheduled: byTime,
	Blocked: byGroup, Dead: byGroup, Done: byGroup, Canceled: byGroup,
}

func byTime(a, b *listed) int {
	return cmp.Or(cmp.Compare(a.At, b.At), bytes.Compare(a.Task.ID[:], b.Task.ID[:]))
}

func byGroup(a, b *listed) int {
	return cmp.Or(strings.Compare(a.Task.Queue, b.Task.Queue), byTime(a, b))
}

func byLane(a, b *listed) int {
	return cmp.Or(strings.Compare(a.Task.Queue, b.Task.Queue), -cmp.Compare(a.Task.Priority, b.Task.Priority),
		strings.Compare(a.Task.Tenant, b.Task.Tenant), byTime(a, b))
}

// fill reads on in a shard until there is a page, or nothing is left.
func (q *Queue) fill(ctx context.Context, shard int, l *lister) error {
	for len(l.Page) == 0 && l.More() {
		l.Prepare()
		op := &readOp{completion: newCompletion(), list: l}
		if settled, err := q.do(ctx, shard, op); !settled {
			return base.EndOf(ctx)
		} else if err != nil {
			return err
		}
	}
	return nil
}
