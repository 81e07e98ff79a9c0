package fsck

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/convert"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// Check scans everything that a shard has stored and returns the contradictions:
//
//   - a task's record lies in one place only, in a lane of the catalogue, and in the shard to which
//     its ID routes;
//   - every entry of a lane has a queue; the last of several entries of a lane has its ready and
//     leased tasks; and the lane in an ID belongs to the task's queue;
//   - every unended record that is not in its first place has an index entry that points to it, and
//     every index entry points to a record;
//   - every lease record has a valid lease, and the clocks of leases
//     and of periods can be read;
//   - the counts of every queue, and the sizes of its buckets, are those of its records, and so are
//     the counts of dead letters by kind, as far as their records have one; each kind has a text;
//   - the totals of a queue do not decrease from day to day, and only one number has those of its
//     name;
//   - an idempotency key is held by an unended task, or until a time at which the shard checks it;
//   - at most one task of a group is ready, leased, or between two attempts: the one that has the
//     turn; those that wait will be given it;
//   - every pinned task is done and lies where it does not expire; no other task is kept for longer
//     than its retention;
//   - every pin belongs to an unended task, or one whose end is in a message;
//   - every task that waits for parents counts them, and every parent says so in its record;
//   - a task whose children are being told of its end has ended;
//   - steps, signals and cursors belong to unended tasks, are within their bounds and have no gaps,
//     and those of a task that is not leased are as its record says;
//   - settings can be read, and the shard has those that it sends, or newer ones;
//   - no message has a number beyond that of the last one;
//   - every schedule can be read, and lies in the shard of its name;
//   - the only shard of a queue agrees with itself (convert.Crosscheck).
//
// It takes about 300 bytes of memory for each task. r must not change meanwhile.
func Check(r pebble.Reader, rules *Rules, index, shards int) error {
	c := inspect(r, rules, index, shards)
	if shards == 1 && len(c.errs) == 0 {
		found, err := convert.Crosscheck([]pebble.Reader{r})
		for _, f := range found {
			c.report("%s", f.Text)
		}
		c.errs = append(c.errs, err)
	}
	return errors.Join(c.errs...)
}

// inspect is Check without Crosscheck, and returns all findings.
func inspect(r pebble.Reader, rules *Rules, index, shards int) *checker {
	c := &checker{
		r: r, view: store.NewSnapshot(r), rules: rules, index: index, shards: shards,
		seen: make(map[taskID]*checkedTask), indexed: make(map[taskID]bool), counts: make(map[uint32]keys.Counts),
		buckets: make(map[keys.Place]uint64), turns: make(map[uint64]keys.GroupValue),
		wakes: make(map[wakeKey]bool), pending: make(map[taskID]bool), versions: make(map[string]uint64), unknown: make(map[string]uint64),
		sent: make(map[uint32]uint64), lastLanes: make(map[laneKey]lastLane),
		totals: make(map[string]keys.TotalsValue), counted: make(map[string]bool), leaving: make(map[taskID]bool), told: make(map[taskID]byte),
		steps: make(map[taskID]foundSteps), kinds: make(map[bucketKind]*foundKind), usedKinds: make(map[queueKind]bool),
	}
	steps := []error{c.view.LoadLeases(), each(c, keys.Lane, keys.ParseNumbered, keys.ParseLaneValue, c.lane)}
	for _, prefix := range keys.RecordRanges {
		steps = append(steps, store.Scan(r, prefix, c.record))
	}
	for _, n := range c.counts {
		c.tasks.Add(n)
	}
	steps = append(steps,
		each(c, keys.Index, keys.ParseByID, keys.ParsePlace, c.entry),
		store.ScanLeases(r, c.leases),
		c.lone(keys.LeaseTime), c.lone(keys.PeriodTime), c.lone(keys.ClockSets), c.lone(keys.Granted),
		store.Scan(r, keys.Daily, c.day),
		each(c, keys.Counters, keys.ParseNumbered, keys.ParseCounters, c.counters),
		store.Scan(r, keys.Buckets, c.bucket),
		store.Scan(r, keys.DeadKind, c.deadKind),
		store.Scan(r, keys.Settings, c.settings),
		each(c, keys.Unique, keys.ParseHashed, keys.ParseUnique, c.unique),
		store.Scan(r, keys.Freed, c.freed),
		store.Scan(r, keys.Wake, c.wake),
		each(c, keys.Group, keys.ParseScope, keys.ParseGroup, c.turn),
		each(c, keys.Pending, keys.ParseByID, keys.ParseNumber, c.waits),
		store.Scan(r, keys.Telling, c.telling),
		each(c, keys.Pinned, keys.ParseByID, keys.ParsePinned, c.pinned),
		store.Scan(r, keys.Dependent, c.dependent),
		each(c, keys.Sent, keys.ParseNumbered, keys.ParseNumber, c.last),
		each(c, keys.Inbound, keys.ParseNumbered, keys.ParseNumber, c.inbound),
		store.Scan(r, keys.Outbound, c.message),
		store.Scan(r, keys.Pin, c.pin),
		store.Scan(r, keys.Schedule, c.schedule),
		store.Scan(r, keys.Step, c.beside),
	)
	c.finish()
	for _, err := range steps {
		if err != nil {
			c.errs = append(c.errs, err)
		}
	}
	return c
}

