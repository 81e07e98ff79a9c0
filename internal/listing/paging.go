package listing

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"time"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Filter has further conditions and options of pages.
type Filter struct {
	Group, Key, Kind string // "": any
	Error            string // an ErrorKind; "": any
	Search
	// Newest reverses the order of time: within a lane or a queue, or of all tasks if the order of
	// the state begins with their time.
	Newest    bool
	NoPayload bool // neither payloads nor results are shown
}

func (f *Filter) matches(r *record.Record) bool {
	return (f.Group == "" || r.GroupKey == f.Group) && (f.Key == "" || r.UniqueKey == f.Key) &&
		(f.Kind == "" || r.Kind == f.Kind) && (f.Error == "" || record.ErrorKind(r.Error) == f.Error)
}

// isNarrow reports whether the query may read many records for few tasks.
func (q *Query) isNarrow() bool {
	return q.Group != "" || q.Key != "" || q.Kind != "" || q.Error != "" || q.Text != "" || len(q.Tenants) > 0 || !q.From.IsZero() || !q.To.IsZero() ||
		q.State == engine.Scheduled && q.Queue != ""
}

// byTime compares times in the order of the query, and IDs if they are equal.
func (f *Filter) byTime(a, b uint64, id, other *keys.ID) int {
	c := 0
	switch {
	case a < b:
		c = -1
	case a > b:
		c = 1
	default:
		c = bytes.Compare(id[:], other[:])
	}
	if f.Newest {
		return -c
	}
	return c
}

// Position is a position in the order of the tasks of a state. It has no internal number of a
// shard, so that it is valid for all shards and after a restart.
type Position struct {
	Key
	At  uint64 // as in an Item
	End bool   // behind all tasks of the lane or queue
}

func (p *Position) lane() engine.LaneKey {
	return engine.LaneKey{Queue: p.Queue, Tenant: p.Tenant, Priority: uint8(p.Priority)}
}

func (p *Position) setLane(l *store.Lane) {
	p.Queue, p.Tenant, p.Priority = l.Queue, l.Tenant, int(l.Priority)
}

func (p *Position) append(dst []byte) []byte {
	if p == nil {
		return wire.AppendBool(dst, false)
	}
	dst = wire.AppendBool(wire.AppendBool(dst, true), p.End)
	dst = wire.AppendBytes(wire.AppendBytes(dst, p.Queue), p.Tenant)
	return append(wire.AppendUint(append(dst, byte(p.Priority)), p.At), p.ID[:]...)
}

func readPosition(r *wire.Reader) *Position {
	if !r.Bool() {
		return nil
	}
	p := &Position{End: r.Bool()}
	p.Queue, p.Tenant, p.Priority, p.At, p.ID = r.String(), r.String(), int(r.Byte()), r.Uint(), keys.ReadID(r)
	return p
}

// paging restricts a Reader to a part of a list, within limits.
type paging struct {
	After *Position // the list begins behind it; nil: at its beginning
	// Groups is the number of lanes, queues or leases kept of a survey: the first ones. The next
	// survey goes on behind them.
	Groups             int
	Tasks, Scan, Bytes int // limits of one Look

	Reached   *Position // the last record read
	Records   int       // read by the last Look
	ReadBytes int       // of these records
	Encoded   int       // records without the text of the Search that were not searched wholly

	rest bool      // the survey has found more than it has kept
	last *Position // the end of the kept part
}

// scanBytes bounds the bytes of the records that one Look reads if it shows no payloads.
const scanBytes = 4 << 20

// readLimits has the limits of one Look.
type readLimits struct{ Tasks, Scan, bytes int }

func (l *Reader[T]) limits() readLimits {
	limits := readLimits{min(max(1, l.Tasks), PageTasks), min(max(1, l.Scan), pageScan), min(l.Bytes, pageBytes)}
	if l.NoPayload && !l.Contents {
		limits.bytes = scanBytes
	}
	return limits
}

// restart surveys again, behind After.
func (l *Reader[T]) restart() {
	l.begun, l.left, l.order, l.rest, l.last = false, math.MaxInt, false, false, nil
	l.spans, l.lanes, l.queues, l.found = nil, nil, nil, nil
}

// goOn begins the next survey if the kept part of the last one has been read, and there is more.
func (l *Reader[T]) goOn() (more bool) {
	if !l.rest || len(l.spans)+len(l.found) > 0 {
		return false
	}
	reached := *l.last
	l.After, l.Reached = l.last, &reached
	l.restart()
	return true
}

// reach notes that a record was read.
func (l *Reader[T]) reach(ln *store.Lane, at uint64, id keys.ID, size int) {
	if l.Reached == nil {
		l.Reached = new(Position)
	}
	*l.Reached = Position{Key: Key{ID: id}, At: at}
	if ln != nil {
		l.Reached.setLane(ln)
	}
	l.Records++
	l.ReadBytes += size
}

// before reports whether a lane or queue ends before the page begins. c compares it with that of
// After.
func (l *Reader[T]) before(c int) bool { return c < 0 || c == 0 && l.After.End }

func (l *Reader[T]) trimLanes() {
	if l.After != nil {
		after := engine.LaneRef{LaneKey: l.After.lane()}
		l.lanes = slices.DeleteFunc(l.lanes, func(ln engine.LaneRef) bool { return l.before(compareLanes(ln, after)) })
	}
	if len(l.lanes) > l.Groups {
		slices.SortFunc(l.lanes, compareLanes)
		l.lanes = keepFirst(l, slices.Compact(l.lanes), func(ln engine.LaneRef) Position {
			return Position{Key: Key{Queue: ln.Queue, Tenant: ln.Tenant, Priority: int(ln.Priority)}, End: true}
		})
	}
}

