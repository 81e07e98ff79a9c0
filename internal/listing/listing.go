// Package listing reads the tasks of one state from a shard, page by page, in an order that all
// shards share, so that their pages can be merged. The owner of the shard adds data from its
// memory, in short visits; the rest is read from a snapshot, concurrently with the owner.
package listing

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Query selects the tasks to read.
type Query struct {
	State    engine.TaskState
	Queue    string    // "": all queues
	Tenants  []string  // none: all tenants
	From, To time.Time // bounds of store.Task.Shown
	Filter
}

// isValid reports whether the state exists.
func (q *Query) isValid() bool { return q.State >= engine.Ready && q.State <= engine.Canceled }

func (q *Query) append(dst []byte) []byte {
	dst = wire.AppendBytes(append(dst, byte(q.State)), q.Queue)
	dst = wire.AppendStrings(dst, q.Tenants)
	for _, t := range [...]time.Time{q.From, q.To} {
		dst = wire.AppendUint(wire.AppendInt(dst, t.Unix()), uint64(t.Nanosecond()))
	}
	return dst
}

func readQuery(r *wire.Reader) Query {
	q := Query{State: engine.TaskState(r.Byte()), Queue: r.String(), Tenants: r.Strings()}
	for _, t := range [...]*time.Time{&q.From, &q.To} {
		*t = time.Unix(r.Int(), int64(r.Uint()))
	}
	return q
}

// Item is a task as converted by show, and its place in the order of its shard.
type Item[T any] struct {
	Task *T
	At   uint64
	Size int `json:",omitzero"` // of a page: the shown bytes of the record
	// Stamp is store.Task.Stamp, if Shown differs from it.
	Stamp uint64 `json:",omitzero"`
}

// rangeOf maps each state to the range of its tasks.
var rangeOf = [...]byte{
	engine.Ready: keys.Task, engine.Leased: keys.Task, engine.Scheduled: keys.Scheduled, engine.Blocked: keys.Blocked,
	engine.Dead: keys.Dead, engine.Done: keys.Done, engine.Canceled: keys.Canceled,
}

// addLease adds the clocks to a snapshot, and the lease of a task if it has one. The owner of the
// shard calls it.
func addLease(v *store.Snapshot, rules *engine.State, id keys.ID) {
	v.Clock = rules.Clock()
	if l, ok := rules.Leases.LeaseOf(id); ok {
		v.Leases[id] = l
	}
}

// Reader reads the tasks of one shard in their order, page by page. For each page it is passed to
// the shard's owner and, in a cluster, to the node that leads the shard, and back.
//
//   - Ready: the lanes, each from its first ready task. The owner has its position, so that
//     consumed and leased tasks before it are not read. Then the owner adds the leases of tasks on
//     the page.
//   - Leased: the lease table, some thousand entries at a time, then task by task.
//   - Scheduled: the tasks of all queues, in the order of time. Skipping an entry of another queue
//     costs a read of its lane. An index by queue would cost another written key when a task is
//     scheduled, and when it becomes due.
//   - The other states: queue by queue, in the stored order.
type Reader[T any] struct {
	Query
	// Page holds the tasks of the last Look.
	Page []Item[T]

	show func(*store.Task) *T

	begun bool   // spans have been found
	spans []span // the rest to read, once begun
	sent  int    // number of spans known to the caller

	left   int                 // lanes, queues, or entries of the lease table, not surveyed yet
	lanes  []engine.LaneRef    // for Ready: the surveyed ones
	queues []engine.QueueRef   // likewise, if there is an index by queue
	found  []engine.LeasedTask // for Leased: surveyed and not read yet; see order
	order  bool                // found is sorted

	paging                 // of a page
	asked  []store.TaskKey // tasks of the page; the owner adds their leases
	read   int             // number of spans that the page has finished
	from   []byte          // position in the next span; nil: its beginning
}

// NewReader returns a Reader for q. show converts a task.
func NewReader[T any](q Query, show func(*store.Task) *T) *Reader[T] {
	return &Reader[T]{
		Query: q, show: show, left: math.MaxInt,
		paging: paging{Groups: surveyCap, Tasks: PageTasks, Scan: pageScan, Bytes: pageBytes},
	}
}

// Again drops the data of one leader of the shard, before the call is repeated.
func (l *Reader[T]) Again() {
	l.asked = nil
	if !l.begun {
		l.restart()
	}
}

