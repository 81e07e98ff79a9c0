package offline

import (
	"bytes"
	"fmt"
	"slices"

	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
)

// What becomes of the lines of each kind.

// settings gives all shards the settings of a queue.
func (im *importer) settings(l *settingsLine) error {
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	value := keys.SettingsValue{Version: l.Version, JSON: l.Value}.Append(nil)
	if _, err := Rules.Settings(bytes.Clone(value)); err != nil {
		return wrong("settings of queue %q: %w", l.Queue, err)
	}
	for _, s := range im.shards {
		im.set(s, append([]byte{keys.Settings}, l.Queue...), value)
		if l.Granted != nil {
			im.set(s, append([]byte{keys.Granted}, l.Queue...), keys.AppendNumber(nil, *l.Granted))
		}
	}
	return nil
}

// schedule stores a schedule. What depends on the machine is found when it is first read, before
// all tasks.
func (im *importer) schedule(l *scheduleLine) (waits bool, err error) {
	if !im.all {
		zone, err := recurrence.Zone(l.TimeZone)
		if err != nil {
			return false, fmt.Errorf("schedule %q: %w: %q: %w", l.Name, ErrZone, l.TimeZone, err)
		}
		if l.Cron != "" {
			if _, err := recurrence.ParseCron(l.Cron, zone); err != nil {
				return false, wrong("schedule %q: %w", l.Name, err)
			}
		}
	}
	rec, err := l.record()
	if err != nil {
		return false, wrong("schedule %q: %w", l.Name, err)
	}
	if !im.parents(&rec, true, false) {
		return true, nil
	}
	key, value := keys.AppendSchedule(nil, l.Name), l.value(&rec)
	if _, err := Rules.Schedule(key, value); err != nil || l.Cron == "" && l.Every == 0 {
		return false, wrong("schedule %q, of Cron %q and Every %d: %w", l.Name, l.Cron, l.Every, err)
	}
	im.set(im.shards[keys.ShardOfSchedule(l.Name, len(im.shards))], key, value)
	return false, nil
}

// totals stores the totals of a queue in one shard: as rows of earlier days, and in the counters of
// the queue, which a later line of it replaces.
func (im *importer) totals(l *totalsLine) error {
	v := keys.TotalsValue{Day: l.Day}
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	if n := len(l.All); l.Day == 0 || n != keys.EventKinds && n != len(v.All) || n != len(l.OfDay) {
		return wrong("totals of queue %q of %d and %d events on day %d", l.Queue, len(l.All), len(l.OfDay), l.Day)
	}
	copy(v.All[:], l.All)
	copy(v.OfDay[:], l.OfDay)
	if !v.All.AtLeast(&v.OfDay) {
		return wrong("totals of queue %q on day %d: less than on that day", l.Queue, l.Day)
	}
	s := im.shards[keys.ShardOfSchedule(l.Queue, len(im.shards))]
	n := im.queue(s, l.Queue)
	counters := keys.CountersValue{Clock: im.header.Clock, Totals: v}
	im.set(s, keys.AppendTotals(nil, l.Queue, l.Day), v.Append(nil))
	im.set(s, keys.AppendNumbered(nil, keys.Counters, n), counters.Append(nil))
	return nil
}

// key gives all shards the key of a task that is gone: the hash does not tell its shard.
func (im *importer) key(l *keyLine) error {
	hash, err := im.hold(l.Hash)
	if err != nil {
		return err
	}
	if l.Until == 0 {
		return wrong("key %x is taken for no time", l.Hash)
	}
	value := keys.UniqueValue{ID: keys.Gone, Until: l.Until}.Append(nil)
	for _, s := range im.shards {
		im.set(s, keys.AppendHashed(nil, hash), value)
	}
	return nil
}

// hold notes that an idempotency key is taken.
func (im *importer) hold(b []byte) (hash [keys.UniqueLen]byte, err error) {
	if len(b) != len(hash) {
		return hash, wrong("the hash of a key has %d bytes, and not %d", len(b), len(hash))
	}
	if copy(hash[:], b); im.held[hash] {
		return hash, wrong("key %x is taken twice", b)
	}
	im.held[hash] = true
	return hash, nil
}

