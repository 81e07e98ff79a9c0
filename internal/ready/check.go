package ready

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"

	"codeq/internal/keys"
)

// Stored has the tasks of a lane in memory by disk and by the leases.
type Stored struct {
	*Lane
	Name   string   // of its queue
	Tasks  []Item   // ready, in order
	Leased []uint64 // the sinces of its leased tasks
}

// checker compares memory with disk.
type checker struct {
	*Tasks
	lanes []Stored
	of    map[*Queue][]*Lane
	errs  []error
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// Check compares all lanes in memory with disk and the leases, and returns the differences. It is
// for tests. REQUIRES: no refill is wanted.
func (t *Tasks) Check(lanes []Stored, queues []*Queue) []error {
	c := &checker{Tasks: t, lanes: lanes, of: make(map[*Queue][]*Lane)}
	idle := 0
	for i := range lanes {
		c.lane(&lanes[i])
		c.trail(&lanes[i])
		l := lanes[i].Lane
		c.of[l.Queue] = append(c.of[l.Queue], l)
		if l.idler {
			idle++
		} else if l.isIdle() {
			c.report("lane %d is idle and not listed", l.Number)
		}
	}
	listed := 0
	for l := t.idle.first; l != nil; l = l.idleNext {
		listed++
	}
	if listed != t.idle.n || listed != idle || listed > t.config.IdleLanes {
		c.report("%d lanes may be idle, %d are listed, %d are counted", idle, listed, t.idle.n)
	}
	c.windowMemory()
	for _, q := range queues {
		for p := range q.rings {
			c.ring(q, p)
		}
	}
	return c.errs
}

// lane: the window has the ready tasks before next, or all of them, and a lane with ready tasks is
// in a ring.
func (c *checker) lane(s *Stored) {
	l, want := s.Lane, s.Tasks
	if !l.complete {
		end, _ := slices.BinarySearchFunc(want, l.next, func(it Item, p Pos) int { return it.compare(p) })
		if l.exact && (end == len(want) || want[end].Pos != l.next) {
			c.report("lane %d (%s) says that a task is ready at %x", l.Number, s.Name, l.next)
		}
		want = want[:end]
	}
	var got []Item
	for _, r := range l.window.runs[l.window.first:] {
		got = append(got, r.items[r.head:]...)
	}
	same := func(a, b Item) bool { return a.Pos == b.Pos && bytes.Equal(a.Record, b.Record) }
	if !slices.EqualFunc(got, want, same) || len(got) != l.window.Len() {
		c.report("window of lane %d (%s) has %s, want %s (next %x, complete %t)",
			l.Number, s.Name, positions(got), positions(want), l.next, l.complete)
	}
	if len(got) > c.config.WindowTasks {
		c.report("window of lane %d has %d tasks, at most %d allowed", l.Number, len(got), c.config.WindowTasks)
	}
	if len(s.Tasks) > 0 && l.ringNext == nil {
		c.report("lane %d (%s) has ready tasks and no turn", l.Number, s.Name)
	}
	if l.share != nil && (l.ringNext != nil) != (l.share.shards > 0) {
		c.report("lane %d (%s) has a turn: %t, and is counted in %d shards", l.Number, s.Name, l.ringNext != nil, l.share.shards)
	}
}

// trail: the segments of a lane count the leased tasks that lie in them, and its reach is after all
// of them.
func (c *checker) trail(s *Stored) {
	l := s.Lane
	if int(l.leased) != len(s.Leased) {
		c.report("lane %d counts %d leases and has %d", l.Number, l.leased, len(s.Leased))
	}
	for _, since := range s.Leased {
		if since >= l.trail.reach {
			c.report("a lease of lane %d lies after its reach", l.Number)
		}
	}
	if l.trail.segments == nil {
		return
	}
	from := uint64(0)
	for i, g := range l.trail.segments.list {
		n := 0
		for _, since := range s.Leased {
			if from <= since && since < g.end {
				n++
			}
		}
		if n != g.leased || g.end <= from || g.end > l.trail.reach {
			c.report("segment %d of lane %d, from %x to %x of %x, counts %d leases and has %d", i, l.Number, from, g.end, l.trail.reach, g.leased, n)
		}
		from = g.end
	}
}

// windowMemory: the bytes of all windows are counted, and bounded.
func (c *checker) windowMemory() {
	m := &c.windows
	sum, holders, most := 0, 0, 0
	listed := make(map[*Lane]bool)
	for l := m.oldest; l != nil && !listed[l]; l = l.newer {
		listed[l] = true
		if l.newer == nil && l != m.newest || l.newer != nil && l.newer.older != l {
			c.report("lane %d is misplaced among those that hold memory", l.Number)
		}
	}
	for i := range c.lanes {
		l := c.lanes[i].Lane
		n := l.window.Footprint()
		if (n > 0) != listed[l] {
			c.report("lane %d holds %d bytes, is among those that hold memory: %t", l.Number, n, listed[l])
		}
		if n > 0 {
			sum += n
			holders++
			most = max(most, l.window.Len())
		}
	}
	if sum != m.bytes {
		c.report("windows are accounted with %d bytes and have %d", m.bytes, sum)
	}
	if sum > m.limit && (holders > 1 || most > 1) {
		c.report("%d windows hold %d bytes, at most %d allowed", holders, sum, m.limit)
	}
}

func (c *checker) ring(q *Queue, priority int) {
	r := q.rings[priority]
	var head *Lane
	if r != nil {
		head = r.first
		c.aheadIn(r)
		c.sharesIn(r)
	}
	if (head != nil) != (q.Mask&(1<<priority) != 0) {
		c.report("mask of queue %d is %b, ring %d is %v", q.Number, q.Mask, priority, head)
	}
	seen := make(map[*Lane]bool)
	for l := head; l != nil && !seen[l]; l = l.ringNext {
		seen[l] = true
		if l.Queue != q || int(l.Priority) != priority || l.ringNext == nil || l.ringNext.ringPrev != l {
			c.report("ring %d of queue %d is broken at lane %d", priority, q.Number, l.Number)
			return
		}
	}
	for _, l := range c.of[q] {
		if int(l.Priority) == priority && (l.ringNext != nil) != seen[l] {
			c.report("lane %d has a turn: %t, is in the ring: %t", l.Number, l.ringNext != nil, seen[l])
		}
	}
}

// aheadIn: the lanes with ahead set are those that the ring says.
func (c *checker) aheadIn(r *ring) {
	l, bytes := r.first, 0
	for i := range r.lanes {
		if i == r.ahead && l != r.edge {
			c.report("ring %d of queue %d: lane %d is the first that is not ahead, the edge is %d", r.priority, r.queue.Number, l.Number, r.edge.Number)
		}
		if l.ahead != (i < r.ahead) {
			c.report("ring %d of queue %d: lane %d of %d is ahead: %t, of %d", r.priority, r.queue.Number, i, r.lanes, l.ahead, r.ahead)
		}
		if l.ahead {
			bytes += l.window.Footprint()
		}
		l = l.ringNext
	}
	if l != r.first || bytes != r.bytes || r.wanted || r.urgent {
		c.report("ring %d of queue %d: %+v, has other lanes, or %d bytes ahead", r.priority, r.queue.Number, r, bytes)
	}
}

// sharesIn: those of a ring are those of its lanes.
func (c *checker) sharesIn(r *ring) {
	want := ringShares{shards: make([]int, c.config.Shards+1)}
	l := r.first
	for range r.lanes {
		if l.share != nil {
			want.add(l.share)
		}
		l = l.ringNext
	}
	if r.shares != nil && !reflect.DeepEqual(want, *r.shares) || r.shares == nil && want.lanes > 0 {
		c.report("shares in ring %d of queue %d are %+v, those of its lanes are %+v", r.priority, r.queue.Number, r.shares, want)
	}
}

func positions(items []Item) string {
	var b bytes.Buffer
	for _, it := range items {
		fmt.Fprintf(&b, " %x/%s", it.Since, keys.FormatID(it.ID))
	}
	return fmt.Sprintf("[%d:%s]", len(items), b.String())
}
