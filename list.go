package codeq

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/schema"
	"codeq/internal/store"
	"codeq/internal/wire"

	"github.com/cockroachdb/pebble/v2"
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

var stateRange = map[State]byte{
	Ready: keys.Task, Leased: keys.Task, Scheduled: keys.Scheduled, Blocked: keys.Blocked,
	Dead: keys.Dead, Done: keys.Done, Canceled: keys.Canceled,
}

// lister reads the tasks of one shard in their order, page by page. It travels to the
// shard's owner and, in a cluster, to the node that leads the shard, and back.
//
//   - Ready: the lanes, each from the first task on that it has ready. The owner says
//     where that is, so that nobody walks what was consumed, or is leased, before it.
//     Then it says which tasks of the page are leased all the same.
//   - Leased: the lease table, some thousand entries at a time, and then task by task.
//   - Scheduled: the tasks of all queues, in the order of time. An entry of another queue
//     is passed over at the cost of reading its lane. An index by queue would make each
//     task that is scheduled, and each that becomes due, write another key.
//   - The others: the queues, as they are stored.
type lister struct {
	opts  ListOptions
	begun bool   // it is known what there is to read
	spans []span // what is left to read, once it has begun
	sent  int    // of spans: so many the reader knows
	page  []listed

	left  int                 // lanes, or entries of the lease table, that are not looked at yet
	lanes []engine.LaneRef    // those that have been, of Ready
	found []engine.LeasedTask // those that have been, of Leased; what is left of them, in order, once sorted
	order bool                // found is sorted

	number uint32           // of opts.Queue
	asked  []engine.TaskKey // those of the page about whose leases the owner is asked
	read   int              // spans that the page has read to their ends
	from   []byte           // where the next of them goes on; nil: at its beginning
}

// span is a range of keys, or one key if to is empty.
type span struct{ from, to []byte }

const (
	listPage  = 256     // tasks that a page has at the most
	listBytes = 1 << 20 // of records in a page, beyond the first
	listScan  = 4096    // entries that a page passes over at the most
	surveyCap = 4096    // lanes or leases that one visit of the owner looks at
	spanCap   = 256     // lanes of which one visit tells where they begin
)

func newLister(o ListOptions) *lister { return &lister{opts: o, left: math.MaxInt} }

func (l *lister) more() bool { return !l.begun || len(l.spans) > 0 || len(l.found) > 0 }

// prepare turns the next of the leased tasks that were found into spans.
func (l *lister) prepare() {
	if !l.begun || l.opts.State != Leased || len(l.spans) > 0 {
		return
	}
	if !l.order {
		slices.SortFunc(l.found, compareLeased)
		l.found = slices.Compact(l.found) // a lease may have moved in the table
		l.order = true
	}
	for _, t := range l.found[:min(listPage, len(l.found))] {
		l.spans = append(l.spans, span{from: keys.AppendTask(nil, t.Lane.Number, t.Since, t.ID)})
	}
	l.found = l.found[len(l.spans):]
}

func compareLeased(a, b engine.LeasedTask) int {
	if a.Lane != b.Lane {
		if c := cmp.Or(compareLanes(a.Lane, b.Lane), cmp.Compare(a.Lane.Number, b.Lane.Number)); c != 0 {
			return c
		}
	}
	return cmp.Or(cmp.Compare(a.Since, b.Since), bytes.Compare(a.ID[:], b.ID[:]))
}

// compareLanes is the order of lanes in a list.
func compareLanes(a, b engine.LaneRef) int {
	return cmp.Or(strings.Compare(a.Queue, b.Queue), -cmp.Compare(a.Priority, b.Priority),
		strings.Compare(a.Tenant, b.Tenant))
}

// visit is the owner's part of reading v, which it has just taken.
func (l *lister) visit(s *shard, v *view) {
	switch {
	case !l.begun:
		l.survey(s)
		return
	case stateRange[l.opts.State] != keys.Task:
		return
	case l.opts.State == Leased:
		l.asked = l.asked[:0]
		for _, sp := range l.spans[:min(listPage, len(l.spans))] {
			if lane, since, id, err := keys.ParseTask(sp.from); err == nil {
				l.asked = append(l.asked, engine.TaskKey{Lane: lane, Since: since, ID: id})
			}
		}
	case l.asked == nil:
		l.skipConsumed(s)
	}
	for i := range l.asked {
		v.addLease(&s.State, l.asked[i].ID)
	}
}

// survey looks at what memory has of what is asked for.
func (l *lister) survey(s *shard) {
	name := l.opts.Queue
	if name != "" {
		number, counts, ok := s.CountsOf(name)
		if !ok || countIn(&counts, l.opts.State) == 0 {
			l.begun = true
			return
		}
		l.number = number
	}
	switch l.opts.State {
	case Ready:
		l.lanes, l.left = s.LanesBefore(name, l.left, surveyCap, l.lanes)
	case Leased:
		l.found, l.left = s.LeasedBefore(name, l.left, surveyCap, l.found)
	}
}