type checker struct {
	notUTF8       []keys.ID
	r             pebble.Reader
	view          *store.Snapshot
	rules         *Rules
	index, shards int
	seen          map[taskID]*checkedTask
	indexed       map[taskID]bool
	counts        map[uint32]keys.Counts      // found, by queue; counters removes the compared ones
	totals        map[string]keys.TotalsValue // the last that were found, by queue
	counted       map[string]bool             // queues with totals in their counters
	buckets       map[keys.Place]uint64       // found; bucket removes those that it has compared
	turns         map[uint64]keys.GroupValue
	wakes         map[wakeKey]bool
	pending       map[taskID]bool       // tasks that count parents
	told          map[taskID]byte       // by ID of the parent, its last range
	steps         map[taskID]foundSteps // of unended tasks
	versions      map[string]uint64     // of the settings
	unknown       map[string]uint64     // of settings that the shard sends, and does not have
	lastLanes     map[laneKey]lastLane
	sent          map[uint32]uint64         // the last message, by receiver
	taken         uint64                    // the last message from itself
	tasks         keys.Counts               // found, in all queues
	leaving       map[taskID]bool           // tasks that release their parents
	kinds         map[bucketKind]*foundKind // of dead letters; bucket removes the compared ones
	usedKinds     map[queueKind]bool        // that buckets count; deadKind removes those with a text
	errs          []error
}

// checkedTask is a task as the checker found it.
type checkedTask struct {
	keys.Place
	record.Head
	queue  uint32
	leased bool
	keyed  bool // its idempotency key is its own
	pinned bool // the shard has a number of its pins
}

func (st *checkedTask) ended() bool { return keys.Ended(st.Range) }

// isKept reports whether only pins can be the reason why a task lies where it does not expire.
func (st *checkedTask) isKept() bool {
	return st.Range == keys.Done && st.At == keys.Forever && st.Retention != 0 && keys.BucketOf(0, st.Retention) != keys.Forever
}

// laneKey identifies a lane.
type laneKey struct {
	queue    string
	tenant   string
	priority uint8
}

type wakeKey struct {
	queue uint32
	scope uint64
	id    taskID
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%w: "+format, append([]any{base.ErrCorrupt}, args...)...))
}

// each visits the parsed entries of a range, and reports those that cannot be parsed.
func each[K, V any](
	c *checker, prefix byte, parseKey func([]byte) (K, error), parseValue func([]byte) (V, error), visit func(K, V),
) error {
	return store.Scan(c.r, prefix, func(key, value []byte) error {
		k, err := parseKey(key)
		v, valueErr := parseValue(value)
		if err := errors.Join(err, valueErr); err != nil {
			c.report("key %x: %w", key, err)
			return nil
		}
		visit(k, v)
		return nil
	})
}

