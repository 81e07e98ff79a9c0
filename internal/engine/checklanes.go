package engine

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/store"
)

// ready reads the ready tasks of every lane.
func (c *checker) ready() error {
	s := c.state
	return store.Scan(c.disk, keys.Task, func(key, value []byte) error {
		number, since, id, err := keys.ParseTask(key)
		if err != nil {
			return err
		}
		l, err := s.laneNumbered(number)
		if err != nil {
			return err
		}
		ls := s.leases.byID[id]
		if ls == nil {
			it := ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: bytes.Clone(value)}
			c.onDisk[l] = append(c.onDisk[l], it)
		} else if len(ls.copied) > 0 && !bytes.Equal(ls.copied, value) {
			c.report("record of leased task %s is copied as %x, on disk it is %x", id, ls.copied, value)
		}
		return nil
	})
}

// lanes: each window has the ready tasks before next, or all of them, and each lane with ready
// tasks is in a ring.
func (c *checker) lanes() error {
	s := c.state
	for n, l := range s.lanes.All() {
		if l == nil {
			continue
		}
		if int(l.number) != n || l.queue.lane(l.Tenant, l.Priority) != l {
			c.report("lane %d is not where it belongs", n)
		}
		want := c.onDisk[l]
		if !l.complete {
			end, _ := slices.BinarySearchFunc(want, l.next, func(it ready.Item, p ready.Pos) int { return it.Compare(p) })
			if l.exact && (end == len(want) || want[end].Pos != l.next) {
				c.report("lane %d (%s) says that a task is ready at %x", n, l.queue.Name, l.next)
			}
			want = want[:end]
		}
		before := l.window.Footprint()
		got := items(&l.window)
		s.windows.resized(l, before)
		same := func(a, b ready.Item) bool { return a.Pos == b.Pos && bytes.Equal(a.Record, b.Record) }
		if !slices.EqualFunc(got, want, same) {
			c.report("window of lane %d (%s) has %s, want %s (next %x, complete %t)",
				n, l.queue.Name, positions(got), positions(want), l.next, l.complete)
		}
		if len(got) > s.config.WindowTasks {
			c.report("window of lane %d has %d tasks, at most %d allowed", n, len(got), s.config.WindowTasks)
		}
		if len(c.onDisk[l]) > 0 && l.ringNext == nil {
			c.report("lane %d (%s) has ready tasks and no turn", n, l.queue.Name)
		}
		if l.share != nil && (l.ringNext != nil) != (l.share.shards > 0) {
			c.report("lane %d (%s) has a turn: %t, and is counted in %d shards", n, l.queue.Name, l.ringNext != nil, l.share.shards)
		}
	}
	return nil
}

// windowMemory: the bytes of all windows are counted, and bounded.
func (c *checker) windowMemory() error {
	s := c.state
	sum, holders, most := 0, 0, 0
	listed := make(map[*Lane]bool)
	for l := s.windows.oldest; l != nil && !listed[l]; l = l.newer {
		listed[l] = true
		if l.newer == nil && l != s.windows.newest || l.newer != nil && l.newer.older != l {
			c.report("lane %d is misplaced among those that hold memory", l.number)
		}
	}
	for _, l := range s.lanes.All() {
		if l == nil {
			continue
		}
		n := l.window.Footprint()
		if (n > 0) != listed[l] {
			c.report("lane %d holds %d bytes, is among those that hold memory: %t", l.number, n, listed[l])
		}
		if n > 0 {
			sum += n
			holders++
			most = max(most, l.window.Len())
		}
	}
	if sum != s.windows.bytes {
		c.report("windows are accounted with %d bytes and have %d", s.windows.bytes, sum)
	}
	if sum > s.windows.limit && (holders > 1 || most > 1) {
		c.report("%d windows hold %d bytes, at most %d allowed", holders, sum, s.windows.limit)
	}
	return nil
}

func (c *checker) ring(q *Queue, priority int) {
	r := q.rings[priority]
	var head *Lane
	if r != nil {
		head = r.first
		c.ahead(r)
		c.shares(r)
	}
	if (head != nil) != (q.Mask&(1<<priority) != 0) {
		c.report("mask of queue %q is %b, ring %d is %v", q.Name, q.Mask, priority, head)
	}
	seen := make(map[*Lane]bool)
	for l := head; l != nil && !seen[l]; l = l.ringNext {
		seen[l] = true
		if l.queue != q || int(l.Priority) != priority || l.ringNext == nil || l.ringNext.ringPrev != l {
			c.report("ring %d of queue %q is broken at lane %d", priority, q.Name, l.number)
			return
		}
	}
	for _, l := range c.state.lanes.All() {
		if l != nil && l.queue == q && int(l.Priority) == priority && (l.ringNext != nil) != seen[l] {
			c.report("lane %d has a turn: %t, is in the ring: %t", l.number, l.ringNext != nil, seen[l])
		}
	}
}

// ahead: the lanes with ahead set are those that the ring says.
func (c *checker) ahead(r *ring) {
	l, bytes := r.first, 0
	for i := range r.lanes {
		if i == r.ahead && l != r.edge {
			c.report("ring %d of queue %q: lane %d is the first that is not ahead, the edge is %d", r.priority, r.queue.Name, l.number, r.edge.number)
		}
		if l.ahead != (i < r.ahead) {
			c.report("ring %d of queue %q: lane %d of %d is ahead: %t, of %d", r.priority, r.queue.Name, i, r.lanes, l.ahead, r.ahead)
		}
		if l.ahead {
			bytes += l.window.Footprint()
		}
		l = l.ringNext
	}
	if l != r.first || bytes != r.bytes || r.wanted || r.urgent {
		c.report("ring %d of queue %q: %+v, has other lanes, or %d bytes ahead", r.priority, r.queue.Name, r, bytes)
	}
}

// shares: those of a ring are those of its lanes.
func (c *checker) shares(r *ring) {
	want := ringShares{shards: make([]int, c.state.config.Shards+1)}
	l := r.first
	for range r.lanes {
		if l.share != nil {
			want.add(l.share)
		}
		l = l.ringNext
	}
	if r.shares != nil && !reflect.DeepEqual(want, *r.shares) || r.shares == nil && want.lanes > 0 {
		c.report("shares in ring %d of queue %q are %+v, those of its lanes are %+v", r.priority, r.queue.Name, r.shares, want)
	}
}

// items returns those of a window, which it empties and fills again.
func items(w *ready.Window) []ready.Item {
	var all []ready.Item
	for w.Len() > 0 {
		all = append(all, w.PopFirst())
	}
	for _, it := range all {
		w.Insert(it)
	}
	return all
}

func positions(items []ready.Item) string {
	var b bytes.Buffer
	for _, it := range items {
		fmt.Fprintf(&b, " %x/%s", it.Since, keys.FormatID(it.ID))
	}
	return fmt.Sprintf("[%d:%s]", len(items), b.String())
}
