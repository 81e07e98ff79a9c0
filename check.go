package codeq

import (
	"errors"
	"fmt"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/schema"
)

// check walks everything that a shard has stored and returns what contradicts
// itself:
//
//   - a task's record lies in one place only, in a lane of the catalogue, and
//     in a shard that its ID routes to;
//   - every entry of a lane has a queue; of those of one lane the last has its
//     ready and leased tasks; and the lane that an ID names is one of its queue;
//   - every record that has not ended and is not in its first place has an
//     index entry that points at it, and every index entry points at a record;
//   - every lease record has a lease that is in force;
//   - the counts of every queue, and the sizes of its buckets, are those of its
//     records;
//   - an idempotency key is held by a task that has not ended, or until a time at
//     which somebody looks;
//   - of the tasks of a group at most one is ready, leased, or between two
//     attempts: the one that has the turn; those that wait have somebody to
//     wait for;
//   - every task that is pinned is done and lies where it is not forgotten, and every pin is that of
//     a task that has not ended, or whose end is under way in a message; in a queue of one shard they agree;
//   - every task that waits for parents has parents that know of it, here or in
//     a message, and every parent says so in its record;
//   - a task of which is told that it has ended has done so;
//   - settings can be read, and the shard has those that it sends, or newer ones;
//   - no message has a number beyond that of the last one;
//   - every schedule can be read, and lies in the shard of its name.
func (v *view) check(index, shards int) error {
	return errors.Join(v.inspect(index, shards).errs...)
}

// inspect is check, and returns what it has found. It takes some 300 bytes of
// memory for each task.
func (v *view) inspect(index, shards int) *checker {
	c := &checker{
		view: v, index: index, shards: shards,
		seen: make(map[ID]*checkedTask), indexed: make(map[ID]bool), counts: make(map[uint32]keys.Counts),
		buckets: make(map[keys.Place]uint64), turns: make(map[uint64]keys.GroupValue),
		wakes: make(map[wakeKey]bool), pending: make(map[ID]uint64), versions: make(map[string]uint64),
		sent: make(map[uint32]uint64), lastLanes: make(map[laneKey]lastLane),
		pins: make(map[ID]uint64), leaving: make(map[ID]bool), told: make(map[ID]byte),
	}
	steps := []error{v.LoadLeases(), schema.Scan(v.snap, keys.Lane, c.lane)}
	for _, prefix := range recordRanges {
		steps = append(steps, schema.Scan(v.snap, prefix, c.record))
	}
	for _, n := range c.counts {
		c.tasks.Add(n)
	}
	steps = append(steps,
		schema.Scan(v.snap, keys.Index, c.entry),
		schema.ScanLeases(v.snap, c.leases),
		schema.Scan(v.snap, keys.Counters, c.counters),
		schema.Scan(v.snap, keys.Buckets, c.bucket),
		schema.Scan(v.snap, keys.Settings, c.settings),
		schema.Scan(v.snap, keys.Unique, c.unique),
		schema.Scan(v.snap, keys.Freed, c.freed),
		schema.Scan(v.snap, keys.Wake, c.wake),
		schema.Scan(v.snap, keys.Group, c.turn),
		schema.Scan(v.snap, keys.Pending, c.waits),
		schema.Scan(v.snap, keys.Telling, c.telling),
		schema.Scan(v.snap, keys.Pinned, c.pinned),
		schema.Scan(v.snap, keys.Dependent, c.dependent),
		schema.Scan(v.snap, keys.Sent, c.last),
		schema.Scan(v.snap, keys.Inbound, c.inbound),
		schema.Scan(v.snap, keys.Outbound, c.message),
		schema.Scan(v.snap, keys.Pin, c.pin),
		schema.Scan(v.snap, keys.Schedule, c.schedule),
	)
	c.finish()
	for _, err := range steps {
		if err != nil {
			c.errs = append(c.errs, err)
		}
	}
	return c
}

