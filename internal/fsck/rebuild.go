package fsck

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// rebuilder writes a store from the readable entries of another one.
type rebuilder struct {
	rules         *Rules
	old           *salvage
	db            *pebble.DB
	batch         *pebble.Batch
	index, shards int

	tasks  map[taskID]*rebuiltTask
	queues map[uint32]string
	lanes  map[uint32]keys.LaneValue
	wakes  map[wakeKey]byte
	sent   map[uint32]uint64 // the last message, by receiver
	latest map[string]uint64 // versions of the settings, by queue
	clock  uint64            // the largest number minted, as far as is known
	damage error             // why something could not be written

	told    map[taskID]bool // parents that are telling their children of their end
	leaving map[taskID]bool // tasks that release their parents
}

// rebuiltTask is the part of a task that the entries about it follow from.
type rebuiltTask struct {
	checkedTask
	lane    uint32
	parents int // different ones, of a task that waits for them
}

func (b *rebuilder) rebuild(identity string) error {
	b.set([]byte{keys.Meta}, []byte(identity))
	for _, step := range []func() error{
		b.copyRecords, b.rebuildCatalogue, b.copyLeases, b.copySteps, b.rebuildCounters, b.copySound, b.rebuildUnique, b.rebuildWakeups,
		b.rebuildTurns, b.copyMessages, b.rebuildParents, b.copyPins, b.writeSent, b.writeWakeups,
	} {
		if err := errors.Join(step(), b.commit(), b.damage); err != nil {
			return err
		}
	}
	return nil
}

// batchBytes is how much is written in one batch.
const batchBytes = 1 << 20

func (b *rebuilder) set(key, value []byte) {
	if b.damage != nil {
		return
	}
	if err := b.batch.Set(key, value, nil); err != nil {
		b.damage = err
	}
	if b.batch.Len() > batchBytes {
		if err := b.commit(); err != nil {
			b.damage = err
		}
	}
}

func (b *rebuilder) commit() error {
	err := b.batch.Commit(pebble.NoSync)
	b.batch = b.db.NewBatch()
	return err
}

// copyRecords copies the tasks. If a task lies in two places, the one that its index entry names is
// right, or else the first one.
func (b *rebuilder) copyRecords() error {
	indexed := make(map[taskID]keys.Place)
	if err := scanParsed(b.old, keys.Index, keys.ParseByID, keys.ParsePlace, func(id keys.ID, p keys.Place, _, _ []byte) {
		indexed[id] = p
	}); err != nil {
		return err
	}
	for _, prefix := range keys.RecordRanges {
		if err := b.old.scan(prefix, func(key, value []byte) {
			t, id, ok := b.task(key, value)
			if !ok {
				return
			}
			old := b.tasks[id]
			if old != nil && indexed[id] != t.Place {
				return
			}
			if old != nil {
				b.damage = errors.Join(b.damage, b.commit(), b.db.Delete(old.AppendKey(nil, id), pebble.NoSync))
			}
			b.tasks[id] = t
			if t.DeadKind != 0 { // the shard counts dead letters again
				var err error
				value, err = changed(t.Place, value, func(rec *record.Record) { rec.DeadKind = 0 })
				b.damage = errors.Join(b.damage, err)
			}
			b.set(key, value)
			b.clock = max(b.clock, keys.ClockOf(id))
		}); err != nil {
			return err
		}
	}
	for id, t := range b.tasks {
		if t.IsIndexed(keys.ID(id)) {
			b.set(keys.AppendByID(nil, keys.Index, id), t.Append(nil))
		}
	}
	return nil
}

// rewrite changes the record of a task. REQUIRES: the records are committed.
func (b *rebuilder) rewrite(id taskID, t *rebuiltTask, change func(*record.Record)) error {
	key := t.AppendKey(nil, id)
	value, err := store.Lookup(b.db, key)
	if err == nil {
		value, err = changed(t.Place, value, change)
	}
	if err == nil {
		b.set(key, value)
	}
	return err
}

