package engine

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/schema"
	"codeq/internal/window"
)

// checker compares memory with disk.
type checker struct {
	state  *State
	disk   pebble.Reader
	needed func(*Queue) bool
	onDisk map[*Lane][]window.Item // ready tasks, in order
	last   uint64                  // largest number minted, as far as disk shows
	errs   []error
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// Check compares memory with what disk has, and returns the differences. It is for tests: its cost
// grows with all that is stored. REQUIRES: IsAtRest. needed reports whether the owner needs a
// queue; claimable, whether a queue has a task that may be leased.
func (s *State) Check(disk pebble.Reader, needed func(*Queue) bool) (claimable func(*Queue) bool, err error) {
	c := &checker{state: s, disk: disk, needed: needed, onDisk: make(map[*Lane][]window.Item)}
	for _, check := range []func() error{
		c.leases, c.leaseClock, c.trails, c.ready, c.catalogue, c.lanes, c.windowMemory, c.queues, c.times, c.recurring, c.caches, c.buckets,
		c.limits, c.settings, c.outbox,
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return c.claimable, errors.Join(c.errs...)
}

// IsAtRest reports whether nothing is under way: the group is empty, and no refill and no upkeep is
// due.
func (s *State) IsAtRest() bool {
	g := &s.Group
	busy := !g.Batch.Empty() || len(g.granted)+len(g.tasks)+len(g.finished)+len(g.Touched) > 0
	return !busy && !s.out.ahead && len(s.refiller.wants) == 0 && !s.UpkeepIsDue()
}

// claimable reports whether a queue has a task that may be leased, as far as its gate allows.
func (c *checker) claimable(q *Queue) bool {
	if q.Settings.Paused {
		return false
	}
	for l, items := range c.onDisk {
		for _, it := range items {
			head, err := record.DecodeHead(it.Record)
			if l.queue == q && (err != nil || head.Limit == 0 || !c.state.full(q, head.Limit)) {
				return true
			}
		}
	}
	return false
}

// leases: the table has exactly the valid leases on disk.
func (c *checker) leases() error {
	s := c.state
	type entry struct {
		keys.LeaseEntry
		keys.LeaseHeader
		seq uint64
	}
	valid := make(map[keys.ID]entry)
	onDisk := make(map[uint64]bool)
	err := schema.Scan(c.disk, keys.Lease, func(key, value []byte) error {
		seq, err := keys.ParseLease(key)
		if err != nil {
			return err
		}
		onDisk[seq] = true
		c.last = max(c.last, seq)
		h, entries, err := keys.ParseLeases(seq, value)
		if err != nil {
			return err
		}
		for _, e := range entries {
			head, err := schema.LeasedHead(c.disk, &e)
			if err != nil {
				return err
			}
			if head != nil {
				valid[e.ID] = entry{e, h, seq}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	live, held := make(map[*leaseRecord]int), 0
	for id, l := range s.leases.byID {
		held += len(l.copied)
		e, ok := valid[id]
		if !ok {
			c.report("lease of %s is not valid on disk", id)
			continue
		}
		live[l.record]++
		got := keys.LeaseEntry{
			ID: l.id, Lane: l.lane.number, Since: l.since, Token: l.token,
			Leases: l.leases, Attempts: l.attempts, Duration: l.duration,
		}
		if got != e.LeaseEntry || l.local != e.Local {
			c.report("lease of %s is %+v, on disk %+v", id, got, e)
		}
		if r := l.record; r.seq != e.seq || r.deadline != e.Deadline || r.ends != e.Ends || r.local != e.Local || !r.written {
			c.report("record of the lease of %s is %+v, on disk %+v", id, r, e)
		}
		if !l.expiry.Queued() || l.expiry.Value != l {
			c.report("lease of %s has no deadline", id)
		}
		delete(valid, id)
	}
	for id := range valid {
		c.report("lease of %s is valid on disk only", id)
	}
	if n := s.leases.wheel.Len(); n != len(s.leases.byID) {
		c.report("%d deadlines for %d leases", n, len(s.leases.byID))
	}
	if held != s.leases.held {
		c.report("copies of records have %d bytes, counted are %d", held, s.leases.held)
	}
	for r, n := range live {
		if r.live != n {
			c.report("lease record %x counts %d leases and has %d", r.seq, r.live, n)
		}
		delete(onDisk, r.seq)
	}
	for seq := range onDisk {
		c.report("nothing refers to lease record %x", seq)
	}
	for _, l := range s.leases.free {
		if s.leases.byID[l.id] == l || l.expiry.Queued() {
			c.report("lease of %s is in use and free", l.id)
		}
	}
	for _, r := range s.leases.spare {
		if live[r] > 0 {
			c.report("lease record %x is in use and spare", r.seq)
		}
	}
	return nil
}

// leaseClock: disk has the clock of leases, that of this leader if there are leases.
func (c *checker) leaseClock() error {
	s := c.state
	b, err := schema.Lookup(c.disk, []byte{keys.LeaseTime})
	if err != nil {
		return err
	}
	stored := uint64(0)
	if b != nil {
		if stored, err = keys.ParseNumber(b); err != nil {
			return err
		}
	}
	if stored != s.clock.stored || b != nil && !s.config.Replicated {
		c.report("the clock of leases is %x on disk, and %d was stored", b, s.clock.stored)
	}
	if now := s.leaseClock(); s.config.Replicated && (now < stored || s.leases.all.Len() > 0 && !s.clock.begun) {
		c.report("the clock of leases is at %d, on disk at %d, stored by this leader: %t", now, stored, s.clock.begun)
	}
	return nil
}

// trails: the segments of each lane count the leased tasks that lie in them, and its reach is after
// all of them.
func (c *checker) trails() error {
	leased := make(map[*Lane][]uint64)
	for _, ls := range c.state.leases.byID {
		leased[ls.lane] = append(leased[ls.lane], ls.since)
		if ls.since >= ls.lane.trail.reach {
			c.report("lease of %s lies after the reach of its lane", ls.id)
		}
	}
	for _, l := range c.state.lanes.All() {
		if l == nil || l.trail.segments == nil {
			continue
		}
		from := uint64(0)
		for i, g := range l.trail.segments.list {
			n := 0
			for _, since := range leased[l] {
				if from <= since && since < g.end {
					n++
				}
			}
			if n != g.leased || g.end <= from || g.end > l.trail.reach {
				c.report("segment %d of lane %d, from %x to %x of %x, counts %d leases and has %d", i, l.number, from, g.end, l.trail.reach, g.leased, n)
			}
			from = g.end
		}
	}
	return nil
}

// ready reads the ready tasks of every lane.
func (c *checker) ready() error {
	s := c.state
	return schema.Scan(c.disk, keys.Task, func(key, value []byte) error {
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
			it := window.Item{Pos: window.Pos{Since: since, ID: id}, Record: bytes.Clone(value)}
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
			end, _ := slices.BinarySearchFunc(want, l.next, func(it window.Item, p window.Pos) int { return it.Compare(p) })
			want = want[:end]
		}
		before := l.window.Footprint()
		got := items(&l.window)
		s.windows.resized(l, before)
		same := func(a, b window.Item) bool { return a.Pos == b.Pos && bytes.Equal(a.Record, b.Record) }
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
	}
	return nil
}

// catalogue: memory knows which numbers are taken, and has no lane or queue without need.
func (c *checker) catalogue() error {
	s, cat := c.state, &c.state.catalogue
	lanes, queues := 0, 1
	err := errors.Join(schema.Scan(c.disk, keys.Lane, func(key, _ []byte) error {
		n, err := keys.ParseNumbered(key)
		if lanes++; !cat.lanes.Has(n) {
			c.report("lane %d is taken on disk only", n)
		}
		return err
	}), schema.Scan(c.disk, keys.Queue, func(key, _ []byte) error {
		n, err := keys.ParseNumbered(key)
		if queues++; !cat.queues.Has(n) {
			c.report("queue %d is taken on disk only", n)
		}
		return err
	}))
	if err != nil {
		return err
	}
	if lanes != cat.lanes.Len() || queues != cat.queues.Len() {
		c.report("%d lanes and %d queues are taken, on disk %d and %d", cat.lanes.Len(), cat.queues.Len(), lanes, queues)
	}
	loaded, listed := 0, 0
	for n, l := range s.lanes.All() {
		if l == nil {
			continue
		}
		if loaded++; !cat.loaded.Has(uint32(n)) || l.queue.lanes.At(int(l.place)) != l {
			c.report("lane %d is not known to be in memory", n)
		}
		if l.isIdle() && !l.idler {
			c.report("lane %d is idle and not listed", n)
		}
	}
	for l := cat.idle.first; l != nil; l = l.idleNext {
		listed++
	}
	if loaded != cat.loaded.Len() || listed != cat.idle.n || listed > s.config.IdleLanes {
		c.report("%d lanes are in memory, %d by the catalogue; %d of them may be idle, %d by the catalogue",
			loaded, cat.loaded.Len(), listed, cat.idle.n)
	}
	if n := s.absentLanes(); cat.sweep == nil && n > cat.sweepAt {
		c.report("%d lanes are not in memory, a sweep is due at %d", n, cat.sweepAt)
	}
	current, busy := 0, 0
	for _, q := range s.Queues {
		if q.number != 0 {
			current++
		}
		if q.isBusy() {
			busy++
		}
		if s.isUnknown(q) && !c.needed(q) {
			c.report("queue %q is in memory for nothing", q.Name)
		}
	}
	if current != cat.current.Len() || busy != s.busy {
		c.report("%d queues are in memory, %d by the catalogue; %d have tasks that have not ended, %d by the shard",
			current, cat.current.Len(), busy, s.busy)
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

// queues: counts and numbers are those on disk, rings are closed, and no claim waits for a queue
// with a ready task that may be claimed.
func (c *checker) queues() error {
	s := c.state
	counted := make(map[uint32]keys.Counts)
	var clock uint64
	err := schema.Scan(c.disk, keys.Counters, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil {
			return err
		}
		v, err := keys.ParseCounters(value)
		counted[n], clock = v.Counts, max(clock, v.Clock)
		return err
	})
	if err != nil {
		return err
	}
	if clock != s.mint.clock || c.last > clock {
		c.report("clock is %x, stored is %x, used is %x", s.mint.clock, clock, c.last)
	}
	for n, q := range s.numbers.All() {
		if q != nil && (int(q.number) != n || s.Queues[q.Name] != q) {
			c.report("queue %d is not where it belongs", n)
		}
	}
	for name, q := range s.Queues {
		if q.Counts != counted[q.number] {
			c.report("queue %q is counted as %+v, on disk %+v", name, q.Counts, counted[q.number])
		}
		for p := range q.rings {
			c.ring(q, p)
		}
	}
	return nil
}

// limits: the leases of each key are counted, and tasks that wait for room have a lease whose end
// lets them go on.
func (c *checker) limits() error {
	s := c.state
	leased, ready := make(map[uint64]int), make(map[uint64]bool)
	for id, l := range s.leases.byID {
		if l.ties.Limit != 0 {
			leased[l.ties.Limit]++
		}
		head, err := schema.LeasedHead(c.disk, &keys.LeaseEntry{ID: l.id, Lane: l.lane.number, Since: l.since, Leases: l.leases})
		if err != nil {
			return err
		}
		if head != nil && head.Ties != l.ties {
			c.report("lease of %s is bound by %+v, on disk %+v", id, l.ties, head.Ties)
		}
	}
	for _, items := range c.onDisk {
		for _, it := range items {
			head, err := record.DecodeHead(it.Record)
			if err != nil {
				return err
			}
			ready[head.Limit] = true
		}
	}
	parked := make(map[uint64]bool)
	waiting := make(map[uint64]int)
	err := schema.Scan(c.disk, keys.Blocked, func(key, value []byte) error {
		_, scope, id, err := keys.ParseGrouped(key)
		if f, n := s.cursors.byScope[scope], waiting[scope]; f != nil {
			switch {
			case n < len(f.ahead) && (f.ahead[n].id != id || !bytes.Equal(f.ahead[n].value, value)):
				c.report("task %s waits in scope %x at %d, where memory has %s", keys.FormatID(id), scope, n, f.ahead[n].id)
			case n >= len(f.ahead) && f.all:
				c.report("task %s waits in scope %x behind the last that memory has", keys.FormatID(id), scope)
			}
		}
		waiting[scope]++
		if cursor := cursorOf(&s.cursors, scope); bytes.Compare(id[:], cursor[:]) < 0 {
			c.report("task %s waits in scope %x before its cursor %s", keys.FormatID(id), scope, cursor)
		}
		if scope != 0 && scope&keys.GroupScopeBit == 0 {
			parked[scope] = true
		}
		return err
	})
	held := 0
	for scope, f := range s.cursors.byScope {
		if n := waiting[scope]; n < len(f.ahead) {
			c.report("%d tasks wait in scope %x, memory has %d", n, scope, len(f.ahead))
		}
		for i := range f.ahead {
			held += f.ahead[i].size()
		}
	}
	if held != s.cursors.bytes {
		c.report("tasks that wait take %d bytes of memory, counted are %d", held, s.cursors.bytes)
	}
	for scope, st := range s.limits {
		if st.leased != leased[scope] {
			c.report("limit %x counts %d leases of %d", scope, st.leased, leased[scope])
		}
		if st.leased == 0 && !parked[scope] {
			c.report("limit %x is of no use", scope)
		}
	}
	for scope := range parked {
		if st := s.limits[scope]; st == nil || !st.parked || st.leased == 0 && !ready[scope] {
			c.report("nobody ends the wait for room in limit %x: %+v", scope, st)
		}
	}
	for scope := range leased {
		if s.limits[scope] == nil {
			c.report("limit %x does not count its leases", scope)
		}
	}
	return err
}

// settings: those that the shard applies are those on disk.
func (c *checker) settings() error {
	stored := make(map[string][]byte)
	err := schema.Scan(c.disk, keys.Settings, func(key, value []byte) error {
		stored[string(key[1:])] = bytes.Clone(value)
		return nil
	})
	for name, q := range c.state.Queues {
		value := stored[name]
		delete(stored, name)
		if !bytes.Equal(q.Value, value) || (q.Version == 0) != (value == nil) {
			c.report("settings of queue %q are %x, on disk %x", name, q.Value, value)
			continue
		}
		if value == nil {
			value = []byte("{}")
		}
		if want, err := ParseSettings(value); err != nil || !reflect.DeepEqual(q.Settings, want.Settings) {
			c.report("queue %q applies %+v, its settings are %s: %v", name, q.Settings, value, err)
		}
	}
	if len(stored) > 0 {
		c.report("settings on disk only: %q", stored)
	}
	return err
}

// times: no scheduled task is due, no bucket expires, and no idempotency key becomes free before
// the time at which the shard looks.
func (c *checker) times() error {
	s := c.state
	first := func(prefix byte, parse func(key []byte) (uint64, [keys.IDLen]byte, error)) (from dueCursor, err error) {
		from = nothingDue
		err = schema.Scan(c.disk, prefix, func(key, _ []byte) error {
			at, name, err := parse(key)
			from.lower(at, name)
			return err
		})
		return from, err
	}
	due, err1 := first(keys.Scheduled, keys.ParseScheduled)
	expiry, err2 := first(keys.Buckets, func(key []byte) (uint64, [keys.IDLen]byte, error) {
		_, _, until, err := keys.ParseBucket(key)
		return until, [keys.IDLen]byte{}, err
	})
	freed, err3 := first(keys.Freed, keys.ParseFreed)
	for _, t := range []struct {
		what        string
		next, first dueCursor
	}{{"scheduled task", s.nextDue, due}, {"bucket", dueCursor{at: s.expiries.Next()}, expiry}, {"idempotency key", s.nextFreed, freed}} {
		held := t.next
		if held.lower(t.first.at, t.first.name); held != t.next {
			c.report("the first %s is looked for from %x on, and is at %x", t.what, t.next, t.first)
		}
	}
	return errors.Join(err1, err2, err3)
}

// caches: what they hold of keys, groups and parents is as on disk, and nothing is missing that
// they should hold.
func (c *checker) caches() error {
	s := c.state
	return errors.Join(
		checkCache(c, "idempotency key", &s.uniques),
		checkCache(c, "group", &s.turns),
		checkCache(c, "number of parents", &s.pending),
		checkCache(c, "end being told", &s.teller.ends),
		checkCache(c, "number of pins", &s.pins.counts),
	)
}

// buckets: their sizes are those on disk.
func (c *checker) buckets() error {
	type place struct {
		queue uint32
		bucketKey
	}
	held := make(map[place]uint64)
	for _, q := range c.state.numbers.All() {
		if q == nil {
			continue
		}
		for k, b := range q.buckets {
			if b.queue != q || b.bucketKey != k || b.touched {
				c.report("bucket %+v of queue %q is %+v", k, q.Name, b)
			}
			held[place{q.number, k}] = b.size
		}
	}
	err := schema.Scan(c.disk, keys.Buckets, func(key, value []byte) error {
		prefix, number, until, err := keys.ParseBucket(key)
		if err != nil {
			return err
		}
		size, err := keys.ParseNumber(value)
		k := place{number, bucketKey{prefix, until}}
		if got, ok := held[k]; !ok || got != size {
			c.report("bucket %+v has size %d (%t), on disk %d", k, got, ok, size)
		}
		delete(held, k)
		return err
	})
	if len(held) > 0 {
		c.report("buckets in memory only: %+v", held)
	}
	return err
}

// outbox: as many messages wait as are stored, numbered between first and next, and none is being
// sent.
func (c *checker) outbox() error {
	out := &c.state.out
	n := make([]uint64, len(out.waiting))
	err := schema.Scan(c.disk, keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err == nil && (seq < out.first[to] || seq >= out.next[to]) {
			c.report("message %d for shard %d is not one of %d to %d", seq, to, out.first[to], out.next[to])
		}
		n[to]++
		return err
	})
	if !slices.Equal(n, out.waiting) {
		c.report("%d messages wait, on disk %d", out.waiting, n)
	}
	last := make([]uint64, len(out.next))
	err = errors.Join(err, schema.Scan(c.disk, keys.Sent, func(key, value []byte) error {
		to, err := keys.ParseNumbered(key)
		if err == nil {
			last[to], err = keys.ParseNumber(value)
		}
		return err
	}))
	for to, next := range out.next {
		if last[to] != next-1 || out.stored[to] != last[to] {
			c.report("the next message to shard %d is %d, the last one is %d, on disk %d", to, next, out.stored[to], last[to])
		}
	}
	err = errors.Join(err, schema.Scan(c.disk, keys.Inbound, func(key, value []byte) error {
		from, err := keys.ParseNumbered(key)
		if err != nil {
			return err
		}
		last, err := keys.ParseNumber(value)
		if got := c.state.inbound[from]; got != last {
			c.report("the last message of shard %d is %d, on disk %d", from, got, last)
		}
		return err
	}))
	return err
}

func (c *checker) ring(q *Queue, priority int) {
	r := q.rings[priority]
	var head *Lane
	if r != nil {
		head = r.first
		c.ahead(r)
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

func checkCache[K, V comparable](c *checker, what string, m *writeBackCache[K, V]) error {
	onDisk := make(map[K]V)
	err := schema.Scan(c.disk, m.prefix, func(key, value []byte) error {
		k, v, err := m.parse(key, value)
		onDisk[k] = v
		return err
	})
	if len(m.changed) > 0 {
		c.report("%d changes of %s are not stored", len(m.changed), what)
	}
	listed := 0
	for k := range onDisk {
		if !m.isListed(k) {
			continue
		}
		if listed++; !m.prints.Has(m.print(k)) {
			c.report("%s %v is on disk, and its fingerprint is missing", what, k)
		}
	}
	if n := m.prints.Len(); n != listed {
		c.report("%s: %d fingerprints of %d entries", what, n, listed)
	}
	for k, e := range m.held {
		v, ok := onDisk[k]
		if e.present != ok || (e.stored > 0) != ok || ok && e.value != v || e.changed {
			c.report("%s %v is held as %+v, on disk: %t, %+v", what, k, e, ok, v)
		}
		delete(onDisk, k)
	}
	if len(m.held) > m.most() {
		c.report("%d entries of %s are held", len(m.held), what)
	}
	if m.whole && len(onDisk) > 0 {
		c.report("%s is not held: %+v", what, onDisk)
	}
	return err
}

// items returns those of a window, which it empties and fills again.
func items(w *window.Window) []window.Item {
	var all []window.Item
	for w.Len() > 0 {
		all = append(all, w.PopFirst())
	}
	for _, it := range all {
		w.Insert(it)
	}
	return all
}

func positions(items []window.Item) string {
	var b bytes.Buffer
	for _, it := range items {
		fmt.Fprintf(&b, " %x/%s", it.Since, keys.FormatID(it.ID))
	}
	return fmt.Sprintf("[%d:%s]", len(items), b.String())
}

// recurring: the table has exactly the schedules on disk, and none ticks before the time at which
// the shard looks.
func (c *checker) recurring() error {
	t := &c.state.recurring
	onDisk := 0
	err := schema.Scan(c.disk, keys.Schedule, func(key, value []byte) error {
		name, err := keys.ParseSchedule(key)
		if err != nil {
			return err
		}
		onDisk++
		r := t.find(name)
		if r == nil || !bytes.Equal(value, r.value.Append(nil)) {
			c.report("schedule %q in memory is %+v, on disk %x", name, r, value)
			return nil
		}
		if r.Err == nil && r.next != r.times.Next(r.value.After) || t.next() > r.next {
			c.report("schedule %q ticks at %d, is looked at when it is %d", name, r.next, t.next())
		}
		if late := slices.Contains(t.late, r); late == (r.place >= 0) || !late && t.waiting.Items()[r.place] != r {
			c.report("schedule %q is at %d of those that wait, late: %v", name, r.place, late)
		}
		return nil
	})
	if onDisk != len(t.list) {
		c.report("%d schedules in memory, %d on disk", len(t.list), onDisk)
	}
	return err
}

// cursorOf is the ID before which no task waits in a scope.
func cursorOf(t *scanCursors, scope uint64) keys.ID {
	if f := t.byScope[scope]; f != nil {
		return f.id
	}
	return keys.ID{}
}
