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
	"codeq/internal/record"
)

// ListOptions selects the tasks that [Queue.List] yields.
type ListOptions struct {
	State    State     // required
	Queue    string    // "": all queues
	Tenants  []string  // none: all tenants; "" stands for tasks without one
	From, To time.Time // of [TaskInfo.At], by the wall clock: at or after From, and before To. Zero: no bound.
}

// List yields the tasks of one state, of all shards in one order:
//
//   - [Ready] and [Leased]: by queue, priority (highest first), tenant, and since when ready;
//   - [Scheduled]: by time;
//   - [Blocked]: by queue, by the awaited parents, group or limit, by time of the produce;
//   - [Dead], [Done], [Canceled]: by queue, end of their retention (rounded), time of the produce.
//
// List reads some hundred tasks of a shard at a time. Such a page is linearizable: it shows the
// shard at one moment, after all calls that returned before List began. Pages differ in their
// moments: a task that changes meanwhile may be missed. It ends after an error.
//
// Errors: [ErrInvalid] and the others of reads (see [Queue]), and that of ctx.
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
	// [Task.Group], [Unique.Key], the [ErrorKind] of [TaskInfo.LastError] and [Task.Kind]; "": any.
	Group, Key, ErrorKind, Kind string
	From, To                    time.Time // of [TaskInfo.At]: at or after From, and before To. Zero: no bound.
	// Text selects tasks with a text, up to 256 bytes, in ID, Kind, Tenant, Group, keys, LastError;
	// with Contents in Payload, Result, Headers and Metadata. Its ASCII letters match in either
	// case. Payloads and results that are no UTF-8 are not searched, but count in [Page.Encoded].
	Text     string
	Contents bool
}

// PageOptions says which tasks [Queue.ListPage] returns.
type PageOptions struct {
	TaskFilter
	Newest    bool   // reverses the order of time; that of queues, priorities and tenants stays
	NoPayload bool   // leaves out, and does not copy, [Task.Payload] and [TaskInfo.Result]
	Limit     int    // how many tasks the page has at the most, up to [MaxPage]. 0: 100.
	Cursor    string // [Page.Next] of the page before, with the same [TaskFilter] and Newest. "": first page.
}

// MaxPage is the largest number of tasks of a [Page].
const MaxPage = 1000

// Page is a part of a list.
type Page struct {
	Tasks []*TaskInfo
	// Next is the [PageOptions.Cursor] of the next page, fit for a URL; "": this is the last page.
	// It stays valid as long as the queue exists, on every node, whatever becomes of the tasks.
	Next    string
	Scanned int // stored tasks that were read for the page
	Encoded int // of these, tasks without Text, with a Payload or Result that is no UTF-8
}

// ListPage returns a page of the tasks that a filter selects, state by state in the order of
// [TaskFilter.States], each in the order of [Queue.List], and linearizable as there.
// [PageOptions.Newest] puts the latest first within a queue, priority and tenant, or within a
// queue; among [Scheduled], of all. Between two pages tasks may change: one that keeps its state
// and place is neither missed nor shown twice.
//
// A page costs by its tasks and the shards, if the filter has only States and, except of
// [Scheduled], Queue; of [Ready] and Scheduled also From and To, of Ready and [Leased] also
// Tenants. For anything else tasks are read that are not shown, some thousand for a page at the
// most: then it has fewer than Limit, or none, and a Next; fewer as well beyond 1 MiB. A page of
// Ready also visits the lanes (a queue, tenant and priority) of Queue, or all, in memory; one of
// Leased the leases; one of [Blocked], [Dead], [Done] or [Canceled] without Queue the queues: some
// thousand at a time between other calls.
//
// Errors: [ErrInvalid] (an altered position, too), those of reads (see [Queue]), and that of ctx.
func (q *Queue) ListPage(ctx context.Context, opts PageOptions) (_ *Page, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	return q.listPage(ctx, "PageOptions", &opts, nil)
}