// task stores a task.
func (im *importer) task(l *taskLine) (waits bool, err error) {
	rec, err := l.record()
	if err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	s := im.home(&rec.Ties, l.ID)
	queue, lane, err := im.lane(s, &l.Template)
	if err != nil {
		return false, err
	}
	if !im.all {
		switch {
		case l.Lease == nil && l.Attempts > l.Leases:
			return false, wrong("task %s has %d attempts in %d leases", l.ID, l.Attempts, l.Leases)
		case l.Lease != nil && l.Lease.Leases != l.Leases+1:
			return false, wrong("task %s has lease %d after %d", l.ID, l.Lease.Leases, l.Leases)
		}
		if err := im.rename(keys.ID(l.ID), s, lane); err != nil {
			return false, err
		}
		im.done++
	}
	id := im.ids[keys.ID(l.ID)]
	p, err := l.place(id, queue, lane, &rec)
	if err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	if p.Range == keys.Blocked && p.At != 0 {
		im.scopes[scopeIn{p.At, s.number}] = true
	}
	rec.Kept, rec.Cursors = l.Steps, l.Cursors
	if err := rec.Sound(); err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	if err := l.checkSignals(p.Range); err != nil {
		return false, wrong("task %s: %w", l.ID, err)
	}
	if !keys.Ended(p.Range) {
		rec.Steps, rec.Kept, rec.Cursors, rec.Beside = uint32(len(l.Steps)), nil, nil, l.beside()
	}
	if !im.parents(&rec, false, false) || !im.children(l.Steps) {
		return true, nil
	}
	im.set(s, p.AppendKey(nil, id), l.value(p, lane, &rec))
	return false, im.rest(s, l, id, p, &rec)
}

// children maps the tasks that steps have produced. It returns false if some have not come yet.
func (im *importer) children(steps []record.Step) bool {
	for i := range steps {
		if of := &steps[i]; of.Kind == record.StepChild {
			id, found := im.ids[keys.ID(of.Result)]
			if !found && !im.all {
				return false
			}
			if found {
				of.Result = id[:]
			}
		}
	}
	return true
}

// rest stores the entries of a task beside its record.
func (im *importer) rest(s *imported, l *taskLine, id keys.ID, p keys.Place, rec *record.Record) error {
	if l.Lease != nil {
		h := keys.LeaseHeader{Local: l.Lease.Local, Deadline: l.Lease.Deadline}
		s.leases = append(s.leases, storedLease{h, l.Lease.entry(id, p)})
	}
	if l.HasKey {
		hash, err := im.hold(l.Unique.Hash)
		if err != nil {
			return err
		}
		im.set(s, keys.AppendHashed(nil, hash), keys.UniqueValue{ID: id, Until: l.KeyTill}.Append(nil))
	}
	for i := range rec.Steps {
		im.set(s, keys.AppendStep(nil, id, uint16(i)), l.Steps[i].Append(nil))
	}
	if rec.Beside&record.HasSignals != 0 {
		im.set(s, keys.AppendStep(nil, id, keys.SignalsNumber), l.Signals.Append(nil))
	}
	if rec.Beside&record.HasCursors != 0 {
		im.set(s, keys.AppendStep(nil, id, keys.CursorsNumber), l.Cursors.Append(nil))
	}
	if l.HasTurn {
		im.set(s, keys.AppendScope(nil, rec.Group), keys.GroupValue{Holder: id}.Append(nil))
	}
	if l.Pending != 0 {
		im.set(s, keys.AppendByID(nil, keys.Pending, id), keys.AppendNumber(nil, l.Pending))
	}
	if l.Pinned != nil {
		im.set(s, keys.AppendByID(nil, keys.Pinned, id), keys.PinnedValue(*l.Pinned).Append(nil))
	}
	return nil
}

// dependent stores that a task waits for another one, in the shard of the latter.
func (im *importer) dependent(l *dependentLine) error {
	if l.OnDead > keys.AtAnyEnd {
		return wrong("task %s waits with OnDead %d", l.Child, l.OnDead)
	}
	parent := im.mention(l.Parent)
	im.set(im.shardOf(parent), keys.AppendDependent(nil, parent, im.named(l.Child)), []byte{l.OnDead})
	return nil
}

// mention notes that a tie names a task, and returns its new ID.
func (im *importer) mention(id lineID) keys.ID {
	im.mentioned[keys.ID(id)] = true
	return im.named(id)
}

// pin stores that a result is kept for a task, in the shard of the latter.
func (im *importer) pin(l *pinLine) {
	child := im.named(l.Child)
	im.set(im.shardOf(child), keys.AppendPin(nil, child, im.mention(l.Parent)), nil)
}

// telling stores that children are being told of the end of a task.
func (im *importer) telling(l *tellingLine) error {
	if !keys.Ended(byte(l.End)) {
		return wrong("children of task %s learn that it is %s", l.ID, states[l.End])
	}
	id := im.mention(l.ID)
	im.set(im.shardOf(id), keys.AppendByID(nil, keys.Telling, id), []byte{byte(l.End)})
	return nil
}