// recordRanges are the ranges in which the records of tasks lie.
var recordRanges = [...]byte{keys.Task, keys.Scheduled, keys.Blocked, keys.Dead, keys.Done, keys.Canceled}

type checker struct {
	view          *view
	index, shards int
	seen          map[ID]*checkedTask
	indexed       map[ID]bool
	counts        map[uint32]keys.Counts // found, by queue; counters strikes them off
	buckets       map[keys.Place]uint64  // found, likewise
	turns         map[uint64]keys.GroupValue
	wakes         map[wakeKey]bool
	pending       map[ID]uint64
	told          map[ID]byte       // by ID of the parent, the range of how it has ended
	versions      map[string]uint64 // of the settings
	lastLanes     map[laneKey]lastLane
	sent          map[uint32]uint64 // the last message, by receiver
	taken         uint64            // the last message from itself
	tasks         keys.Counts       // found, in all queues
	pins          map[ID]uint64     // that are counted, and are not found
	leaving       map[ID]bool       // tasks that let go of their parents
	errs          []error
}

// checkedTask is a task as the checker has found it.
type checkedTask struct {
	keys.Place
	record.Head
	state State
	queue uint32
	known uint64 // parents here that know of it
	keyed bool   // its idempotency key is its own
}

func (st *checkedTask) ended() bool { return keys.Ended(st.Range) }

type wakeKey struct {
	queue uint32
	scope uint64
	id    ID
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...))
}

// lastLane is the entry of a lane with the largest Seq.
type lastLane struct {
	number uint32
	seq    uint64
}

