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
)

// ListOptions says which tasks List yields.
type ListOptions struct {
	State   State    // required
	Queue   string   // "": of all queues
	Tenants []string // none: of all tenants; "" stands for tasks without one
	// From and To bound TaskInfo.At: at or after From, and before To. Zero: no bound.
	From, To time.Time
}

// List yields the tasks of one state, of all shards in one order:
//
//   - Ready and Leased: by queue, the highest priority first, by tenant, then
//     by the time since when they are ready;
//   - Scheduled: by time;
//   - Blocked: by queue, and together what waits for the same;
//   - Dead, Done, Canceled: by queue, by the time until which they are kept
//     (those of about the same time together), then by the time of their produce.
//
// It reads some hundred tasks at a time, each time as of the last commit: a task
// that changes its state meanwhile may be missed. The sequence ends after the
// first error.
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
			yield(nil, &InvalidError{"ListOptions.State", opts.State, "Ready, Scheduled, Blocked, Leased, Dead, Done or Canceled"})
			return
		}
		var heads []*lister // of the shards; nil: nothing is left
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
				if len(l.page) == 0 {
					heads[shard] = nil
					continue
				}
				if first == nil || order(&l.page[0], &first.page[0]) < 0 {
					first = l
				}
			}
			if first == nil {
				return
			}
			t := first.page[0].TaskInfo
			first.page = first.page[1:]
			if !yield(t, nil) {
				return
			}
		}
	}
}

// listed is a task and its place in the order of its shard.
type listed struct {
	*TaskInfo
	at uint64
}

// listOrders are the orders in which the shards keep the tasks of each state.
var listOrders = map[State]func(a, b *listed) int{
	Ready: byLane, Leased: byLane, Scheduled: byTime,
	Blocked: byGroup, Dead: byGroup, Done: byGroup, Canceled: byGroup,
}

func byTime(a, b *listed) int {
	return cmp.Or(cmp.Compare(a.at, b.at), bytes.Compare(a.ID[:], b.ID[:]))
}

func byGroup(a, b *listed) int { return cmp.Or(strings.Compare(a.Queue, b.Queue), byTime(a, b)) }

func byLane(a, b *listed) int {
	return cmp.Or(strings.Compare(a.Queue, b.Queue), -cmp.Compare(a.Priority, b.Priority),
		strings.Compare(a.Tenant, b.Tenant), byTime(a, b))
}

// fill has a shard read on until there is a page, or nothing left.
func (q *Queue) fill(ctx context.Context, shard int, l *lister) error {
	for len(l.page) == 0 && l.more() {
		l.prepare()
		op := &readOp{completion: newCompletion(), list: l}
		if settled, err := q.do(ctx, shard, op); !settled {
			return base.EndOf(ctx)
		} else if err != nil {
			return err
		}
	}
	return nil
}