func countIn(c *keys.Counts, state State) uint64 {
	switch state {
	case Ready:
		return c.Ready
	case Leased:
		return c.Leased
	case Scheduled:
		return c.Scheduled
	case Blocked:
		return c.Blocked
	case Dead:
		return c.Dead
	case Done:
		return c.Done
	}
	return c.Canceled
}

// skipConsumed has the next lanes begin at their first tasks that are ready.
func (l *lister) skipConsumed(s *shard) {
	kept := min(spanCap, len(l.spans))
	for i := kept - 1; i >= 0; i-- {
		sp := l.spans[i]
		if len(sp.from) >= keys.LaneLen {
			n := keys.LaneOfTask(sp.from)
			pos, ok := s.FirstReady(n)
			if !ok {
				continue
			}
			if from := keys.AppendFrom(nil, n, pos.Since, pos.ID); bytes.Compare(from, sp.from) > 0 {
				sp.from = from
			}
		}
		kept--
		l.spans[kept] = sp
	}
	l.spans = l.spans[kept:]
}

// readFrom reads on. again asks for another visit of the owner.
func (l *lister) readFrom(v *view) (again bool, err error) {
	l.page = l.page[:0]
	switch prefix := stateRange[l.opts.State]; {
	case !l.begun:
		return l.begin(v)
	case prefix == keys.Task && l.opts.State == Ready && l.asked == nil:
		err = l.collect(v)
		if err == nil && len(l.asked) > 0 {
			return true, nil
		}
	case prefix == keys.Task:
		err = l.readAsked(v)
	default:
		err = l.readPage(v)
	}
	if err == nil {
		l.advance()
	}
	return false, err
}

// advance leaves behind what the page has read.
func (l *lister) advance() {
	l.spans = l.spans[l.read:]
	if l.from != nil {
		l.spans[0].from = l.from
	}
	l.asked, l.read, l.from = nil, 0, nil
}

// begin finds the ranges of keys to read.
func (l *lister) begin(v *view) (again bool, err error) {
	switch prefix := stateRange[l.opts.State]; {
	case l.opts.State == Leased:
		l.found = slices.DeleteFunc(l.found, func(t engine.LeasedTask) bool { return !l.hasTenant(t.Lane.Tenant) })
		l.begun = l.left == 0
		return false, nil
	case l.opts.State == Ready:
		if l.left > 0 {
			return true, nil
		}
		l.beginLanes()
	case prefix == keys.Scheduled:
		lower, upper := keys.Range(prefix)
		if !l.opts.From.IsZero() {
			lower = keys.AppendScheduled(nil, runAtMillis(l.opts.From), ID{})
		}
		l.spans = []span{{lower, upper}}
	case l.opts.Queue != "":
		l.addQueue(prefix, l.number)
	default:
		err = l.beginQueues(v, prefix)
	}
	l.begun = true
	return false, err
}

func (l *lister) beginLanes() {
	l.lanes = slices.DeleteFunc(l.lanes, func(ln engine.LaneRef) bool { return !l.hasTenant(ln.Tenant) })
	slices.SortFunc(l.lanes, compareLanes)
	for _, ln := range slices.Compact(l.lanes) {
		lower := keys.AppendLane(nil, ln.Number)
		l.spans = append(l.spans, span{lower, keys.GroupEnd(lower)})
	}
	l.lanes = nil
}

func (l *lister) beginQueues(v *view, prefix byte) error {
	type named struct {
		name   string
		number uint32
	}
	var queues []named
	err := schema.Scan(v.snap, keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		queues = append(queues, named{string(value), n})
		return err
	})
	slices.SortFunc(queues, func(a, b named) int { return strings.Compare(a.name, b.name) })
	for _, q := range queues {
		l.addQueue(prefix, q.number)
	}
	return err
}

func (l *lister) addQueue(prefix byte, number uint32) {
	lower := keys.AppendNumbered(nil, prefix, number)
	l.spans = append(l.spans, span{lower, keys.GroupEnd(lower)})
}

func (l *lister) hasTenant(tenant string) bool {
	return len(l.opts.Tenants) == 0 || slices.Contains(l.opts.Tenants, tenant)
}

// walk visits the entries of the spans in order, until visit wants no more of them.
func (l *lister) walk(v *view, visit func(it *pebble.Iterator) (more bool, err error)) error {
	lower, upper := keys.Range(stateRange[l.opts.State])
	it, err := v.snap.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	l.from = nil                      // of a page that is read again
	for l.read = 0; l.read < len(l.spans); l.read++ {
		it.SetBounds(l.spans[l.read].from, l.spans[l.read].to)
		for valid := it.First(); valid; valid = it.Next() {
			more, err := visit(it)
			if err != nil {
				return err
			}
			if !more {
				l.from = bytes.Clone(it.Key())
				return nil
			}
		}
		if err := it.Error(); err != nil {
			return store.Error(err)
		}
	}
	return nil
}

