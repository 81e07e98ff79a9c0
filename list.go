package codeq

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/listing"
)

// ListOptions selects the tasks that [Queue.List] yields.
type ListOptions struct {
	State   State    // required
	Queue   string   // "": all queues
	Tenants []string // none: all tenants; "" stands for tasks without one
	// From and To bound [TaskInfo.At], which is by the wall clock: at or after From, and before To.
	// Zero: no bound.
	From, To time.Time
}

// List yields the tasks of one state, of all shards in one order:
//
//   - [Ready] and [Leased]: by queue, by priority (the highest first), by tenant, then by the time
//     since when they are ready;
//   - [Scheduled]: by time;
//   - [Blocked]: by queue; tasks that wait for the same parents, group or limit are together, by
//     the time of their produce;
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
			heads[i] = newLister(listing.Query{
				State: engine.TaskState(opts.State), Queue: opts.Queue, Tenants: opts.Tenants, From: opts.From, To: opts.To,
			})
		}
		read := func(shard int, l *lister) error { return q.read(ctx, shard, callPage, l) }
		err := listing.Merge(heads, listKey, read, func(t *TaskInfo) bool { return yield(t, nil) })
		if err != nil {
			yield(nil, base.Prefixed(err))
		}
	}
}

// TaskFilter selects tasks, for [Queue.ListPage] and [Queue.Bulk]. The zero TaskFilter selects all.
type TaskFilter struct {
	States  []State  // each once. None: all
	Queue   string   // "": all queues
	Tenants []string // none: all tenants; "" stands for tasks without one
	// Group, Key and ErrorKind are [Task.Group], the Key of [Task.Unique], and the [ErrorKind] of
	// [TaskInfo.LastError]. "": any.
	Group, Key, ErrorKind string
	// From and To bound [TaskInfo.At]: at or after From, and before To. Zero: no bound.
	From, To time.Time
}

// PageOptions says which tasks [Queue.ListPage] returns.
type PageOptions struct {
	TaskFilter
	// Newest reverses the order of time; that of queues, priorities and tenants stays.
	Newest bool
	// NoPayload leaves out [Task.Payload] and [TaskInfo.Result]: they are not copied, and not sent
	// between nodes.
	NoPayload bool
	// Limit is how many tasks the page has at the most, up to [MaxPage]. 0: 100.
	Limit int
	// Cursor is [Page.Next] of the page before, with the same [TaskFilter] and Newest. "": the
	// first page.
	Cursor string
}

// MaxPage is the largest number of tasks of a [Page].
const MaxPage = 1000

// Page is a part of a list.
type Page struct {
	Tasks []*TaskInfo
	// Next is the [PageOptions.Cursor] of the next page, a text that may be a part of a URL. "":
	// this is the last page. It stays valid as long as the queue exists, on every node, after
	// restarts and other leaders, whatever becomes of the tasks.
	Next    string
	Scanned int // stored tasks that were read for the page
}

// ListPage returns a page of the tasks that a filter selects, state by state in the order of
// [TaskFilter.States], each in the order of [Queue.List].
//
// [PageOptions.Newest] puts the latest first within a queue, priority and tenant, or within a
// queue; among [Scheduled], of all.
//
// Each shard is read as by List, at one moment of its own, and linearizably. Between two pages
// tasks may change: one that stays in its state and its place in this order is neither missed nor
// shown twice.
//
// A page costs by the tasks that it returns, and by the shards, if the filter has only States and,
// except of [Scheduled], Queue; of [Ready] and Scheduled also From and To, of Ready and [Leased]
// also Tenants. For anything else tasks are read that are not shown, some thousand for a page at
// the most: then it has fewer tasks than Limit, or none, and a Next. It has fewer as well if they
// have more than 1 MiB together. A page of Ready also visits the lanes of the queue, or of all
// queues, in memory (a lane is a queue, tenant and priority); one of Leased the leases of each
// shard; one of [Blocked], [Dead], [Done] or [Canceled] the queues, unless the filter has one. They
// are visited some thousand at a time, between which other calls go on.
//
// Errors: [ErrInvalid] (also for a Cursor that is none of this list, or was altered), [ErrCorrupt],
// [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed], and that of ctx.
func (q *Queue) ListPage(ctx context.Context, opts PageOptions) (_ *Page, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	return q.listPage(ctx, "PageOptions", &opts, nil)
}

// listPage is ListPage, without what died since begin, a time by the clock of each shard; nil: with
// all. of is the struct of the caller, for errors.
func (q *Queue) listPage(ctx context.Context, of string, o *PageOptions, begin []time.Time) (*Page, error) {
	if o.Limit < 0 || o.Limit > MaxPage {
		return nil, &InvalidError{"PageOptions.Limit", o.Limit, fmt.Sprint("0 to ", MaxPage)}
	}
	all, err := o.request(of)
	if err != nil {
		return nil, err
	}
	if all.Newest, all.NoPayload, all.Limit = o.Newest, o.NoPayload, cmp.Or(o.Limit, 100); ctx.Err() != nil {
		return nil, base.EndOf(ctx)
	}
	from, ok := all.Parse(o.Cursor)
	if !ok {
		return nil, &InvalidError{of + ".Cursor", strconv.Quote(o.Cursor), "Next of the same selection"}
	}
	r, err := listing.ReadPage(all, from, newLister, len(q.replicas), listKey, func(shard int, l *lister) error {
		err := q.read(ctx, shard, callPage, l)
		if err == nil && begin != nil {
			l.Page = slices.DeleteFunc(l.Page, func(i listed) bool {
				return i.Task.State == Dead && !msTime(cmp.Or(i.Stamp, uint64(i.Task.At.UnixMilli()))).Before(begin[shard])
			})
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	p := &Page{Tasks: r.Tasks, Scanned: r.Scanned}
	if r.Next != nil {
		p.Next = all.Text(r.Next)
	}
	return p, nil
}

// request makes the request to package listing. name is used in errors.
func (f *TaskFilter) request(name string) (*listing.Request, error) {
	states := f.States
	if len(states) == 0 {
		states = []State{Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled}
	}
	r := &listing.Request{Query: listing.Query{
		Queue: f.Queue, Tenants: slices.Clone(f.Tenants), From: f.From, To: f.To,
		Filter: listing.Filter{Group: f.Group, Key: f.Key, Error: f.ErrorKind},
	}}
	for i, s := range states {
		if !taskStates.Valid(s) || slices.Contains(states[:i], s) {
			return nil, &InvalidError{name + ".States", s, taskStates.Allowed() + ", each once"}
		}
		r.States = append(r.States, engine.TaskState(s))
	}
	return r, nil
}

// ErrorKind returns the common part of error texts that differ by numbers, identifiers and quoted
// values, so that failures can be grouped: "#" stands for each word with a digit, and "?" for
// quoted text. It is no longer than 256 bytes.
func ErrorKind(text string) string { return listing.ErrorKind(text) }

func listKey(t *TaskInfo) listing.Key {
	return listing.Key{Queue: t.Queue, Tenant: t.Tenant, Priority: t.Priority, ID: t.ID}
}

// listed is a task and its place in the order of its shard.
type listed = listing.Item[TaskInfo]

// lister reads the tasks of one shard, by one call for each page.
type lister = listing.Reader[TaskInfo]

func newLister(q listing.Query) *lister { return listing.NewReader(q, taskInfo) }