// lastLane is the entry of a lane with the largest Seq.
type lastLane struct {
	number uint32
	seq    uint64
}

func (c *checker) lane(n uint32, v keys.LaneValue) {
	l, err := c.view.Lane(n)
	if err != nil {
		c.report("%w", err)
		return
	}
	k := laneKey{l.Queue, l.Tenant, l.Priority}
	if last, ok := c.lastLanes[k]; ok && last.seq == v.Seq {
		c.report("lanes %d and %d are the same, %+v", last.number, n, k)
	} else if !ok || last.seq < v.Seq {
		c.lastLanes[k] = lastLane{n, v.Seq}
	}
}

func (c *checker) record(key, value []byte) error {
	id, p, err := keys.ParsePlaceKey(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if other, ok := c.seen[id]; ok {
		c.report("task %s is at %+v and at %+v", taskID(id), other.Place, p)
	}
	if got := taskID(id).shard(c.shards); got != c.index {
		c.report("task %s of shard %d lies in shard %d", taskID(id), got, c.index)
	}
	t, err := c.view.Task(id, p, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	l, rec := t.Lane, &t.Record
	if last := c.lastLanes[laneKey{l.Queue, l.Tenant, l.Priority}]; p.Range == keys.Task && last.number != l.Number {
		c.report("task %s lies in lane %d, which has number %d now", taskID(id), l.Number, last.number)
	}
	if born, err := c.view.Lane(keys.LaneOf(id)); err != nil || born.QueueNumber != l.QueueNumber {
		c.report("task %s of queue %d has an ID of lane %d: %+v, %w", taskID(id), l.QueueNumber, keys.LaneOf(id), born, err)
	}
	st := &checkedTask{Place: p, Head: rec.Head, queue: l.QueueNumber, leased: t.Lease != nil}
	c.seen[id] = st
	if !isUTF8(l.Queue, l.Tenant, rec) {
		c.notUTF8 = append(c.notUTF8, keys.ID(id))
	}
	if want := keys.GroupScope(l.Queue, l.Tenant, rec.LimitKey, rec.GroupKey); want != rec.Group {
		c.report("task %s of group %q has scope %x, not %x", taskID(id), rec.GroupKey, rec.Group, want)
	}
	if want := keys.LimitScope(l.Queue, rec.LimitKey); want != rec.Limit {
		c.report("task %s of limit %q has scope %x, not %x", taskID(id), rec.LimitKey, rec.Limit, want)
	}
	if err := rec.Sound(); err != nil {
		c.report("task %s: %w", taskID(id), err)
	}
	if p.Range == keys.Blocked && p.At != 0 && p.At != rec.Group && p.At != rec.Limit &&
		!(rec.Suspect && p.At == keys.SuspectScope(l.Queue, keys.SuspectPart(p.At))) {
		c.report("task %s waits in scope %x, which is not its own", taskID(id), p.At)
	}
	counts := c.counts[st.queue]
	if st.count(&counts) {
		c.buckets[p]++
	}
	if rec.DeadKind != 0 && p.Range != keys.Dead {
		c.report("task %s is no dead letter, and counted as one of kind %d", taskID(id), rec.DeadKind)
	} else if rec.DeadKind != 0 {
		c.foundDead(id, p, rec.DeadKind, t.Ended.At)
	}
	if p.Range != keys.Task && p.Range != keys.Scheduled && p.Group != st.queue {
		c.report("task %s of queue %d lies with queue %d", taskID(id), st.queue, p.Group)
	}
	c.counts[st.queue] = counts
	return nil
}

// isUTF8 reports whether the names, keys and headers of a task are UTF-8, as those of new tasks.
func isUTF8(queue, tenant string, rec *record.Record) bool {
	for k, v := range rec.Headers {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return false
		}
	}
	return utf8.ValidString(queue) && utf8.ValidString(tenant) && utf8.ValidString(rec.GroupKey) &&
		utf8.ValidString(rec.LimitKey) && utf8.ValidString(rec.Kind) && utf8.ValidString(rec.UniqueKey)
}

func (c *checker) entry(id keys.ID, p keys.Place) {
	c.indexed[id] = true
	if st := c.seen[id]; st == nil || st.Place != p {
		c.report("index says that task %s is at %+v; found: %+v", taskID(id), p, st)
	}
}

func (c *checker) leases(seq uint64, _ keys.LeaseHeader, entries []keys.LeaseEntry) error {
	live := 0
	for i := range entries {
		head, err := store.LeasedHead(c.r, &entries[i])
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

// loneRange is a range with entries that no other range contradicts.
type loneRange struct {
	name  string
	parse func(key, value []byte) error
}

var loneRanges = map[byte]loneRange{
	keys.LeaseTime:  {"clock of leases", func(key, value []byte) error { _, err := keys.ParseLeaseTime(value); return single(key, err) }},
	keys.PeriodTime: {"clock of periods", func(key, value []byte) error { _, err := keys.ParsePeriodTime(value); return single(key, err) }},
	keys.ClockSets:  {"list of set clocks", func(key, value []byte) error { _, err := keys.ParseClockSets(value); return single(key, err) }},
	keys.Granted:    {"last grant of a queue", func(_, value []byte) error { _, err := keys.ParseNumber(value); return err }},
}

// single returns err, or an error unless the key is that of a range with one entry.
func single(key []byte, err error) error {
	if err == nil && len(key) != 1 {
		err = errors.New("the key is too long")
	}
	return err
}

// lone checks the entries of a range that no other range contradicts.
func (c *checker) lone(prefix byte) error {
	of := loneRanges[prefix]
	return store.Scan(c.r, prefix, func(key, value []byte) error {
		if err := of.parse(key, value); err != nil {
			c.report("%s %x is %x: %w", of.name, key, value, err)
		}
		return nil
	})
}

func (c *checker) counters(n uint32, v keys.CountersValue) {
	if v.Counts != c.counts[n] {
		c.report("queue %d is counted as %+v and has %+v", n, v.Counts, c.counts[n])
	}
	delete(c.counts, n)
	if v.Totals.Day == 0 {
		return
	}
	name, err := store.Lookup(c.r, keys.AppendNumbered(nil, keys.Queue, n))
	if err != nil || name == nil {
		c.report("queue %d has totals and no name: %v", n, err)
	}
	if c.counted[string(name)] {
		c.report("queue %q has totals under several numbers", name)
	}
	c.counted[string(name)] = true
	c.follows(string(name), v.Totals)
}

// day checks a row of totals.
func (c *checker) day(key, value []byte) error {
	if len(key) == 1 {
		if _, err := keys.ParseNumber(value); err != nil {
			c.report("sweep of totals: %w", err)
		}
		return nil
	}
	queue, day, err := keys.ParseTotalsKey(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseTotals(value)
	if err != nil || v.Day != day {
		c.report("totals of queue %q on day %d are those of %d: %w", queue, day, v.Day, err)
		return nil
	}
	c.follows(string(queue), v)
	return nil
}

// follows checks that nothing has happened less often than by an earlier day.
func (c *checker) follows(queue string, v keys.TotalsValue) {
	if last := c.totals[queue]; v.Day < last.Day || !v.All.AtLeast(&last.All) {
		c.report("totals of queue %q are %+v after %+v", queue, v, last)
	}
	c.totals[queue] = v
}

func (c *checker) bucket(key, value []byte) error {
	prefix, number, until, err := keys.ParseBucket(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseBucketValue(value)
	p := keys.Place{Range: prefix, Group: number, At: until}
	if err != nil || v.Size == 0 || v.Size != c.buckets[p] {
		c.report("bucket %+v has %d tasks, its size is %x", p, c.buckets[p], value)
	}
	delete(c.buckets, p)
	c.bucketKinds(p, &v)
	return nil
}

func (c *checker) settings(key, value []byte) error {
	version, err := c.rules.Settings(value)
	if err != nil {
		c.report("settings of queue %q: %w", key[1:], err)
	}
	c.versions[string(key[1:])] = version
	return nil
}

func (c *checker) unique(hash [keys.UniqueLen]byte, v keys.UniqueValue) {
	st := c.seen[v.ID]
	if v.Until != 0 {
		b, err := store.Lookup(c.r, keys.AppendFreed(nil, v.Until, hash))
		if err != nil || b == nil {
			c.report("nothing frees idempotency key %x at %d: %v", hash, v.Until, err)
		}
	} else if st == nil || st.ended() {
		c.report("idempotency key %x is held by task %s, which has ended: %+v", hash, taskID(v.ID), st)
	}
	if st != nil && st.Unique != hash {
		c.report("idempotency key %x is held by task %s, which has key %x", hash, taskID(v.ID), st.Unique)
	} else if st != nil {
		st.keyed = true
	}
}

func (c *checker) freed(key, _ []byte) error {
	at, hash, err := keys.ParseFreed(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	b, err := store.Lookup(c.r, keys.AppendHashed(nil, hash))
	if err != nil || b == nil {
		c.report("idempotency key %x, which has no holder, is free at %d: %v", hash, at, err)
	} else if v, err := keys.ParseUnique(b); err != nil || v.Until != at {
		c.report("idempotency key %x is free at %d, not %d: %v", hash, at, v.Until, err)
	}
	return nil
}

func (c *checker) wake(key, value []byte) error {
	queue, scope, id, err := keys.ParseGrouped(key)
	if err != nil || len(value) != 1 {
		c.report("wakeup %x has value %x: %w", key, value, err)
		return nil
	}
	c.wakes[wakeKey{queue, scope, id}] = true
	return nil
}

func (c *checker) turn(scope uint64, v keys.GroupValue) {
	c.turns[scope] = v
	if v.Holder == (keys.ID{}) {
		return
	}
	if st := c.seen[v.Holder]; st == nil || st.ended() && !st.HoldsTurn || st.Head.Group != scope {
		c.report("task %s has the turn of group %x: %+v", taskID(v.Holder), scope, st)
	}
}

func (c *checker) waits(id keys.ID, n uint64) {
	if st := c.seen[id]; n == 0 || st == nil || st.Range != keys.Blocked || st.At != 0 {
		c.report("task %s waits for %d parents and is %+v", taskID(id), n, st)
		return
	}
	c.pending[id] = true
}

func (c *checker) telling(key, value []byte) error {
	parent, end, err := keys.ParseTelling(key, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	c.told[parent] = end
	if st := c.seen[parent]; st != nil && (st.Range != end || !st.Parent) {
		c.report("children of task %s learn that it lies in range %#x: %+v", parent, end, st)
	}
	return nil
}

func (c *checker) dependent(key, value []byte) error {
	parent, child, err := keys.ParseDependent(key)
	if err != nil || len(value) != 1 || value[0] > keys.AtAnyEnd {
		c.report("dependent %x has value %x: %w", key, value, err)
		return nil
	}
	st := c.seen[parent]
	if c.told[parent] != 0 {
		// the child will be told in one of the next groups
	} else if st == nil || !st.Parent || st.ended() && (st.Range != keys.Dead || st.At != keys.Forever) {
		c.report("task %s waits for %s, which is %+v", taskID(child), taskID(parent), st)
	}
	return nil
}

func (c *checker) pinned(id keys.ID, v keys.PinnedValue) {
	if v.Count == 0 || v.Until == keys.Forever {
		c.report("task %s is pinned by %+v", taskID(id), v)
	}
	if st := c.seen[id]; st == nil || st.Range != keys.Done || st.At != keys.Forever {
		c.report("task %s is pinned and is %+v", taskID(id), st)
	} else {
		st.pinned = true
	}
}

func (c *checker) pin(key, value []byte) error {
	child, parent, err := keys.ParsePin(key)
	if err != nil || len(value) != 0 {
		c.report("pin %x has value %x: %w", key, value, err)
		return nil
	}
	if st := c.seen[child]; (st == nil || !st.Child || st.ended() && st.Range != keys.Dead) && !c.leaving[child] {
		c.report("task %s pins %s and is %+v", taskID(child), taskID(parent), st)
	}
	return nil
}

func (c *checker) last(to uint32, n uint64) {
	if n == 0 || int(to) >= c.shards {
		c.report("last message to shard %d has number %d", to, n)
	}
	c.sent[to] = n
}

func (c *checker) inbound(from uint32, n uint64) {
	if int(from) >= c.shards {
		c.report("last message from shard %d has number %d", from, n)
	}
	if int(from) == c.index {
		c.taken = n
	}
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
	if m.Kind == keys.MsgLeft && (int(to) != c.index || seq > c.taken) {
		c.leaving[m.Child] = true
	}
	if m.Kind == keys.MsgSettings {
		c.sentSettings(m)
	}
	return nil
}

// sentSettings notes settings that the shard sends. The messages to a shard come in their order.
func (c *checker) sentSettings(m keys.Message) {
	version, err := c.rules.Settings(m.Settings)
	if err != nil {
		c.report("message: settings of queue %q: %w", m.Queue, err)
		return
	}
	if v, _ := keys.ParseSettings(m.Settings); v.IsNone() { // those before were removed
		delete(c.unknown, m.Queue)
	} else if version > max(c.versions[m.Queue], c.versions[""]) {
		c.unknown[m.Queue] = version
	}
}

func (c *checker) schedule(key, value []byte) error {
	name, err := c.rules.Schedule(key, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if got := keys.ShardOfSchedule(name, c.shards); got != c.index {
		c.report("schedule %q of shard %d lies in shard %d", name, got, c.index)
	}
	return nil
}

// finish reports contradictions that show only when the whole shard was read.
func (c *checker) finish() {
	for queue, version := range c.unknown {
		c.report("shard %d has version %d of the settings of queue %q and sends version %d", c.index, c.versions[queue], queue, version)
	}
	for id, st := range c.seen {
		if turn := c.turns[st.Head.Group]; st.HoldsTurn && (st.Range != keys.Dead || st.At != keys.Forever || turn.Holder != keys.ID(id)) {
			c.report("task %s at %+v holds the turn of group %x, which is %+v", id, st.Place, st.Head.Group, turn)
		}
		if st.isKept() && !st.pinned {
			c.report("task %s at %+v is kept for longer than its retention, and is not pinned", id, st.Place)
		}
		c.finishSteps(id, st)
		if st.ended() {
			continue
		}
		if st.IsIndexed(keys.ID(id)) && !c.indexed[id] {
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
			c.report("task %s waits for the turn of group %x, which does not pass on: %+v", id, st.Head.Group, turn)
		case waits && turn.Holder == keys.ID{} && !c.wakes[wakeKey{st.queue, st.Head.Group, taskID{}}]:
			c.report("no wakeup gives the turn of group %x to task %s, which waits for it", st.Head.Group, id)
		case st.Range == keys.Task && turn.Holder != keys.ID(id):
			c.report("task %s is at %+v, and %s has the turn of its group", id, st.Place, taskID(turn.Holder))
		}
		if st.Range == keys.Blocked && st.At == 0 && !c.pending[id] && !c.wakes[wakeKey{st.queue, 0, id}] {
			c.report("task %s waits for no parent", id)
		}
	}
	for n, counts := range c.counts {
		c.report("queue %d has tasks and no counters: %+v", n, counts)
	}
	for p, n := range c.buckets {
		c.report("bucket %+v has %d tasks and no size", p, n)
	}
	c.finishKinds()
}