func (c *checker) lane(key, value []byte) error {
	n, err := keys.ParseNumbered(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseLaneValue(value)
	if err != nil {
		c.report("lane %d: %w", n, err)
		return nil
	}
	l, err := c.view.Lane(n)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	k := laneKey{l.Queue, l.Tenant, l.Priority}
	if last, ok := c.lastLanes[k]; ok && last.seq == v.Seq {
		c.report("lanes %d and %d are the same, %+v", last.number, n, k)
	} else if !ok || last.seq < v.Seq {
		c.lastLanes[k] = lastLane{n, v.Seq}
	}
	return nil
}

func (c *checker) record(key, value []byte) error {
	id, p, err := keys.ParsePlaceKey(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if other, ok := c.seen[id]; ok {
		c.report("task %s is at %+v and at %+v", ID(id), other.Place, p)
	}
	if got := ID(id).shard(c.shards); got != c.index {
		c.report("task %s of shard %d lies in shard %d", ID(id), got, c.index)
	}
	t, err := c.view.info(id, p, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	number, rec, _, err := schema.SplitValue(p, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	head, err := record.DecodeHead(rec)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	l, err := c.view.Lane(number)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if last := c.lastLanes[laneKey{l.Queue, l.Tenant, l.Priority}]; p.Range == keys.Task && last.number != number {
		c.report("task %s lies in lane %d, which has number %d now", ID(id), number, last.number)
	}
	if born, err := c.view.Lane(keys.LaneOf(id)); err != nil || born.QueueNumber != l.QueueNumber {
		c.report("task %s of queue %d has an ID of lane %d: %+v, %w", ID(id), l.QueueNumber, keys.LaneOf(id), born, err)
	}
	st := &checkedTask{Place: p, Head: head, state: t.State, queue: l.QueueNumber}
	c.seen[id] = st
	if want := t.groupScope(); want != head.Group {
		c.report("task %s of group %q has scope %x, not %x", t.ID, t.Group, head.Group, want)
	}
	if want := t.limitScope(); want != head.Limit {
		c.report("task %s of limit %q has scope %x, not %x", t.ID, t.LimitKey, head.Limit, want)
	}
	counts := c.counts[st.queue]
	switch t.State {
	case Ready:
		counts.Ready++
	case Scheduled:
		counts.Scheduled++
	case Blocked:
		counts.Blocked++
		if p.At != 0 && p.At != head.Group && p.At != head.Limit {
			c.report("task %s waits in scope %x, which is not its own", t.ID, p.At)
		}
	case Leased:
		counts.Leased++
	default:
		*counts.Ended(p.Range)++
		c.buckets[p]++
	}
	if p.Range != keys.Task && p.Range != keys.Scheduled && p.Group != st.queue {
		c.report("task %s of queue %d lies with queue %d", t.ID, st.queue, p.Group)
	}
	c.counts[st.queue] = counts
	return nil
}

func (c *checker) entry(key, value []byte) error {
	id, err := keys.ParseByID(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	p, err := keys.ParsePlace(value)
	if err != nil {
		c.report("index of task %s: %w", ID(id), err)
		return nil
	}
	c.indexed[id] = true
	if st := c.seen[id]; st == nil || st.Place != p {
		c.report("index says that task %s is at %+v; found: %+v", ID(id), p, st)
	}
	return nil
}

func (c *checker) leases(seq uint64, _ keys.LeaseHeader, entries []keys.LeaseEntry) error {
	live := 0
	for i := range entries {
		head, err := schema.LeasedHead(c.view.snap, &entries[i])
		if err != nil {
			c.report("%w", err)
		}
		if head != nil {
			live++
		}
	}
	if live == 0 {
		c.report("lease record %x has no lease in force", seq)
	}
	return nil
}

func (c *checker) counters(key, value []byte) error {
	n, err := keys.ParseNumbered(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseCounters(value)
	if err != nil {
		c.report("counters of queue %d: %w", n, err)
		return nil
	}
	if v.Counts != c.counts[n] {
		c.report("queue %d is counted as %+v and has %+v", n, v.Counts, c.counts[n])
	}
	delete(c.counts, n)
	return nil
}

func (c *checker) bucket(key, value []byte) error {
	prefix, number, until, err := keys.ParseBucket(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	size, err := keys.ParseNumber(value)
	p := keys.Place{Range: prefix, Group: number, At: until}
	if err != nil || size == 0 || size != c.buckets[p] {
		c.report("bucket %+v has %d tasks, its size is %x", p, c.buckets[p], value)
	}
	delete(c.buckets, p)
	return nil
}

func (c *checker) settings(key, value []byte) error {
	set, err := parseSettings(value)
	if err != nil {
		c.report("settings of queue %q: %w", key[1:], err)
	}
	c.versions[string(key[1:])] = set.version
	return nil
}

func (c *checker) unique(key, value []byte) error {
	hash, err := keys.ParseHashed(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseUnique(value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	st := c.seen[v.ID]
	if v.Until != 0 {
		b, err := schema.Lookup(c.view.snap, keys.AppendFreed(nil, v.Until, hash))
		if err != nil || b == nil {
			c.report("nothing frees idempotency key %x at %d: %v", hash, v.Until, err)
		}
	} else if st == nil || st.ended() {
		c.report("idempotency key %x is held by task %s, which has ended: %+v", hash, ID(v.ID), st)
	}
	if st != nil && st.Unique != hash {
		c.report("idempotency key %x is held by task %s, which has key %x", hash, ID(v.ID), st.Unique)
	} else if st != nil {
		st.keyed = true
	}
	return nil
}

func (c *checker) freed(key, _ []byte) error {
	at, hash, err := keys.ParseFreed(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	b, err := schema.Lookup(c.view.snap, keys.AppendHashed(nil, hash))
	if err != nil || b == nil {
		c.report("idempotency key %x, which is nobody's, is free at %d: %v", hash, at, err)
	} else if v, err := keys.ParseUnique(b); err != nil || v.Until != at {
		c.report("idempotency key %x is free at %d, not %d: %v", hash, at, v.Until, err)
	}
	return nil
}

func (c *checker) wake(key, value []byte) error {
	queue, scope, id, err := keys.ParseGrouped(key)
	if err != nil || len(value) != 1 {
		c.report("mark %x is %x: %w", key, value, err)
		return nil
	}
	c.wakes[wakeKey{queue, scope, id}] = true
	return nil
}

func (c *checker) turn(key, value []byte) error {
	scope, err := keys.ParseScope(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseGroup(value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	c.turns[scope] = v
	if v.Holder == (keys.ID{}) {
		return nil
	}
	if st := c.seen[v.Holder]; st == nil || st.ended() && !st.HoldsTurn || st.Head.Group != scope {
		c.report("task %s has the turn of group %x: %+v", ID(v.Holder), scope, st)
	}
	return nil
}

func (c *checker) waits(key, value []byte) error {
	id, err := keys.ParseByID(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	n, err := keys.ParseNumber(value)
	if err != nil || n == 0 {
		c.report("task %s waits for %d parents: %w", ID(id), n, err)
		return nil
	}
	if st := c.seen[id]; st == nil || st.Range != keys.Blocked || st.At != 0 {
		c.report("task %s waits for %d parents and is %+v", ID(id), n, st)
		return nil
	}
	c.pending[id] = n
	return nil
}

func (c *checker) telling(key, value []byte) error {
	parent, end, err := keys.ParseTelling(key, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	c.told[parent] = end
	if st := c.seen[parent]; st != nil && (st.Range != end || !st.Parent) {
		c.report("it is told of task %s that it is %v: %+v", parent, stateIn(end), st)
	}
	return nil
}

func (c *checker) dependent(key, value []byte) error {
	parent, child, err := keys.ParseDependent(key)
	if err != nil || len(value) != 1 || OnDead(value[0]) > RunOnDead {
		c.report("dependent %x is %x: %w", key, value, err)
		return nil
	}
	st := c.seen[parent]
	if c.told[parent] != 0 {
		// it will know, in one of the next groups
	} else if st == nil || !st.Parent || st.ended() && (st.state != Dead || st.At != keys.Forever) {
		c.report("task %s waits for %s, which is %+v", ID(child), ID(parent), st)
	}
	if st := c.seen[child]; st != nil {
		st.known++
	}
	return nil
}

func (c *checker) pinned(key, value []byte) error {
	id, err := keys.ParseByID(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParsePinned(value)
	if err != nil || v.Count == 0 || v.Until == keys.Forever {
		c.report("task %s is pinned by %+v: %w", ID(id), v, err)
	}
	if st := c.seen[id]; st == nil || st.state != Done || st.At != keys.Forever {
		c.report("task %s is pinned and is %+v", ID(id), st)
	}
	c.pins[id] += v.Count
	return nil
}

func (c *checker) pin(key, value []byte) error {
	child, parent, err := keys.ParsePin(key)
	if err != nil || len(value) != 0 {
		c.report("pin %x is %x: %w", key, value, err)
		return nil
	}
	if st := c.seen[child]; (st == nil || !st.Child || st.ended() && st.state != Dead) && !c.leaving[child] {
		c.report("task %s pins %s and is %+v", ID(child), ID(parent), st)
	}
	c.pins[parent]--
	return nil
}

func (c *checker) last(key, value []byte) error {
	to, err := keys.ParseNumbered(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	n, err := keys.ParseNumber(value)
	if err != nil || n == 0 || int(to) >= c.shards {
		c.report("last message to shard %d is %x: %w", to, value, err)
	}
	c.sent[to] = n
	return nil
}

func (c *checker) inbound(key, value []byte) error {
	from, err := keys.ParseNumbered(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	n, err := keys.ParseNumber(value)
	if err != nil || int(from) >= c.shards {
		c.report("last message from shard %d is %x: %w", from, value, err)
	}
	if int(from) == c.index {
		c.taken = n
	}
	return nil
}

func (c *checker) message(key, value []byte) error {
	to, seq, err := keys.ParseOutbound(key)
	if err != nil || seq > c.sent[to] {
		c.report("message %x comes after the last one, %d: %w", key, c.sent[to], err)
	}
	m, err := keys.ParseMessage(value)
	if err != nil {
		c.report("%w", err)
	}
	if st := c.seen[m.Child]; m.Kind == keys.MsgDepend && st != nil && !(int(to) == c.index && seq <= c.taken) {
		st.known++
	}
	if own := int(to) == c.index; !own || seq > c.taken {
		switch m.Kind {
		case keys.MsgUnpin:
			c.pins[m.Parent]--
		case keys.MsgLeft:
			c.leaving[m.Child] = true
		}
	}
	if m.Kind == keys.MsgSettings {
		if set, err := parseSettings(m.Settings); err != nil {
			c.report("message: settings of queue %q: %w", m.Queue, err)
		} else if own := c.versions[m.Queue]; set.version > own {
			c.report("shard %d has version %d of the settings of queue %q and sends version %d", c.index, own, m.Queue, set.version)
		}
	}
	return nil
}

func (c *checker) schedule(key, value []byte) error {
	r, err := parseRecurring(key, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if got := keys.ShardOfSchedule(r.name, c.shards); got != c.index {
		c.report("schedule %q of shard %d lies in shard %d", r.name, got, c.index)
	}
	return nil
}

// finish reports what only the whole shard shows.
func (c *checker) finish() {
	for id, st := range c.seen {
		if turn := c.turns[st.Head.Group]; st.HoldsTurn && (st.state != Dead || st.At != keys.Forever || turn.Holder != keys.ID(id)) {
			c.report("task %s at %+v holds the turn of group %x, which is %+v", id, st.Place, st.Head.Group, turn)
		}
		if st.ended() {
			continue
		}
		if first := keys.FirstPlace(keys.LaneOf(id), id); st.Place != first && !c.indexed[id] {
			c.report("task %s at %+v has no index entry", id, st.Place)
		}
		if st.Flags&record.HoldsKey != 0 && !st.keyed {
			c.report("task %s does not hold its idempotency key %x", id, st.Unique)
		}
		turn := c.turns[st.Head.Group]
		waits := st.Range == keys.Blocked && st.At == st.Head.Group
		switch {
		case st.Head.Group == 0:
		case waits && !turn.Waiting:
			c.report("task %s waits for the turn of group %x, which nobody passes on: %+v", id, st.Head.Group, turn)
		case waits && turn.Holder == keys.ID{} && !c.wakes[wakeKey{st.queue, st.Head.Group, ID{}}]:
			c.report("nobody gives the turn of group %x, for which task %s waits", st.Head.Group, id)
		case (st.state == Ready || st.state == Leased) && turn.Holder != keys.ID(id):
			c.report("task %s is %v, and %s has the turn of its group", id, st.state, ID(turn.Holder))
		}
		if st.Range == keys.Blocked && st.At == 0 {
			n, mark := c.pending[id], c.wakes[wakeKey{st.queue, 0, id}]
			if n == 0 && !mark {
				c.report("task %s waits for no parent", id)
			}
			if c.shards == 1 && !mark && n != st.known { // else some are told by other shards
				c.report("task %s waits for %d parents, of which %d know", id, n, st.known)
			}
		}
	}
	for n, counts := range c.counts {
		c.report("queue %d has tasks and no counters: %+v", n, counts)
	}
	for id, n := range c.pins {
		if c.told[id] != 0 && n > 0 {
			n-- // that of the telling
		}
		if n != 0 && c.shards == 1 { // else others pin them
			c.report("task %s is pinned by %d tasks more than there are", id, int64(n))
		}
	}
	for p, n := range c.buckets {
		c.report("bucket %+v has %d tasks and no size", p, n)
	}
}