// span is a range of keys, or one key if to is empty.
type span struct{ from, to []byte }

const (
	PageTasks = 256     // maximum of tasks of a page
	pageBytes = 1 << 20 // bytes of the records of a page, without the first
	pageScan  = 4096    // maximum of entries that a page skips
	surveyCap = 4096    // lanes or leases that the owner surveys in one visit
	spanCap   = 256     // lanes for which the owner finds the first ready task in one visit
)

// More reports whether anything is left to read.
func (l *Reader[T]) More() bool { return !l.begun || len(l.spans) > 0 || len(l.found) > 0 }

// prepare turns the next found leased tasks into spans.
func (l *Reader[T]) prepare() {
	if !l.begun || l.State != engine.Leased || len(l.spans) > 0 {
		return
	}
	if !l.order {
		l.sortFound()
		l.order = true
	}
	for _, t := range l.found[:min(l.limits().Tasks, len(l.found))] {
		l.spans = append(l.spans, span{from: keys.AppendTask(nil, t.Lane.Number, t.Since, t.ID)})
	}
	l.found = l.found[len(l.spans):]
}

// sortFound sorts leased tasks, each once: a lease may have moved in the table.
func (l *Reader[T]) sortFound() {
	slices.SortFunc(l.found, func(a, b engine.LeasedTask) int {
		if a.Lane != b.Lane {
			if c := cmp.Or(compareLanes(a.Lane, b.Lane), cmp.Compare(a.Lane.Number, b.Lane.Number)); c != 0 {
				return c
			}
		}
		return l.byTime(a.Since, b.Since, &a.ID, &b.ID)
	})
	l.found = slices.Compact(l.found)
}

// compareLanes compares lanes in the order of lists.
func compareLanes(a, b engine.LaneRef) int {
	return cmp.Or(strings.Compare(a.Queue, b.Queue), -cmp.Compare(a.Priority, b.Priority),
		strings.Compare(a.Tenant, b.Tenant))
}

// Visit is called by the owner right after it has taken v, and adds data from memory.
func (l *Reader[T]) Visit(rules *engine.State, v *store.Snapshot) {
	v.Clock = rules.Clock()
	switch {
	case !l.begun:
		l.survey(rules)
		return
	case rangeOf[l.State] != keys.Task:
		return
	case l.State == engine.Leased:
		l.asked = l.asked[:0]
		for _, sp := range l.spans[:min(PageTasks, len(l.spans))] {
			if lane, since, id, err := keys.ParseTask(sp.from); err == nil {
				l.asked = append(l.asked, store.TaskKey{Lane: lane, Since: since, ID: id})
			}
		}
	case l.asked == nil:
		l.skipConsumed(rules)
	}
	for i := range l.asked {
		addLease(v, rules, l.asked[i].ID)
	}
}

// survey collects the next lanes or leases from memory.
func (l *Reader[T]) survey(rules *engine.State) {
	name, number := l.Queue, uint32(0)
	if name != "" {
		var counts keys.Counts
		if number, counts = rules.Names.CountsOf(name); countIn(&counts, l.State) == 0 {
			l.begun = true
			return
		}
	}
	switch {
	case l.State == engine.Ready:
		l.lanes, l.left = rules.Names.LanesBefore(name, l.left, surveyCap, l.lanes)
	case l.State == engine.Leased:
		l.found, l.left = rules.Leases.LeasedBefore(name, l.left, surveyCap, l.found)
	case l.State == engine.Scheduled:
	case name != "":
		l.queues, l.left = append(l.queues, engine.QueueRef{Name: name, Number: number}), 0
	default:
		has := func(c *keys.Counts) bool { return countIn(c, l.State) > 0 }
		l.queues, l.left = rules.Names.QueuesBefore(has, l.left, surveyCap, l.queues)
	}
}

func countIn(c *keys.Counts, state engine.TaskState) uint64 {
	switch state {
	case engine.Ready:
		return c.Ready
	case engine.Leased:
		return c.Leased
	case engine.Scheduled:
		return c.Scheduled
	case engine.Blocked:
		return c.Blocked
	case engine.Dead:
		return c.Dead
	case engine.Done:
		return c.Done
	default:
		return c.Canceled
	}
}

