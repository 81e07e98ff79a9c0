package codeq

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// ListOptions says which tasks List yields.
type ListOptions struct {
	State   State    // required
	Queue   string   // "": of all queues
	Tenants []string // none: of all tenants; "" stands for tasks without one
	// From and To bound TaskInfo.At: at or after From, and before To. Zero: no bound.
	From, To time.Time
}

// listPage is how many stored tasks List reads of a shard at a time.
const listPage = 256

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
func (q *Queue) List(ctx context.Context, opts ListOptions) iter.Seq2[*TaskInfo, error] {
	opts.Tenants = slices.Clone(opts.Tenants)
	return func(yield func(*TaskInfo, error) bool) {
		order, ok := listOrders[opts.State]
		if !ok {
			yield(nil, &InvalidError{"ListOptions.State", opts.State, "Ready, Scheduled, Blocked, Leased, Dead, Done or Canceled"})
			return
		}
		var heads []*lister // of the shards; nil: nothing is left
		for range q.replicas {
			heads = append(heads, &lister{opts: opts})
		}
		for {
			var first *lister
			for shard, l := range heads {
				if l == nil {
					continue
				}
				if err := q.fill(ctx, shard, l); err != nil {
					yield(nil, err)
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

var stateRange = map[State]byte{
	Ready: keys.Task, Leased: keys.Task, Scheduled: keys.Scheduled, Blocked: keys.Blocked,
	Dead: keys.Dead, Done: keys.Done, Canceled: keys.Canceled,
}

// lister reads the tasks of one shard in their order, page by page.
type lister struct {
	opts  ListOptions
	begun bool
	spans []span // what is left to read, once it has begun
	page  []listed
}

// span is a range of keys.
type span struct{ from, to []byte }

// fill has a shard read on until there is a page, or nothing left.
func (q *Queue) fill(ctx context.Context, shard int, l *lister) error {
	for len(l.page) == 0 && (!l.begun || len(l.spans) > 0) {
		op := &readOp{completion: newCompletion(), list: l}
		if settled, err := q.do(ctx, shard, op); !settled {
			return context.Cause(ctx)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// read reads a page, of as many spans as it takes.
func (l *lister) read(v *view) error {
	if !l.begun {
		if err := l.begin(v); err != nil {
			return err
		}
		l.begun = true
	}
	return l.readPage(v)
}

// begin finds the ranges of keys to read.
func (l *lister) begin(v *view) error {
	prefix := stateRange[l.opts.State]
	if prefix == keys.Scheduled {
		lower, upper := keys.Range(prefix)
		if !l.opts.From.IsZero() {
			lower = keys.AppendScheduled(nil, runAtMillis(l.opts.From), ID{})
		}
		l.spans = []span{{lower, upper}}
		return nil
	}
	if prefix == keys.Task {
		return l.beginLanes(v)
	}
	type named struct {
		name   string
		number uint32
	}
	var queues []named
	err := scan(v.snap, keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if l.opts.Queue == "" || l.opts.Queue == string(value) {
			queues = append(queues, named{string(value), n})
		}
		return err
	})
	slices.SortFunc(queues, func(a, b named) int { return strings.Compare(a.name, b.name) })
	for _, q := range queues {
		lower := keys.AppendNumbered(nil, prefix, q.number)
		l.spans = append(l.spans, span{lower, keys.GroupEnd(lower)})
	}
	return err
}

func (l *lister) beginLanes(v *view) error {
	var lanes []*lane
	var numbers []uint32
	err := scan(v.snap, keys.Lane, func(key, _ []byte) error {
		n, err := keys.ParseNumbered(key)
		numbers = append(numbers, n)
		return err
	})
	if err != nil {
		return err
	}
	for _, n := range numbers {
		ln, err := v.lane(n)
		if err != nil {
			return err
		}
		if (l.opts.Queue == "" || l.opts.Queue == ln.queue.name) && l.hasTenant(ln.tenant) {
			lanes = append(lanes, ln)
		}
	}
	slices.SortFunc(lanes, func(a, b *lane) int {
		return cmp.Or(strings.Compare(a.queue.name, b.queue.name), -cmp.Compare(a.priority, b.priority),
			strings.Compare(a.tenant, b.tenant))
	})
	for _, ln := range lanes {
		lower := keys.AppendLane(nil, ln.number)
		l.spans = append(l.spans, span{lower, keys.GroupEnd(lower)})
	}
	return nil
}

func (l *lister) hasTenant(tenant string) bool {
	return len(l.opts.Tenants) == 0 || slices.Contains(l.opts.Tenants, tenant)
}

func (l *lister) readPage(v *view) error {
	l.page = l.page[:0]
	for n := 0; len(l.spans) > 0; l.spans = l.spans[1:] {
		sp := &l.spans[0]
		it, err := v.snap.NewIter(&pebble.IterOptions{LowerBound: sp.from, UpperBound: sp.to})
		if err != nil {
			return storageError(err)
		}
		for valid := it.First(); valid; valid = it.Next() {
			if n == listPage {
				sp.from = bytes.Clone(it.Key())
				return it.Close()
			}
			n++
			if err = l.add(v, it); err != nil {
				break
			}
		}
		if err = cmp.Or(err, storageError(it.Error())); err != nil {
			_ = it.Close() // its error is that of it.Error
			return err
		}
		if err := it.Close(); err != nil {
			return storageError(err)
		}
	}
	return nil
}

// add puts a task into the page if it is one of those asked for.
func (l *lister) add(v *view, it *pebble.Iterator) error {
	value, err := it.ValueAndErr()
	if err != nil {
		return storageError(err)
	}
	id, p, err := keys.ParsePlaceKey(it.Key())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	t, err := v.info(id, p, value)
	if err != nil {
		return err
	}
	o := &l.opts
	if t.State == o.State && (o.Queue == "" || t.Queue == o.Queue) && l.hasTenant(t.Tenant) &&
		(o.From.IsZero() || !t.At.Before(o.From)) && (o.To.IsZero() || t.At.Before(o.To)) {
		l.page = append(l.page, listed{t, p.At})
	}
	return nil
}

// encode appends what is to be read.
func (l *lister) encode(dst []byte) []byte {
	dst = wire.AppendBytes(dst, appendJSON(nil, &l.opts))
	return appendSpans(wire.AppendBool(dst, l.begun), l.spans)
}

func (l *lister) decode(r *wire.Reader) {
	readJSON(r, r.Bytes(), &l.opts)
	l.begun, l.spans = r.Bool(), readSpans(r)
	if _, ok := listOrders[l.opts.State]; !ok {
		r.Fail()
	}
}

// sentTask is a task of a page as it travels.
type sentTask struct {
	*TaskInfo
	Order uint64
}

// encodePage appends what has been read, and what is left to read.
func (l *lister) encodePage(dst []byte) []byte {
	sent := make([]sentTask, len(l.page))
	for i, t := range l.page {
		sent[i] = sentTask{t.TaskInfo, t.at}
	}
	return appendJSON(appendSpans(dst, l.spans), sent)
}

func (l *lister) decodePage(r *wire.Reader) {
	spans := readSpans(r)
	var sent []sentTask
	if readJSON(r, r.Rest(), &sent); r.Failed() {
		return
	}
	l.begun, l.spans = true, spans
	for _, t := range sent {
		l.page = append(l.page, listed{t.TaskInfo, t.Order})
	}
}

func appendSpans(dst []byte, spans []span) []byte {
	dst = wire.AppendUint(dst, uint64(len(spans)))
	for _, sp := range spans {
		dst = wire.AppendBytes(wire.AppendBytes(dst, sp.from), sp.to)
	}
	return dst
}

func readSpans(r *wire.Reader) []span {
	spans := make([]span, r.Count(2))
	for i := range spans {
		spans[i] = span{r.Bytes(), r.Bytes()}
	}
	return spans
}