// collect finds the tasks of the next page that are ready or leased.
func (l *lister) collect(v *view) error {
	size := 0
	return l.walk(v, func(it *pebble.Iterator) (bool, error) {
		if len(l.asked) == listPage || size > listBytes {
			return false, nil
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		size += len(value)
		lane, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		l.asked = append(l.asked, engine.TaskKey{Lane: lane, Since: since, ID: id})
		return true, nil
	})
}

// readAsked reads the tasks about which the owner was asked. One that has left its place
// meanwhile is left out.
func (l *lister) readAsked(v *view) error {
	size := 0
	for i, t := range l.asked {
		if l.opts.State == Leased { // each is a span
			if l.read = i; size > listBytes {
				return nil
			}
			l.read++
		}
		value, err := schema.Lookup(v.snap, keys.AppendTask(nil, t.Lane, t.Since, t.ID))
		if err != nil {
			return err
		}
		if value == nil {
			continue
		}
		size += len(value)
		if err := l.add(v, t.ID, keys.Place{Range: keys.Task, Group: t.Lane, At: t.Since}, value); err != nil {
			return err
		}
	}
	return nil
}

// readPage reads the next page of tasks that are in no lane.
func (l *lister) readPage(v *view) error {
	size, n := 0, 0
	return l.walk(v, func(it *pebble.Iterator) (bool, error) {
		if len(l.page) == listPage || size > listBytes || n == listScan {
			return false, nil
		}
		n++
		value, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		id, p, err := keys.ParsePlaceKey(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if p.Range == keys.Scheduled && l.opts.Queue != "" {
			number, _, err := keys.SplitLane(value)
			if err != nil {
				return false, fmt.Errorf("%w: task %s: %w", ErrCorrupt, ID(id), err)
			}
			if ln, err := v.Lane(number); err != nil || ln.Queue != l.opts.Queue {
				return true, err
			}
		}
		size += len(value)
		return true, l.add(v, id, p, value)
	})
}

// add puts a task into the page if it is one of those asked for.
func (l *lister) add(v *view, id ID, p keys.Place, value []byte) error {
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

// encode appends what is to be read next.
func (l *lister) encode(dst []byte) []byte {
	dst = wire.AppendBytes(dst, appendJSON(nil, &l.opts))
	dst = wire.AppendUint(wire.AppendBool(dst, l.begun), uint64(l.left))
	l.sent = min(spanCap, len(l.spans))
	return appendSpans(dst, l.spans[:l.sent])
}

func (l *lister) decode(r *wire.Reader) {
	readJSON(r, r.Bytes(), &l.opts)
	l.begun, l.left = r.Bool(), int(min(r.Uint(), math.MaxInt))
	l.spans = readSpans(r)
	l.sent = len(l.spans)
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
	dst = wire.AppendUint(wire.AppendBool(dst, l.begun), uint64(l.left))
	dst = appendSpans(dst, l.spans)
	dst = wire.AppendUint(dst, uint64(len(l.found)))
	for _, t := range l.found {
		dst = wire.AppendBytes(dst, t.Lane.Queue)
		dst = append(wire.AppendBytes(dst, t.Lane.Tenant), t.Lane.Priority)
		dst = wire.AppendUint(wire.AppendUint(dst, uint64(t.Lane.Number)), t.Since)
		dst = append(dst, t.ID[:]...)
	}
	sent := make([]sentTask, len(l.page))
	for i, t := range l.page {
		sent[i] = sentTask{t.TaskInfo, t.at}
	}
	return appendJSON(dst, sent)
}

func (l *lister) decodePage(r *wire.Reader) {
	begun, left := r.Bool(), int(min(r.Uint(), math.MaxInt))
	spans := readSpans(r)
	var found []engine.LeasedTask
	for range r.Count(6 + keys.IDLen) {
		queue, tenant, priority := r.String(), r.String(), r.Byte()
		number, since := uint32(r.Uint()), r.Uint()
		found = append(found, engine.LeasedTask{
			Lane:  engine.LaneRef{Number: number, LaneKey: engine.LaneKey{Queue: queue, Tenant: tenant, Priority: priority}},
			Since: since, ID: keys.ReadID(r),
		})
	}
	var sent []sentTask
	if readJSON(r, r.Rest(), &sent); r.Failed() {
		return
	}
	l.begun, l.left, l.found = begun, left, append(l.found, found...)
	l.spans = append(spans, l.spans[l.sent:]...)
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