func (l *Reader[T]) trimQueues() {
	if l.After != nil {
		l.queues = slices.DeleteFunc(l.queues, func(q engine.QueueRef) bool { return l.before(strings.Compare(q.Name, l.After.Queue)) })
	}
	if len(l.queues) > l.Groups {
		slices.SortFunc(l.queues, compareQueues)
		l.queues = keepFirst(l, slices.Compact(l.queues), func(q engine.QueueRef) Position {
			return Position{Key: Key{Queue: q.Name}, End: true}
		})
	}
}

func compareQueues(a, b engine.QueueRef) int { return strings.Compare(a.Name, b.Name) }

func (l *Reader[T]) trimFound() {
	place := func(t engine.LeasedTask) Position {
		return Position{Key: Key{Queue: t.Lane.Queue, Tenant: t.Lane.Tenant, Priority: int(t.Lane.Priority), ID: t.ID}, At: t.Since}
	}
	if l.After != nil {
		l.found = slices.DeleteFunc(l.found, func(t engine.LeasedTask) bool {
			p := place(t)
			return l.compare(&p, l.After) <= 0
		})
	}
	if len(l.found) > l.Groups {
		l.sortFound()
		l.found = keepFirst(l, l.found, place)
	}
}

// keepFirst keeps the first Groups results of a survey.
func keepFirst[T, G any](l *Reader[T], found []G, place func(G) Position) []G {
	groups := max(1, l.Groups)
	if len(found) > groups {
		found, l.rest = found[:groups:groups], true
		last := place(found[groups-1])
		l.last = &last
	}
	return found
}

// between returns the part of a span with all times within the bounds of the query. key returns a
// key before all keys of a time, and behind all earlier ones.
func (l *Reader[T]) between(sp span, c *store.Clock, key func(ms uint64) []byte) span {
	const far = 1 << 47 // ms; times beyond it bound nothing
	from, to := l.From.UnixMilli(), l.To.Add(time.Millisecond-1).UnixMilli()
	first, last := c.StampsBetween(uint64(max(0, from)), uint64(max(0, to)), l.State == engine.Scheduled)
	if !l.From.IsZero() && l.From.Before(time.UnixMilli(far)) && from > 0 {
		sp.from = key(first)
	}
	if !l.To.IsZero() && l.To.Before(time.UnixMilli(far)) && last < far {
		sp.to = key(last)
	}
	return sp
}

// addSpan adds the part of a span behind After. key returns the key of a position, and whether it
// is in the span.
func (l *Reader[T]) addSpan(sp span, key func(*Position) (_ []byte, within bool)) {
	if l.After != nil {
		switch after, within := key(l.After); {
		case !within:
		case l.Newest:
			if bytes.Compare(after, sp.to) < 0 {
				sp.to = after
			}
		case bytes.Compare(after, sp.from) >= 0:
			sp.from = append(after, 0)
		}
	}
	if bytes.Compare(sp.from, sp.to) < 0 {
		l.spans = append(l.spans, sp)
	}
}

func (f *Filter) append(dst []byte) []byte {
	dst = wire.AppendBytes(wire.AppendBytes(wire.AppendBytes(dst, f.Group), f.Key), f.Error)
	dst = wire.AppendBool(dst, f.Newest)
	flags := byte(0)
	for i, has := range [...]bool{f.NoPayload, f.Kind != "", f.Text != "", f.Contents} {
		if has {
			flags |= 1 << i
		}
	}
	dst = append(dst, flags)
	for _, text := range [...]string{f.Kind, f.Text} {
		if text != "" { // nodes of an earlier version know neither
			dst = wire.AppendBytes(dst, text)
		}
	}
	return dst
}

func readFilter(r *wire.Reader) Filter {
	f := Filter{Group: r.String(), Key: r.String(), Error: r.String(), Newest: r.Bool()}
	flags := r.Byte()
	f.NoPayload, f.Contents = flags&1 != 0, flags&8 != 0
	for i, text := range [...]*string{&f.Kind, &f.Text} {
		if flags&(2<<i) == 0 {
			continue
		}
		if *text = r.String(); *text == "" {
			r.Fail()
		}
	}
	if flags > 15 || f.Contents && f.Text == "" {
		r.Fail()
	}
	return f
}

func (p *paging) appendLimits(dst []byte) []byte {
	for _, n := range [...]int{p.Groups, p.Tasks, p.Scan, p.Bytes} {
		dst = wire.AppendUint(dst, uint64(n))
	}
	return dst
}

func (p *paging) readLimits(r *wire.Reader) {
	for _, n := range [...]*int{&p.Groups, &p.Tasks, &p.Scan, &p.Bytes} {
		*n = int(min(r.Uint(), pageBytes))
	}
	p.Groups = min(p.Groups, surveyCap)
}

func (l *Reader[T]) appendProgress(dst []byte, last *Position) []byte {
	return last.append(l.Reached.append(l.After.append(dst)))
}

func (l *Reader[T]) readProgress(r *wire.Reader) {
	after, reached, last := readPosition(r), readPosition(r), readPosition(r)
	l.After, l.Reached = after, reached
	if len(l.found) == 0 { // otherwise Append has kept back the caller's last
		l.last, l.rest = last, last != nil
	}
}
