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

// rebuilder writes a store from what can be read of another one.
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
	told   map[taskID]bool   // parents whose children are being told of their end
	asking map[taskID]bool   // tasks that ask their parents again
	clock  uint64            // the largest number minted, as far as is known
	damage error             // why something could not be written
}

// rebuiltTask is what must be known of a task to derive the rest from it.
type rebuiltTask struct {
	checkedTask
	lane    uint32
	parents []keys.ID // of a task that waits for them
	onDead  uint8
}

func (b *rebuilder) rebuild(identity string) error {
	b.set([]byte{keys.Meta}, []byte(identity))
	for _, step := range []func() error{
		b.copyRecords, b.rebuildCatalogue, b.copyLeases, b.rebuildCounters, b.copyDays, b.copyPeriodClock, b.copyClockSets, b.copyGrants, b.copySettings, b.rebuildUnique,
		b.rebuildWakeups, b.rebuildTurns, b.copyMessages, b.rebuildParents, b.rebuildPins, b.writeSent, b.writeWakeups,
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
	if err := b.old.scan(keys.Index, func(key, value []byte) {
		id, err := keys.ParseByID(key)
		p, placeErr := keys.ParsePlace(value)
		if err == nil && placeErr == nil {
			indexed[id] = p
		}
	}); err != nil {
		return err
	}
	for _, prefix := range recordRanges {
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
			b.set(key, value)
			b.clock = max(b.clock, keys.ClockOf(id))
		}); err != nil {
			return err
		}
	}
	for id, t := range b.tasks {
		if first := keys.FirstPlace(keys.LaneOf(id), id); !t.ended() && t.Place != first {
			b.set(keys.AppendByID(nil, keys.Index, id), t.Append(nil))
		}
	}
	return nil
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
	t = &rebuiltTask{checkedTask: checkedTask{Place: p, Head: r.Head, state: stateIn(p.Range)}, lane: lane, onDead: r.OnDead}
	if t.waitsForParents() {
		for _, id := range r.Parents {
			if !slices.Contains(t.parents, id) {
				t.parents = append(t.parents, id)
			}
		}
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
	if err := b.old.scan(keys.Lane, func(key, value []byte) {
		n, err := keys.ParseNumbered(key)
		v, valueErr := keys.ParseLaneValue(value)
		if err == nil && valueErr == nil && v.Queue > 0 && v.Queue <= keys.MaxLane && v.Priority <= keys.MaxPriority && n <= keys.MaxLane {
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
			if t == nil || t.Place != (keys.Place{Range: keys.Task, Group: e.Lane, At: e.Since}) || t.Leases+1 != e.Leases {
				continue
			}
			valid, t.state = true, leased
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
	if err := b.old.scan(keys.Counters, func(key, value []byte) {
		n, err := keys.ParseNumbered(key)
		v, valueErr := keys.ParseCounters(value)
		if valueErr == nil {
			b.clock = max(b.clock, v.Clock)
		}
		name, named := b.queues[n]
		if t := totals[name]; err == nil && valueErr == nil && named && v.Totals.Day >= t.Day && v.Totals.All.AtLeast(&t.All) {
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

// copyDays copies the totals by day.
func (b *rebuilder) copyDays() error {
	return b.old.scan(keys.Daily, func(key, value []byte) {
		if _, day, err := keys.ParseTotalsKey(key); err == nil {
			if v, err := keys.ParseTotals(value); err == nil && v.Day == day {
				b.set(key, value)
			}
		}
	})
}

// copyPeriodClock copies the clock of periods. Without it, a shard goes on with the clock in IDs.
func (b *rebuilder) copyPeriodClock() error {
	return b.old.scan(keys.PeriodTime, func(key, value []byte) {
		if _, err := keys.ParsePeriodTime(value); err == nil && len(key) == 1 {
			b.set(key, value)
		}
	})
}

// copyClockSets copies how the wall clock was set, by which ages are shown.
func (b *rebuilder) copyClockSets() error {
	return b.old.scan(keys.ClockSets, func(key, value []byte) {
		if _, err := keys.ParseClockSets(value); err == nil && len(key) == 1 {
			b.set(key, value)
		}
	})
}

// copyGrants copies when tasks of queues with a rate were leased last.
func (b *rebuilder) copyGrants() error {
	return b.old.scan(keys.Granted, func(key, value []byte) {
		if _, err := keys.ParseNumber(value); err == nil {
			b.set(key, value)
		}
	})
}

// copySettings copies settings and schedules.
func (b *rebuilder) copySettings() error {
	return errors.Join(
		b.old.scan(keys.Settings, func(key, value []byte) {
			// Which settings were removed is not copied: other shards know it, and here some may be
			// lost.
			if version, err := b.rules.Settings(value); err == nil && len(key) > 1 {
				b.latest[string(key[1:])] = version
				b.set(key, value)
			}
		}),
		b.old.scan(keys.Schedule, func(key, value []byte) {
			if name, err := b.rules.Schedule(key, value); err == nil && keys.ShardOfSchedule(name, b.shards) == b.index {
				b.set(key, value)
			}
		}))
}

// rebuildUnique copies the holders of the idempotency keys. If some entries are lost, a key without
// a holder goes to an unended task: to one whose record says that it holds the key, or else to the
// first; a released key may look the same, and is then taken again.
func (b *rebuilder) rebuildUnique() error {
	holders := make(map[[keys.UniqueLen]byte]taskID)
	if err := b.old.scan(keys.Unique, func(key, value []byte) {
		hash, err := keys.ParseHashed(key)
		v, valueErr := keys.ParseUnique(value)
		t := b.tasks[v.ID]
		lives := t != nil && !t.ended() && t.Unique == hash
		if err != nil || valueErr != nil || t != nil && t.Unique != hash || v.Until == 0 && !lives {
			return
		}
		holders[hash] = v.ID
		b.set(key, value)
		if v.Until != 0 {
			b.set(keys.AppendFreed(nil, v.Until, hash), nil)
		}
	}); err != nil {
		return err
	}
	take := func(flags uint8) {
		for _, id := range b.inOrder() {
			t := b.tasks[id]
			if _, taken := holders[t.Unique]; t.ended() || t.Unique == [keys.UniqueLen]byte{} || taken || t.Flags&flags != flags {
				continue
			}
			holders[t.Unique] = id
			v := keys.UniqueValue{ID: keys.ID(id)}
			if t.UniqueFor != 0 {
				v.Until = keys.Later(keys.SinceMillis(keys.SinceOf(id)), t.UniqueFor)
				b.set(keys.AppendFreed(nil, v.Until, t.Unique), nil)
			}
			b.set(keys.AppendHashed(nil, t.Unique), v.Append(nil))
		}
	}
	if b.old.gaps[keys.Unique] {
		take(record.HoldsKey)
		take(0)
	}
	if err := b.commit(); err != nil {
		return err
	}
	for id, t := range b.tasks {
		if t.Flags&record.HoldsKey != 0 && !t.ended() && holders[t.Unique] != id {
			if err := b.clearHoldsKey(id, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// clearHoldsKey notes in the record of a task that another one may have its idempotency key.
func (b *rebuilder) clearHoldsKey(id taskID, t *rebuiltTask) error {
	key := t.AppendKey(nil, id)
	value, err := store.Lookup(b.db, key)
	if err != nil {
		return err
	}
	_, stored, _, err := store.SplitValue(t.Place, value)
	if err != nil {
		return err
	}
	rec, err := record.Decode(stored)
	if err != nil {
		return err
	}
	rec.Flags &^= record.HoldsKey
	rec.Rewritten = rec.Rewritten || t.Range == keys.Task
	b.set(key, append(value[:len(value)-len(stored):len(value)-len(stored)], rec.Encode()...))
	return nil
}

// inOrder returns the tasks in the order in which they were produced.
func (b *rebuilder) inOrder() []taskID {
	return slices.SortedFunc(maps.Keys(b.tasks), func(x, y taskID) int { return bytes.Compare(x[:], y[:]) })
}

// rebuildWakeups copies the wakeups.
func (b *rebuilder) rebuildWakeups() error {
	return b.old.scan(keys.Wake, func(key, value []byte) {
		queue, scope, id, err := keys.ParseGrouped(key)
		if _, ok := b.queues[queue]; err == nil && ok && len(value) == 1 {
			b.wakes[wakeKey{queue, scope, id}] = value[0]
		}
	})
}

func (b *rebuilder) writeWakeups() error {
	for k, how := range b.wakes {
		b.set(keys.AppendGrouped(nil, keys.Wake, k.queue, k.scope, k.id), []byte{how})
	}
	return nil
}

// rebuildTurns stores who has the turn of each group: the task that had it, or else one that is
// ready or leased, or a dead letter that holds it, or a task between two attempts. If there is
// none, the first waiting task gets it.
func (b *rebuilder) rebuildTurns() error {
	held := make(map[uint64]taskID)
	if err := b.old.scan(keys.Group, func(key, value []byte) {
		scope, err := keys.ParseScope(key)
		v, valueErr := keys.ParseGroup(value)
		if t := b.tasks[v.Holder]; err == nil && valueErr == nil && t != nil && (!t.ended() || t.HoldsTurn) && t.Head.Group == scope {
			held[scope] = v.Holder
		}
	}); err != nil {
		return err
	}
	waiting := make(map[uint64]uint32) // queue, by scope
	between := make(map[uint64]taskID)
	var holding []taskID // dead letters
	for _, id := range b.inOrder() {
		t := b.tasks[id]
		scope := t.Head.Group
		if scope == 0 || t.ended() && !t.HoldsTurn {
			continue
		}
		_, ok := held[scope]
		switch {
		case t.HoldsTurn:
			holding = append(holding, id)
			if !ok {
				held[scope] = id
			}
		case t.Range == keys.Blocked && t.At == scope:
			waiting[scope] = t.queue
		case t.Range == keys.Task && (!ok || b.tasks[held[scope]].Range != keys.Task):
			held[scope] = id
		case t.Range == keys.Scheduled && t.Leases > 0, t.Range == keys.Blocked && t.Suspect:
			between[scope] = id
		}
	}
	for scope, id := range between {
		if _, ok := held[scope]; !ok {
			held[scope] = id
		}
	}
	for scope, queue := range waiting {
		if _, ok := held[scope]; !ok {
			held[scope] = taskID{}
			b.wakes[wakeKey{queue, scope, taskID{}}] = keys.WakeUp
		}
	}
	for scope, id := range held {
		_, waits := waiting[scope]
		b.set(keys.AppendScope(nil, scope), keys.GroupValue{Holder: keys.ID(id), Waiting: waits}.Append(nil))
	}
	lost := make(map[taskID]bool)
	for _, id := range holding {
		if held[b.tasks[id].Head.Group] != id {
			lost[id] = true
		}
	}
	return b.clearHoldsTurn(lost)
}

// clearHoldsTurn notes in the records of dead letters that they hold no turn.
func (b *rebuilder) clearHoldsTurn(lost map[taskID]bool) error {
	if len(lost) == 0 {
		return nil
	}
	return b.old.scan(keys.Dead, func(key, value []byte) {
		t, id, ok := b.task(key, value)
		if !ok || !lost[id] || t.Place != b.tasks[id].Place {
			return
		}
		ended, stored, err := keys.ParseEnded(value)
		rec, recErr := record.Decode(stored)
		if err == nil && recErr == nil {
			rec.HoldsTurn = false
			b.set(key, append(ended.Append(nil), rec.Encode()...))
		}
	})
}

// copyMessages copies the messages between the shards.
func (b *rebuilder) copyMessages() error {
	numbers := func(prefix byte, visit func(n uint32, key, value []byte)) error {
		return b.old.scan(prefix, func(key, value []byte) {
			n, err := keys.ParseNumbered(key)
			if _, valueErr := keys.ParseNumber(value); err == nil && valueErr == nil && int(n) < b.shards {
				visit(n, key, value)
			}
		})
	}
	settings := make(map[string]keys.SettingsValue) // the last that the shard has sent
	err := errors.Join(
		numbers(keys.Inbound, func(_ uint32, key, value []byte) { b.set(key, value) }),
		numbers(keys.Sent, func(n uint32, _, value []byte) { b.sent[n], _ = keys.ParseNumber(value) }),
		b.old.scan(keys.Outbound, func(key, value []byte) {
			to, seq, err := keys.ParseOutbound(key)
			m, valueErr := keys.ParseMessage(value)
			if err != nil || valueErr != nil || int(to) >= b.shards {
				return
			}
			b.set(key, value)
			b.sent[to] = max(b.sent[to], seq)
			if m.Kind == keys.MsgSettings { // which the shard had when it sent them
				v, err := keys.ParseSettings(m.Settings)
				if _, bad := b.rules.Settings(m.Settings); err == nil && bad == nil && v.Version >= settings[m.Queue].Version {
					settings[m.Queue] = keys.SettingsValue{Version: v.Version, JSON: bytes.Clone(v.JSON)}
				}
			}
		}))
	b.addSent(settings)
	return err
}

// addSent adds settings that the shard has sent, and so has had, unless it has removed them since.
func (b *rebuilder) addSent(sent map[string]keys.SettingsValue) {
	for queue, v := range sent {
		if !v.IsNone() && v.Version > b.latest[queue] {
			b.latest[queue] = v.Version
			b.set(append([]byte{keys.Settings}, queue...), v.Append(nil))
		}
	}
}

// rebuildParents copies which tasks wait for which parents. A task that waits for parents, and
// whose number of them is not known, asks all of them again; so do all tasks if a parent, or what
// it knew, may be lost: a parent that does not exist has ended.
func (b *rebuilder) rebuildParents() error {
	lost := b.old.gaps[keys.Dependent] || b.old.gaps[keys.Telling]
	for _, prefix := range recordRanges {
		lost = lost || b.old.gaps[prefix]
	}
	if err := b.old.scan(keys.Telling, func(key, value []byte) {
		parent, end, err := keys.ParseTelling(key, value)
		if t := b.tasks[parent]; err == nil && (t == nil || t.Range == end) {
			b.told[parent] = true
			b.set(key, value)
		}
	}); err != nil {
		return err
	}
	waits := make(map[taskID]uint64) // for how many parents
	if err := b.old.scan(keys.Pending, func(key, value []byte) {
		id, err := keys.ParseByID(key)
		n, valueErr := keys.ParseNumber(value)
		if t := b.tasks[id]; err == nil && valueErr == nil && n > 0 && t != nil && t.waitsForParents() && !lost {
			waits[id] = n
			b.set(key, value)
		}
	}); err != nil {
		return err
	}
	type bond struct{ parent, child keys.ID }
	known := make(map[bond]bool)
	asks := func(id taskID) bool { // again
		t := b.tasks[id]
		_, wakeup := b.wakes[wakeKey{b.queueOf(t), 0, id}]
		return t != nil && t.waitsForParents() && waits[id] == 0 && !wakeup
	}
	if err := errors.Join(
		b.old.scan(keys.Dependent, func(key, value []byte) {
			parent, child, err := keys.ParseDependent(key)
			if err == nil && len(value) == 1 && value[0] <= keys.MaxOnDead && (b.awaited(parent) || b.told[parent]) && !asks(child) {
				known[bond{parent, child}] = true
				b.set(key, value)
			}
		}),
		b.old.scan(keys.Outbound, func(_, value []byte) {
			if m, err := keys.ParseMessage(value); err == nil && (m.Kind == keys.MsgDepend || m.Kind == keys.MsgEnded) {
				known[bond{m.Parent, m.Child}] = true
			}
		}),
	); err != nil {
		return err
	}
	for _, id := range b.inOrder() {
		t := b.tasks[id]
		if !t.waitsForParents() {
			continue
		}
		again := asks(id)
		if again {
			b.asking[id] = true
			b.set(keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, uint64(len(t.parents))))
		}
		unknown := waits[id] // parents that do not know it; one that was redriven may have ended for it
		for _, parent := range t.parents {
			if unknown > 0 && (known[bond{parent, keys.ID(id)}] || taskID(parent).shard(b.shards) != b.index) {
				unknown--
			}
		}
		for _, parent := range t.parents {
			switch {
			case again:
				b.send(parent, &keys.Message{Kind: keys.MsgDepend, Parent: parent, Child: keys.ID(id), Outcome: t.onDead})
			case unknown > 0 && b.awaited(parent) && !known[bond{parent, keys.ID(id)}] && !b.tasks[parent].ended():
				unknown--
				b.set(keys.AppendDependent(nil, parent, keys.ID(id)), []byte{t.onDead})
			}
		}
	}
	return nil
}

// send adds a message to the shard of a task.
func (b *rebuilder) send(about keys.ID, m *keys.Message) {
	to := uint32(taskID(about).shard(b.shards))
	b.sent[to]++
	b.set(keys.AppendOutbound(nil, to, b.sent[to]), m.Append(nil))
}

// rebuildPins copies which parents are kept for which children. A task that is lost, or asks its
// parents again, releases them. A parent whose number of pins is lost is kept for ever.
func (b *rebuilder) rebuildPins() error {
	counts, found := make(map[taskID]keys.PinnedValue), make(map[taskID]uint64)
	leaving := make(map[taskID]bool)
	var taken uint64
	type pin struct{ child, parent taskID }
	var dropped []pin
	if err := errors.Join(
		b.old.scan(keys.Pinned, func(key, value []byte) {
			id, err := keys.ParseByID(key)
			v, valueErr := keys.ParsePinned(value)
			if t := b.tasks[id]; err == nil && valueErr == nil && t != nil && t.state == done && t.At == keys.Forever {
				counts[id] = v
			}
		}),
		b.old.scan(keys.Inbound, func(key, value []byte) {
			if from, err := keys.ParseNumbered(key); err == nil && int(from) == b.index {
				taken, _ = keys.ParseNumber(value)
			}
		}),
		b.old.scan(keys.Outbound, func(key, value []byte) {
			to, seq, err := keys.ParseOutbound(key)
			m, valueErr := keys.ParseMessage(value)
			if err != nil || valueErr != nil || int(to) == b.index && seq <= taken {
				return
			}
			switch m.Kind {
			case keys.MsgEnded:
				if m.Outcome == keys.ParentPinned {
					found[m.Parent]++
				}
			case keys.MsgUnpin:
				found[m.Parent]++
			case keys.MsgLeft:
				leaving[m.Child] = true
			}
		}),
		b.old.scan(keys.Pin, func(key, value []byte) {
			child, parent, err := keys.ParsePin(key)
			if err != nil || len(value) != 0 {
				return
			}
			if _, ok := counts[parent]; !ok && taskID(parent).shard(b.shards) == b.index {
				return
			}
			found[parent]++
			t := b.tasks[child]
			if leaving[child] || t != nil && t.Child && (!t.ended() || t.state == dead) && !b.asking[child] {
				b.set(key, nil)
				return
			}
			dropped = append(dropped, pin{child, parent})
		}),
	); err != nil {
		return err
	}
	for _, p := range dropped {
		b.send(keys.ID(p.parent), &keys.Message{Kind: keys.MsgUnpin, Parent: keys.ID(p.parent)})
	}
	for id, v := range counts {
		if b.shards == 1 { // else other shards pin it
			if v.Count = found[id]; b.told[id] {
				v.Count++
			}
			if v.Count == 0 {
				v.Count = 1
				b.send(keys.ID(id), &keys.Message{Kind: keys.MsgUnpin, Parent: keys.ID(id)})
			}
		}
		b.set(keys.AppendByID(nil, keys.Pinned, keys.ID(id)), v.Append(nil))
	}
	return nil
}

// writeSent stores the numbers of the last messages.
func (b *rebuilder) writeSent() error {
	for to, n := range b.sent {
		if n > 0 {
			b.set(keys.AppendNumbered(nil, keys.Sent, to), keys.AppendNumber(nil, n))
		}
	}
	return nil
}

func (b *rebuilder) queueOf(t *rebuiltTask) uint32 {
	if t == nil {
		return 0
	}
	return t.queue
}

// awaited reports whether a task of this shard may have children that wait for it.
func (b *rebuilder) awaited(parent keys.ID) bool {
	t := b.tasks[parent]
	return t != nil && t.Parent && (!t.ended() || t.state == dead && t.At == keys.Forever)
}