// changed returns the value of a task with a changed record.
func changed(p keys.Place, value []byte, change func(*record.Record)) ([]byte, error) {
	lane, stored, ended, err := store.SplitValue(p, value)
	if err != nil {
		return nil, err
	}
	rec, err := record.Decode(stored)
	if err != nil {
		return nil, err
	}
	change(&rec)
	return store.JoinValue(p, lane, &rec, ended), nil
}

// task decodes a task; ok is false if that fails, or the task belongs to another shard.
func (b *rebuilder) task(key, value []byte) (t *rebuiltTask, id taskID, ok bool) {
	raw, p, err := keys.ParsePlaceKey(key)
	if id = raw; err != nil || id.shard(b.shards) != b.index {
		return nil, id, false
	}
	lane, rec, _, err := store.SplitValue(p, value)
	if err != nil {
		return nil, id, false
	}
	r, err := record.Decode(rec)
	if err != nil {
		return nil, id, false
	}
	t = &rebuiltTask{checkedTask: checkedTask{Place: p, Head: r.Head}, lane: lane}
	if t.waitsForParents() {
		parents := make(map[keys.ID]bool)
		for _, id := range r.Parents {
			parents[id] = true
		}
		t.parents = len(parents)
	}
	return t, id, true
}

func (t *rebuiltTask) waitsForParents() bool { return t.Range == keys.Blocked && t.At == 0 }

// rebuildCatalogue copies the names of queues and lanes. A name that tasks need and that cannot be
// read is replaced by a new one, so that no task gets a wrong one.
func (b *rebuilder) rebuildCatalogue() error {
	var lastQueue uint32
	if err := b.old.scan(keys.Queue, func(key, value []byte) {
		if n, err := keys.ParseNumbered(key); err == nil && n > 0 && n <= keys.MaxLane {
			b.queues[n] = string(value)
			lastQueue = max(lastQueue, n)
		}
	}); err != nil {
		return err
	}
	if err := scanParsed(b.old, keys.Lane, keys.ParseNumbered, keys.ParseLaneValue, func(n uint32, v keys.LaneValue, _, _ []byte) {
		if v.Queue > 0 && v.Queue <= keys.MaxLane && v.Priority <= keys.MaxPriority && n <= keys.MaxLane {
			b.lanes[n] = v
			lastQueue = max(lastQueue, v.Queue)
		}
	}); err != nil {
		return err
	}
	// the queue of a lane, as far as the keys of its tasks tell; 0: unknown
	used := make(map[uint32]uint32)
	for _, t := range b.tasks {
		used[t.lane] = max(used[t.lane], 0)
		if t.Range != keys.Task && t.Range != keys.Scheduled {
			used[t.lane] = t.Group
			lastQueue = max(lastQueue, t.Group)
		}
	}
	recover := func(n, queue uint32) {
		if _, ok := b.lanes[n]; !ok {
			b.lanes[n] = keys.LaneValue{Queue: queue, Tenant: fmt.Sprint("recovered-lane-", n)}
		}
	}
	for _, n := range slices.Sorted(maps.Keys(used)) {
		if _, ok := b.lanes[n]; !ok && used[n] == 0 {
			lastQueue++
			used[n] = lastQueue
		}
		recover(n, used[n])
	}
	for id, t := range b.tasks {
		recover(keys.LaneOf(id), b.lanes[t.lane].Queue)
	}
	for n, v := range b.lanes {
		if _, ok := b.queues[v.Queue]; !ok {
			b.queues[v.Queue] = fmt.Sprint("recovered-queue-", v.Queue)
		}
		b.set(keys.AppendNumbered(nil, keys.Lane, n), v.Append(nil))
	}
	for n, name := range b.queues {
		b.set(keys.AppendNumbered(nil, keys.Queue, n), []byte(name))
	}
	for _, t := range b.tasks {
		t.queue = b.lanes[t.lane].Queue
	}
	return nil
}