// listPage is ListPage, without what died since begin, by each shard's clock; nil: with all.
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
	p := &Page{Tasks: r.Tasks, Scanned: r.Scanned, Encoded: r.Encoded}
	if r.Next != nil {
		p.Next = all.Text(r.Next)
	}
	return p, nil
}

func (f *TaskFilter) request(name string) (*listing.Request, error) {
	states := f.States
	if len(states) == 0 {
		states = []State{Ready, Scheduled, Blocked, Leased, Dead, Done, Canceled}
	}
	r := &listing.Request{Query: listing.Query{
		Queue: f.Queue, Tenants: slices.Clone(f.Tenants), From: f.From, To: f.To,
		Filter: listing.Filter{Group: f.Group, Key: f.Key, Error: f.ErrorKind, Kind: f.Kind},
	}}
	if r.Search = (listing.Search{Text: f.Text, Contents: f.Contents}); !r.Search.IsValid() {
		return nil, &InvalidError{name + ".Text", base.Shortly(f.Text), "1 to 256 bytes, or none without Contents"}
	}
	for i, s := range states {
		if !taskStates.Valid(s) || slices.Contains(states[:i], s) {
			return nil, &InvalidError{name + ".States", s, taskStates.Allowed() + ", each once"}
		}
		r.States = append(r.States, engine.TaskState(s))
	}
	return r, nil
}

// ErrorKind returns the common part of error texts, to group failures: "#" stands for each word
// with a digit, and "?" for quoted text. It has at most 256 bytes.
func ErrorKind(text string) string { return record.ErrorKind(text) }

// DeadKind counts the dead letters with one kind of error.
type DeadKind struct {
	Kind   string    // the [ErrorKind] of their [TaskInfo].LastError; "": they have none
	Other  bool      // the rest, without a kind of its own; Kind is ""
	Count  uint64    // dead letters
	Queues []string  // of them, up to 10, those with the most first
	LastAt time.Time // when the last one died, even if it was redriven or removed; zero: not known
	Last   ID        // of that one; zero: it is no dead letter any more
	// Days has how many died on the day of LastAt, and on each of the 13 before: days of UTC, by
	// the shard's clock, which never goes back.
	Days [14]uint64
}

// DeadKinds counts the dead letters of a queue, or of all for "", by kind, the most first, at most
// 1,000; a last one with Other has the rest. The counts are kept: a read costs microseconds for
// each queue. Of those of a queue and shard that expire together (by default all), 64 kinds are
// counted, the first ones: a later one, even of most tasks, is in the rest, with those that are not
// counted yet after an upgrade or a repair. Each shard is shown at one moment, linearizable.
//
// Errors: [ErrFormat] (in a cluster, of nodes that do not know it yet), those of reads (see
// [Queue]), and that of ctx.
func (q *Queue) DeadKinds(ctx context.Context, queue string) (_ []DeadKind, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	parts := make([]listing.DeadKinds, len(q.replicas))
	if err = q.inParallel("reading of kinds of errors", len(parts), func(shard int) error {
		parts[shard].Queue = queue
		return q.read(ctx, shard, callDeadKinds, &parts[shard])
	}); err != nil {
		return nil, err
	}
	kinds := []DeadKind{}
	for _, k := range listing.SumKinds(parts) {
		of := DeadKind{Kind: k.Text, Other: k.Other, Count: k.Count.Count, Last: k.Count.Last, Days: k.Count.Days, Queues: k.Names()}
		if k.Count.At > 0 {
			of.LastAt = msTime(k.Count.At)
		}
		kinds = append(kinds, of)
	}
	return kinds, nil
}

func listKey(t *TaskInfo) listing.Key {
	return listing.Key{Queue: t.Queue, Tenant: t.Tenant, Priority: t.Priority, ID: t.ID}
}

type listed = listing.Item[TaskInfo]

// lister reads the tasks of one shard, by one call for each page.
type lister = listing.Reader[TaskInfo]

func newLister(q listing.Query) *lister { return listing.NewReader(q, taskInfo) }