// wake stores a wakeup, in the shard of the tasks that it concerns. A scope without tasks that wait
// needs none.
func (im *importer) wake(l *wakeLine) error {
	if err := checkQueue(l.Queue); err != nil {
		return wrongLine{err}
	}
	how := byte(keys.WakeUp)
	if l.Cancel {
		how = keys.WakeCancel
	}
	awaken := func(s *imported, id keys.ID) {
		im.set(s, keys.AppendGrouped(nil, keys.Wake, im.queue(s, l.Queue), l.Scope, id), []byte{how})
	}
	if l.Scope == 0 {
		id := im.named(l.ID)
		awaken(im.shardOf(id), id)
		return nil
	}
	for _, s := range im.shards {
		if im.scopes[scopeIn{l.Scope, s.number}] {
			awaken(s, keys.ID{})
		}
	}
	return nil
}

// message stores a message, which its receiver sends to itself. Those of two shards have no order.
func (im *importer) message(l *messageLine) (waits bool, err error) {
	m := keys.Message{Kind: l.Kind, Outcome: l.Outcome, Until: l.Until, Schedule: l.Schedule, Tick: l.Tick}
	about := l.Parent
	switch l.Kind {
	case keys.MsgAdmit, keys.MsgFollow, keys.MsgTick:
		return im.admission(l, &m)
	case keys.MsgFlow:
		return im.flow(l, &m)
	case keys.MsgTicked:
		im.send(im.shards[keys.ShardOfSchedule(l.Schedule, len(im.shards))], &m)
		return false, nil
	case keys.MsgDepend, keys.MsgUnpin:
	case keys.MsgEnded, keys.MsgLeft:
		about = l.Child
	default:
		return false, wrong("a message of kind %d", l.Kind)
	}
	if l.Task != nil || l.Tasks != nil {
		return false, wrong("a message of kind %d with a task", l.Kind)
	}
	if l.Parent != (lineID{}) {
		m.Parent = im.mention(l.Parent)
	}
	if l.Child != (lineID{}) {
		m.Child = im.named(l.Child)
	}
	im.send(im.shardOf(im.named(about)), &m)
	return false, nil
}

// admission stores a message with a task to produce.
func (im *importer) admission(l *messageLine, m *keys.Message) (waits bool, err error) {
	if l.Task == nil {
		return false, wrong("a message of kind %d without a task", l.Kind)
	}
	rec, err := l.Task.record()
	if err != nil {
		return false, wrong("message: %w", err)
	}
	if !im.parents(&rec, true, false) {
		return true, nil
	}
	m.Queue, m.Tenant, m.Priority, m.Record = l.Task.Queue, l.Task.Tenant, l.Task.Priority, rec.Encode()
	if l.Kind == keys.MsgFollow {
		m.Parent = im.named(l.Parent)
	}
	im.send(im.home(&rec.Ties, l.Parent), m)
	return false, nil
}

// flow stores a message with tasks that wait for each other.
func (im *importer) flow(l *messageLine, m *keys.Message) (waits bool, err error) {
	for i := range l.Tasks {
		t := &l.Tasks[i]
		rec, err := t.record()
		if err != nil {
			return false, wrong("message: %w", err)
		}
		if !im.parents(&rec, true, true) {
			return true, nil
		}
		m.Tasks = append(m.Tasks, keys.MessageTask{Queue: t.Queue, Tenant: t.Tenant, Priority: t.Priority, Record: rec.Encode()})
	}
	if l.Parent != (lineID{}) {
		m.Parent = im.named(l.Parent)
	}
	for _, id := range l.Siblings {
		m.Siblings = append(m.Siblings, im.named(id))
	}
	slices.SortFunc(m.Siblings, func(a, b keys.ID) int { return bytes.Compare(a[:], b[:]) })
	tasks, err := engine.NewTasksOf(m)
	if err != nil || len(tasks) == 0 || l.Task != nil {
		return false, wrong("a message of kind %d with %d tasks: %w", l.Kind, len(tasks), err)
	}
	im.send(im.home(&tasks[0].Tied.Ties, l.Parent), m)
	return false, nil
}

func (im *importer) send(s *imported, m *keys.Message) {
	s.sent++
	im.set(s, keys.AppendOutbound(nil, uint32(s.number), s.sent), m.Append(nil))
}

// leasesAtOnce is how many leases are in one record.
const leasesAtOnce = 256