// skipConsumed moves the beginnings of the next lanes to their first ready tasks.
func (l *Reader[T]) skipConsumed(rules *engine.State) {
	kept := min(spanCap, len(l.spans))
	for i := kept - 1; i >= 0; i-- {
		sp := l.spans[i]
		if len(sp.from) >= keys.LaneLen {
			n := keys.LaneOfTask(sp.from)
			pos, ok := rules.Names.FirstReady(n)
			if !ok {
				continue
			}
			if from := keys.AppendFrom(nil, n, pos.Since, pos.ID); bytes.Compare(from, sp.from) > 0 {
				sp.from = from
			}
			if bytes.Compare(sp.from, sp.to) >= 0 {
				continue
			}
		}
		kept--
		l.spans[kept] = sp
	}
	l.spans = l.spans[kept:]
}

// Look continues to read.
func (l *Reader[T]) Look(v *store.Snapshot, _ func() bool) (again bool, err error) {
	l.Page = l.Page[:0]
	if !l.begun {
		if l.begin(&v.Clock); !l.begun {
			return true, nil
		}
		l.prepare()
		if len(l.spans) == 0 {
			return l.goOn(), nil
		}
		if rangeOf[l.State] == keys.Task {
			return true, nil
		}
	}
	switch prefix := rangeOf[l.State]; {
	case prefix == keys.Task && l.State == engine.Ready && l.asked == nil:
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

// advance removes the spans that the page has read.
func (l *Reader[T]) advance() {
	l.spans = l.spans[l.read:]
	switch {
	case l.from == nil:
	case l.Newest:
		l.spans[0].to = append(l.from, 0)
	default:
		l.spans[0].from = l.from
	}
	l.asked, l.read, l.from = nil, 0, nil
	l.goOn()
}

// begin finds the ranges of keys to read, unless the survey is incomplete.
func (l *Reader[T]) begin(c *store.Clock) {
	switch prefix := rangeOf[l.State]; {
	case l.State == engine.Leased:
		l.found = slices.DeleteFunc(l.found, func(t engine.LeasedTask) bool { return !l.hasTenant(t.Lane.Tenant) })
		l.trimFound()
	case prefix == keys.Scheduled:
		lower, upper := keys.Range(prefix)
		bound := func(ms uint64) []byte { return keys.AppendScheduled(nil, ms, keys.ID{}) }
		l.addSpan(l.between(span{lower, upper}, c, bound), func(p *Position) ([]byte, bool) {
			return keys.AppendScheduled(nil, p.At, p.ID), true
		})
		l.left = 0
	case l.State == engine.Ready:
		l.lanes = slices.DeleteFunc(l.lanes, func(ln engine.LaneRef) bool { return !l.hasTenant(ln.Tenant) })
		if l.trimLanes(); l.left == 0 {
			l.beginLanes(c)
		}
	default:
		if l.trimQueues(); l.left == 0 {
			l.beginQueues(prefix)
		}
	}
	l.begun = l.left == 0
}

func (l *Reader[T]) beginLanes(c *store.Clock) {
	slices.SortFunc(l.lanes, compareLanes)
	for _, ln := range slices.Compact(l.lanes) {
		lower := keys.AppendLane(nil, ln.Number)
		bound := func(ms uint64) []byte { return keys.AppendSince(nil, ln.Number, ms<<16) }
		l.addSpan(l.between(span{lower, keys.GroupEnd(lower)}, c, bound), func(p *Position) ([]byte, bool) {
			return keys.AppendTask(nil, ln.Number, p.At, p.ID), p.lane() == ln.LaneKey
		})
	}
	l.lanes = nil
}

func (l *Reader[T]) beginQueues(prefix byte) {
	slices.SortFunc(l.queues, compareQueues)
	for _, q := range slices.Compact(l.queues) {
		lower := keys.AppendNumbered(nil, prefix, q.Number)
		l.addSpan(span{lower, keys.GroupEnd(lower)}, func(p *Position) ([]byte, bool) {
			return keys.AppendGrouped(nil, prefix, q.Number, p.At, p.ID), p.Queue == q.Name
		})
	}
	l.queues = nil
}

func (l *Reader[T]) hasTenant(tenant string) bool {
	return len(l.Tenants) == 0 || slices.Contains(l.Tenants, tenant)
}

// walk visits the entries of the spans in order, until visit returns no more.
func (l *Reader[T]) walk(v *store.Snapshot, visit func(it *pebble.Iterator) (more bool, err error)) error {
	lower, upper := keys.Range(rangeOf[l.State])
	it, err := v.Reader().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // it.Error returns the same error
	l.from = nil                      // a repeated page may have set it
	for l.read = 0; l.read < len(l.spans); l.read++ {
		it.SetBounds(l.spans[l.read].from, l.spans[l.read].to)
		begin, next := it.First, it.Next
		if l.Newest {
			begin, next = it.Last, it.Prev
		}
		for valid := begin(); valid; valid = next() {
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

// collect finds the tasks of the next page of Ready. Tasks that the query does not select
// are read once.
func (l *Reader[T]) collect(v *store.Snapshot) error {
	size, n, limits, narrow := 0, 0, l.limits(), l.isNarrow()
	return l.walk(v, func(it *pebble.Iterator) (bool, error) {
		if len(l.asked) == limits.Tasks || size > limits.bytes || n == limits.Scan {
			return false, nil
		}
		n++
		value, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		size += len(value)
		lane, since, id, err := keys.ParseTask(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		ln, err := v.Lane(lane)
		if err != nil {
			return false, err
		}
		l.reach(ln, since, id, len(value))
		if narrow {
			t, err := v.View(id, keys.Place{Range: keys.Task, Group: lane, At: since}, value)
			if err != nil || !l.selects(t) {
				return true, err
			}
		}
		l.asked = append(l.asked, store.TaskKey{Lane: lane, Since: since, ID: id})
		return true, nil
	})
}

// readAsked reads the tasks of asked. It omits those that have left their place.
func (l *Reader[T]) readAsked(v *store.Snapshot) error {
	size, limits := 0, l.limits()
	for i, t := range l.asked {
		if l.State == engine.Leased { // each is a span
			if l.read = i; size > limits.bytes || i == limits.Scan {
				return nil
			}
			l.read++
		}
		value, err := store.Lookup(v.Reader(), keys.AppendTask(nil, t.Lane, t.Since, t.ID))
		if err != nil {
			return err
		}
		if l.State == engine.Leased {
			ln, err := v.Lane(t.Lane)
			if err != nil {
				return err
			}
			l.reach(ln, t.Since, t.ID, len(value))
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

// readPage reads the next page of a state without lanes.
func (l *Reader[T]) readPage(v *store.Snapshot) error {
	size, n, limits := 0, 0, l.limits()
	return l.walk(v, func(it *pebble.Iterator) (bool, error) {
		if len(l.Page) == limits.Tasks || size > limits.bytes || n == limits.Scan {
			return false, nil
		}
		n++
		value, err := it.ValueAndErr()
		if err != nil {
			return false, store.Error(err)
		}
		id, p, err := keys.ParsePlaceKey(it.Key())
		if err != nil {
			return false, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		l.reach(nil, p.At, id, len(value))
		if p.Range == keys.Scheduled && l.Queue != "" {
			number, _, err := keys.SplitLane(value)
			if err != nil {
				return false, fmt.Errorf("%w: task %s: %w", base.ErrCorrupt, keys.FormatID(id), err)
			}
			if ln, err := v.Lane(number); err != nil || ln.Queue != l.Queue {
				size += len(value)
				return true, err
			}
		}
		size += len(value)
		return true, l.add(v, id, p, value)
	})
}

// add adds a task to the page if it matches the query, without its log. The page does not alias
// value.
func (l *Reader[T]) add(v *store.Snapshot, id keys.ID, p keys.Place, value []byte) error {
	t, err := v.View(id, p, value)
	if err != nil {
		return err
	}
	if l.Reached != nil && rangeOf[l.State] != keys.Task {
		l.Reached.setLane(t.Lane)
	}
	state := engine.StateIn(t.Range)
	if state == engine.Ready && t.Lease != nil {
		state = engine.Leased
	}
	shown, counts := t.Shown()
	if state != l.State || l.Queue != "" && t.Lane.Queue != l.Queue || !l.isBetween(counts) || !l.selects(t) {
		return nil
	}
	size := len(value)
	if l.NoPayload {
		size -= len(t.Record.Payload) + len(t.Ended.Result)
		t.Record.Payload, t.Ended.Result = nil, nil
	}
	t.Record.Payload, t.Ended.Result = bytes.Clone(t.Record.Payload), bytes.Clone(t.Ended.Result)
	t.Record.Notes = t.Record.Notes.WithoutLogs()
	if t.Lease != nil {
		t.Lease.Notes = t.Lease.Notes.WithoutLogs()
	}
	item := Item[T]{Task: l.show(t), At: p.At, Size: size}
	if stamp := t.Stamp(); stamp != shown {
		item.Stamp = stamp
	}
	l.Page = append(l.Page, item)
	return nil
}

// selects reports whether the query's tenants, names and text select a task. It counts one that was
// not searched wholly.
func (l *Reader[T]) selects(t *store.Task) bool {
	if !l.hasTenant(t.Lane.Tenant) || !l.matches(&t.Record) {
		return false
	}
	found, encoded := l.finds(t)
	if encoded {
		l.Encoded++
	}
	return found
}

// isBetween reports whether a time, in ms, is within the bounds of the query.
func (q *Query) isBetween(ms uint64) bool {
	at := time.UnixMilli(int64(min(ms, math.MaxInt64)))
	return (q.From.IsZero() || !at.Before(q.From)) && (q.To.IsZero() || at.Before(q.To))
}

// Append appends the state of the Reader that the next Look needs.
func (l *Reader[T]) Append(dst []byte) []byte {
	last := l.last
	if len(l.found) > 0 { // the next survey waits until the caller has read the results of this one
		last = nil
	}
	dst = l.appendProgress(l.appendLimits(l.Filter.append(dst)), last)
	dst = wire.AppendUint(wire.AppendBool(dst, l.begun), uint64(l.left))
	l.sent = min(spanCap, len(l.spans))
	return l.Query.append(appendSpans(dst, l.spans[:l.sent]))
}

// Read is the reverse of Append.
func (l *Reader[T]) Read(r *wire.Reader) {
	filter := readFilter(r)
	l.readLimits(r)
	l.readProgress(r)
	l.begun, l.left = r.Bool(), int(min(r.Uint(), math.MaxInt))
	l.spans = readSpans(r)
	l.sent = len(l.spans)
	l.Query = readQuery(r)
	if l.Filter = filter; !l.isValid() {
		r.Fail()
	}
}

// AppendReply appends the page, and the rest to read.
func (l *Reader[T]) AppendReply(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(l.Records)), uint64(l.ReadBytes))
	if l.Contents {
		dst = wire.AppendUint(dst, uint64(l.Encoded))
	}
	dst = l.appendProgress(dst, l.last)
	dst = wire.AppendUint(wire.AppendBool(dst, l.begun), uint64(l.left))
	dst = appendSpans(dst, l.spans)
	dst = wire.AppendUint(dst, uint64(len(l.found)))
	for _, t := range l.found {
		dst = wire.AppendBytes(dst, t.Lane.Queue)
		dst = append(wire.AppendBytes(dst, t.Lane.Tenant), t.Lane.Priority)
		dst = wire.AppendUint(wire.AppendUint(dst, uint64(t.Lane.Number)), t.Since)
		dst = append(dst, t.ID[:]...)
	}
	return wire.AppendJSON(dst, l.Page)
}

// ReadReply is the reverse of AppendReply.
func (l *Reader[T]) ReadReply(r *wire.Reader) {
	before := l.paging
	l.Records, l.ReadBytes = int(r.Uint32()), int(min(r.Uint(), math.MaxInt32))
	if l.Contents {
		l.Encoded = int(r.Uint32())
	}
	l.readProgress(r)
	begun, left := r.Bool(), int(min(r.Uint(), math.MaxInt))
	spans := readSpans(r)
	var found []engine.LeasedTask
	for range r.Count(6 + keys.IDLen) {
		queue, tenant, priority := r.String(), r.String(), r.Byte()
		number, since := uint32(r.Uint()), r.Uint()
		found = append(found, engine.LeasedTask{
			Lane: engine.LaneRef{
				Number: number, LaneKey: engine.LaneKey{Queue: queue, Tenant: tenant, Priority: priority},
			},
			Since: since, ID: keys.ReadID(r),
		})
	}
	var page []Item[T]
	r.JSON(r.Rest(), &page)
	if slices.ContainsFunc(page, func(i Item[T]) bool { return i.Task == nil }) {
		r.Fail()
	}
	if r.Failed() {
		l.paging = before
		return
	}
	l.begun, l.left, l.found, l.order = begun, left, append(l.found, found...), true
	l.spans = append(spans, l.spans[l.sent:]...)
	l.Page = append(l.Page, page...)
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