// copyLeases copies the lease records that have a valid lease.
func (b *rebuilder) copyLeases() error {
	return b.old.scan(keys.Lease, func(key, value []byte) {
		seq, err := keys.ParseLease(key)
		if err != nil {
			return
		}
		_, entries, err := keys.ParseLeases(seq, value)
		if err != nil {
			return
		}
		valid := false
		for i := range entries {
			e := &entries[i]
			t := b.tasks[e.ID]
			if t == nil || t.Place != (keys.Place{Range: keys.Task, Group: e.Lane, At: e.Since}) || !store.IsLeaseOf(e, &t.Head) {
				continue
			}
			valid, t.leased = true, true
		}
		if valid {
			b.set(key, value)
			b.clock = max(b.clock, seq)
		}
	})
}

// rebuildCounters counts the tasks, and copies the totals.
func (b *rebuilder) rebuildCounters() error {
	totals := make(map[string]keys.TotalsValue)
	if err := scanParsed(b.old, keys.Counters, keys.ParseNumbered, keys.ParseCounters, func(n uint32, v keys.CountersValue, _, _ []byte) {
		b.clock = max(b.clock, v.Clock)
		name, named := b.queues[n]
		if t := totals[name]; named && v.Totals.Day >= t.Day && v.Totals.All.AtLeast(&t.All) {
			totals[name] = v.Totals
		}
	}); err != nil {
		return err
	}
	counts, buckets := make(map[uint32]keys.Counts), make(map[keys.Place]uint64)
	counts[0] = keys.Counts{} // no queue: for the clock
	for n := range b.queues {
		counts[n] = keys.Counts{}
	}
	for _, t := range b.tasks {
		c := counts[t.queue]
		if t.count(&c) {
			buckets[t.Place]++
		}
		counts[t.queue] = c
	}
	numbers := make(map[string]uint32) // those under which queues have their totals: with their tasks
	for n, name := range b.queues {
		if last, ok := numbers[name]; !ok || counts[last] == (keys.Counts{}) && (counts[n] != keys.Counts{} || n > last) {
			numbers[name] = n
		}
	}
	for n, c := range counts {
		v := keys.CountersValue{Counts: c, Clock: b.clock}
		if name, named := b.queues[n]; named && numbers[name] == n {
			v.Totals = totals[name]
		}
		b.set(keys.AppendNumbered(nil, keys.Counters, n), v.Append(nil))
	}
	for p, n := range buckets {
		b.set(keys.AppendBucket(nil, p.Range, p.Group, p.At), keys.AppendNumber(nil, n))
	}
	return nil
}

// copySound copies the entries that say something by themselves, if they are sound. Without the
// clock of periods, a shard continues with the clock in IDs.
func (b *rebuilder) copySound() error {
	for prefix, isSound := range map[byte]func(key, value []byte) bool{
		keys.Daily: func(key, value []byte) bool {
			_, day, err := keys.ParseTotalsKey(key)
			v, valueErr := keys.ParseTotals(value)
			return err == nil && valueErr == nil && v.Day == day
		},
		keys.PeriodTime: isSoundIn(keys.PeriodTime), keys.ClockSets: isSoundIn(keys.ClockSets),
		keys.Granted: isSoundIn(keys.Granted),
		keys.Schedule: func(key, value []byte) bool {
			name, err := b.rules.Schedule(key, value)
			return err == nil && keys.ShardOfSchedule(name, b.shards) == b.index
		},
		// The version of removed settings is not copied: other shards know it, and some may be lost
		// here.
		keys.Settings: func(key, value []byte) bool {
			version, err := b.rules.Settings(value)
			if err != nil || len(key) == 1 {
				return false
			}
			b.latest[string(key[1:])] = version
			return true
		},
	} {
		if err := b.old.scan(prefix, func(key, value []byte) {
			if isSound(key, value) {
				b.set(key, value)
			}
		}); err != nil {
			return err
		}
	}
	return nil
}

// isSoundIn reports whether Check accepts an entry of a range.
func isSoundIn(prefix byte) func(key, value []byte) bool {
	return func(key, value []byte) bool { return loneRanges[prefix].parse(key, value) == nil }
}

// inOrder returns the tasks, oldest first.
func (b *rebuilder) inOrder() []taskID {
	return slices.SortedFunc(maps.Keys(b.tasks), func(x, y taskID) int { return bytes.Compare(x[:], y[:]) })
}
