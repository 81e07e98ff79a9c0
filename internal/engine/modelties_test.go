package engine

import (
	"bytes"
	"cmp"
	"errors"
	"maps"
	"slices"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// The states of tasks in the model, and the ties between tasks: idempotency keys, groups, parents,
// and the limits of keys.
//
// The model knows the consequences of each event. When messages between shards release several
// tasks, it does not know their order. In this case, and when a claim parks tasks because their
// limit is full, it reads the places of the tasks from disk, and checks that these places are
// allowed.

// modelKey is the holder of an idempotency key.
type modelKey struct {
	id    keys.ID
	until uint64 // by the clock of periods, ms; 0: until the task has ended
	ended bool   // the task has ended, and the key is taken until then

	length   uint64 // ms; 0: until the task has ended
	promised uint64 // for isOver
}

// shard is the shard of the key's holder.
func (k *modelKey) shard(m *model) int { return keys.ShardOf(k.id, m.config.Shards) }

// blockedOn is the reason why a blocked task waits.
type blockedOn int

const (
	onParents blockedOn = iota + 1
	onGroup
	onLimit
	onOrphan // it has the turn of its group
	onSuspicion
)

func (m *model) toReady(t *modelTask, since uint64) { t.state, t.since = Ready, since }

func (m *model) toScheduled(t *modelTask, due uint64) { t.state, t.until = Scheduled, due }

func (m *model) toBlocked(t *modelTask, on blockedOn) { t.state, t.on = Blocked, on }

func (m *model) toDead(t *modelTask) {
	t.rec.Suspect = false
	m.expect(EventDeadLettered, t, t.rec.Error)
	t.until = keys.Forever
	set := m.settings[t.Queue]
	holds := set.HoldGroups && t.rec.Group != 0
	retention := record.Retention(set.DeadRetention)
	if t.parent && retention > 0 {
		retention = max(retention, keptForParents)
	}
	if retention != 0 && !holds && !t.awaited() {
		m.retained(t, retention)
	}
	if t.until != keys.Forever {
		m.unpin(t, t.until)
	}
	m.endKey(t, Dead)
	t.state, t.at = Dead, m.orderTime(t.shard)
	m.ended(t, Outcome{State: Dead, LastError: t.rec.Error, Attempts: int(t.rec.Attempts)}, !holds)
	if to := set.DeadLetterQueue; to != "" {
		m.adoptDeath(t, to)
	}
}

// awaited reports whether a dead letter is kept for its children.
func (t *modelTask) awaited() bool {
	awaited := len(t.children) > TellAtOnce
	for _, onDead := range t.children {
		awaited = awaited || onDead == keys.HoldOnDead
	}
	return awaited
}

// adoptDeath finds the task that a death has produced. It is not compared with the order of other
// new tasks: the shard may have decided other deaths, and ticks, in another order.
func (m *model) adoptDeath(dead *modelTask, to string) {
	headers, ok := record.DeathHeaders(&dead.rec, keys.FormatID(dead.id), dead.Queue)
	if !ok {
		return
	}
	var found []keys.ID
	m.eachStored(func(t *store.Task) {
		if m.tasks[t.ID] == nil && t.Record.Headers[record.DeathTask] == headers[record.DeathTask] {
			found = append(found, t.ID)
		}
	})
	if len(found) != 1 || keys.ShardOf(found[0], m.config.Shards) != dead.shard {
		m.rt.Fatalf("the death of %s has produced %x", keys.FormatID(dead.id), found)
	}
	t := &modelTask{
		id: found[0], LaneKey: LaneKey{to, dead.Tenant, dead.Priority}, shard: dead.shard,
		rec: record.Record{Headers: headers, Payload: dead.rec.Payload},
	}
	m.order, m.live, m.tasks[t.id] = append(m.order, t.id), append(m.live, t), t
	m.given[t.shard] = max(m.given[t.shard], keys.SinceMillis(keys.SinceOf(t.id)))
	m.expect(EventProduced, t, "")
	m.enter(t, keys.SinceOf(t.id))
}

func (m *model) toDone(t *modelTask, result string) {
	t.rec.Suspect, t.rec.RetryFirst = false, false
	m.expect(EventCompleted, t, "")
	m.unpin(t, 0)
	m.endKey(t, Done)
	o := Outcome{State: Done, Result: []byte(result), Attempts: int(t.rec.Attempts)}
	if retention := m.retention(t); retention == 0 {
		m.remember(t, &o)
	} else {
		m.retained(t, retention)
		t.state, t.at, t.result = Done, m.orderTime(t.shard), result
	}
	m.ended(t, o, true)
}

func (m *model) toCanceled(t *modelTask) {
	t.rec.Suspect = false
	m.expect(EventCanceled, t, "")
	if t.state == Leased {
		m.canceled[t.receipt] = true
		m.orphan(t)
		if t.local && m.wanted&WantCancels != 0 {
			m.expected = append(m.expected, "canceled "+t.receipt.String())
		}
	}
	t.waits = nil
	m.unpin(t, 0)
	m.endKey(t, Canceled)
	o := Outcome{State: Canceled, LastError: t.rec.Error, Attempts: int(t.rec.Attempts)}
	if retention := m.retention(t); retention == 0 {
		m.remember(t, &o)
	} else {
		m.retained(t, retention)
		t.state, t.at = Canceled, m.orderTime(t.shard)
	}
	m.ended(t, o, true)
}

// remember is the end of a task that is not kept.
func (m *model) remember(t *modelTask, o *Outcome) {
	m.endings[t.id] = modelEnding{textOf(t.id, o), m.Uptime + endingsFor, false}
	m.toGone(t)
}

func (m *model) toGone(t *modelTask) {
	delete(m.tasks, t.id)
	m.live = slices.DeleteFunc(m.live, func(o *modelTask) bool { return o == t })
	m.gone = append(m.gone, t.id)
}

// retry is for an attempt that counts. A task with attempts left goes on. byHandler is MaxAttempts
// of its handler.
func (m *model) retry(t *modelTask, byHandler int, cause string, goesOn func()) {
	t.rec.Error, t.rec.RetryFirst = cmp.Or(cause, t.rec.Error), false
	if most := m.maxAttempts(t, byHandler); t.rec.Attempts >= most || t.rec.Crashes >= crashesPerAttempt*most {
		m.toDead(t)
		return
	}
	goesOn()
}

func (m *model) maxAttempts(t *modelTask, byHandler int) uint32 {
	return cmp.Or(t.rec.MaxAttempts, uint32(byHandler), uint32(m.settings[t.Queue].MaxAttempts), uint32(m.config.MaxAttempts))
}

// wait is for a task that goes on after some ms: first, before those that were produced after it,
// else behind those that are ready then.
func (m *model) wait(t *modelTask, ms uint64, first bool) {
	t.rec.Suspect, t.rec.RetryFirst = false, first
	switch {
	case ms == 0 && first:
		m.toReady(t, keys.FrontSince(t.id))
	case ms == 0:
		m.toReady(t, m.since(t.shard))
	default:
		m.lasts(t, m.period(t.shard)+ms)
		t.state = Scheduled
	}
}

// toExpired is for a lease that has run out so many ms ago: the second time, the task goes behind
// the tasks that were ready at that moment.
func (m *model) toExpired(t *modelTask, ago uint64) {
	since := t.since
	if !t.over {
		if t.expired {
			since = keys.MovedSince(m.orderTime(t.shard) - ago)
		}
		t.expired = t.expired || !t.rec.Suspect
	}
	m.toReadyOrHeld(t, since)
}

// retention is the retention of a completed or canceled task, ms.
func (m *model) retention(t *modelTask) int64 {
	return cmp.Or(t.rec.Retention, record.Retention(m.settings[t.Queue].Retention), record.Retention(m.config.Retention))
}

// held is the task with the lease in force that a receipt names, or nil.
func (m *model) held(r Receipt) *modelTask {
	if t := m.tasks[r.ID]; t != nil && t.state == Leased && t.receipt == r {
		return t
	}
	return nil
}

// waiting is as in located.
func (t *modelTask) waiting() bool {
	return t.state == Ready || t.state == Scheduled || t.state == Blocked
}

// admit takes in a new task of a batch; the first tasks of the batch have the given IDs. A remote
// task has come to its shard by a message.
func (m *model) admit(shard int, n spec, id keys.ID, batch []keys.ID, remote bool) {
	since := keys.SinceOf(id)
	switch {
	case keys.ShardOf(id, m.config.Shards) != shard:
		m.rt.Fatalf("new task %s routes to another shard than %d", keys.FormatID(id), shard)
	case since <= m.minted[shard]:
		m.rt.Fatalf("new task %s in shard %d does not come after %x", keys.FormatID(id), shard, m.minted[shard])
	case keys.SinceMillis(since) < m.Wall:
		m.rt.Fatalf("new task %s is of %d, now is %d", keys.FormatID(id), keys.SinceMillis(since), m.Wall)
	}
	m.minted[shard] = since
	m.given[shard] = max(m.given[shard], keys.SinceMillis(since))
	m.order = append(m.order, id)
	t := &modelTask{id: id, LaneKey: n.LaneKey, rec: n.rec, shard: shard}
	t.rec.Parents = slices.Clone(n.rec.Parents)
	for i, p := range t.rec.Parents {
		if n, ok := keys.NthOf(p); ok {
			t.rec.Parents[i] = batch[n]
		}
	}
	m.tasks[id], m.live = t, append(m.live, t)
	m.expect(EventProduced, t, "")
	m.takeKey(id, &n.rec)
	switch {
	case len(t.rec.Parents) > 0:
		m.toBlocked(t, onParents)
		t.waits = make(map[keys.ID]bool)
		doomed := false
		for _, p := range t.rec.Parents {
			doomed = m.depend(t, p) || doomed
		}
		if doomed {
			m.doomed = append(m.doomed, t)
		} else if len(t.waits) == 0 {
			m.woken = append(m.woken, t)
		}
	case remote:
		m.proceed(t)
	case t.rec.RunAt > m.Wall:
		m.toScheduled(t, t.rec.RunAt)
	default:
		m.enter(t, since)
	}
}

// Keys.

// holder is the task that holds the key of a task.
func (m *model) holder(rec *record.Record) (keys.ID, bool) {
	k := m.byKey[rec.Unique]
	if rec.UniqueKey == "" || k == nil || k.ended && k.until <= m.period(k.shard(m)) {
		return keys.ID{}, false
	}
	return k.id, true
}

// takeKey gives a key to a task, for some time from now on.
func (m *model) takeKey(id keys.ID, rec *record.Record) {
	m.takeKeyFrom(id, rec, max(m.period(keys.ShardOf(id, m.config.Shards)), keys.SinceMillis(keys.SinceOf(id))))
}

func (m *model) takeKeyFrom(id keys.ID, rec *record.Record, from uint64) {
	if rec.UniqueKey == "" {
		return
	}
	k := &modelKey{id: id}
	if rec.UniqueFor != 0 {
		// The clock that numbers tasks is ahead: it runs on with each task of one moment, and a
		// crash sets the clock of periods back.
		ahead := from - min(from, m.period(keys.ShardOf(id, m.config.Shards)))
		k.until, k.length, k.promised = from+rec.UniqueFor, rec.UniqueFor, m.promise(rec.UniqueFor+min(ahead, 2*store.UsualLead))
	}
	m.byKey[rec.Unique] = k
}

// passKeys applies the clock of periods to keys. Once the clock has shown the end of a key's time,
// the key is free with the end of its task, even if a step sets the clock back.
func (m *model) passKeys() {
	maps.DeleteFunc(m.byKey, func(_ [keys.UniqueLen]byte, k *modelKey) bool {
		if k.until > m.period(k.shard(m)) {
			if m.isOver(k.promised) {
				m.rt.Fatalf("%+v is taken longer than it was to be", k)
			}
			return false
		}
		k.until = 0
		return k.ended
	})
}

// takeOver takes a key from its holder at work, if both tasks permit that.
func (m *model) takeOver(by *record.Record) bool {
	k := m.byKey[by.Unique]
	t := m.tasks[k.id]
	if by.Flags&record.ReleaseOnClaim == 0 || t == nil || t.rec.Flags&record.ReleaseOnClaim == 0 {
		return false
	}
	if t.state != Leased && (!t.waiting() || len(t.steps) == 0) {
		return false
	}
	delete(m.byKey, by.Unique)
	return true
}

func (m *model) endKey(t *modelTask, state TaskState) {
	k := m.byKey[t.rec.Unique]
	if t.rec.UniqueKey == "" || k == nil || k.id != t.id {
		return
	}
	flags := t.rec.Flags
	if k.until <= m.period(t.shard) || state == Done && flags&record.ReleaseOnComplete != 0 || state == Dead && flags&record.ReleaseOnDead != 0 {
		delete(m.byKey, t.rec.Unique)
		return
	}
	k.ended = true
}

// Orphans.

// modelOrphan is a handler that goes on without a lease.
type modelOrphan struct {
	queue        string
	limit, group uint64 // scopes
	deadline     uint64 // by the monotonic clock, ms
}

// orphan is the end of a lease while its handler goes on.
func (m *model) orphan(t *modelTask) {
	if t.handled && !t.over {
		m.orphans[t.receipt] = modelOrphan{t.Queue, t.rec.Limit, t.rec.Group, t.deadline}
	}
}

// isHeld reports whether a group counts a handler that goes on.
func (m *model) isHeld(scope uint64) bool {
	for _, o := range m.orphans {
		if scope != 0 && o.group == scope {
			return true
		}
	}
	return false
}

// dropOrphans is the end of the orphans with their process.
func (m *model) dropOrphans() {
	for _, o := range m.orphans {
		m.delayed[o.group] = true
	}
	clear(m.orphans)
}

// Groups.

// enter makes a task ready if it has the turn of its group, or gets it.
func (m *model) enter(t *modelTask, since uint64) {
	if scope := t.rec.Group; scope != 0 {
		holder, held := m.turns[scope]
		switch {
		case !held && m.isHeld(scope):
			m.toBlocked(t, onGroup)
			return
		case !held && (m.unordered || m.delayed[scope] || m.wakes(scope)): // a woken task may come before this one, or after it
			m.toBlocked(t, onGroup)
			m.contested[scope], t.since = true, since
			return
		case !held && !m.anyWaits(scope):
			m.turns[scope] = t.id
		case holder != t.id || !held:
			m.toBlocked(t, onGroup)
			if m.isSmall() { // its group may come after the group that frees the turn
				m.contested[scope], t.since = true, since
			}
			return
		}
	}
	m.toReadyOrHeld(t, since)
}

// wakes reports whether a task of a group is about to go on.
func (m *model) wakes(scope uint64) bool {
	return slices.ContainsFunc(m.woken, func(t *modelTask) bool { return t.rec.Group == scope })
}

func (m *model) waitsInGroup(t *modelTask, scope uint64) bool {
	return t.state == Blocked && t.on == onGroup && t.rec.Group == scope
}

// isFirst reports whether a task comes before all tasks that wait for the turn of its group.
func (m *model) isFirst(t *modelTask) bool {
	return !slices.ContainsFunc(m.live, func(o *modelTask) bool {
		return m.waitsInGroup(o, t.rec.Group) && bytes.Compare(o.id[:], t.id[:]) < 0
	})
}

func (m *model) anyWaits(scope uint64) bool {
	return slices.ContainsFunc(m.live, func(t *modelTask) bool { return m.waitsInGroup(t, scope) })
}

// proceed continues a task that waited for an event in another shard or in a later group.
func (m *model) proceed(t *modelTask) {
	if t.rec.RunAt > m.Wall {
		m.toScheduled(t, t.rec.RunAt)
		return
	}
	t.late = true
	if scope := t.rec.Group; scope != 0 {
		if _, held := m.turns[scope]; !held {
			m.toBlocked(t, onGroup)
			m.contested[scope] = true
			return
		}
	}
	m.enter(t, keys.SinceOf(t.id))
}

// giveTurns gives the free turns to the first task that waits. If tasks began to wait in an unknown
// order, the turn goes to the waiting task that has the turn on disk.
func (m *model) giveTurns() {
	next := make(map[uint64]*modelTask)
	for _, t := range m.live {
		scope := t.rec.Group
		if scope == 0 || !m.waitsInGroup(t, scope) {
			continue
		}
		if _, held := m.turns[scope]; held || m.isHeld(scope) {
			continue
		}
		first := next[scope]
		better := first == nil || bytes.Compare(t.id[:], first.id[:]) < 0
		if first != nil && (m.contested[scope] || m.reopened) {
			has := func(t *modelTask) bool {
				p := m.placeOf(t)
				return p.Range != keys.Blocked || p.At != scope
			}
			if has(t) != has(first) {
				better = has(t)
			}
		}
		if better {
			next[scope] = t
		}
	}
	for scope, t := range next {
		m.turns[scope] = t.id
		t.late = true
		since := keys.SinceOf(t.id)
		if p := m.placeOf(t); m.contested[scope] && p.Range == keys.Task && p.At == t.since { // the task found the turn free
			since = t.since
		}
		m.toReadyOrHeld(t, since)
	}
	clear(m.contested)
	clear(m.delayed)
}

// placeOf is the place on disk of a task that has not ended.
func (m *model) placeOf(t *modelTask) keys.Place {
	p, _, err := store.PlaceOf(m.shards[t.shard].Store.DB(), t.id)
	m.noError(err)
	return p
}

// Parents.

// depend makes a task wait for a parent. It reports whether the parent cancels the task instead.
func (m *model) depend(t *modelTask, parent keys.ID) (doomed bool) {
	p := m.tasks[parent]
	if p == nil {
		return t.rec.OnMissing != keys.RunOnMissing && parent != m.completed
	}
	switch p.state {
	case Done, Canceled, Dead:
		if cancels, held := endMeans(p.state, t.rec.OnDead); !held {
			m.pin(p, t)
			return cancels
		}
		p.until = keys.Forever
	}
	p.parent = true
	t.waits[parent] = true
	if p.children == nil {
		p.children = make(map[keys.ID]uint8)
	}
	p.children[t.id] = t.rec.OnDead
	return false
}

// endMeans is the effect of a parent's end on a child; held: none yet.
func endMeans(state TaskState, onDead uint8) (cancels, held bool) {
	switch {
	case state == Done, state == Dead && onDead == keys.RunOnDead:
		return false, false
	case state == Dead && onDead == keys.HoldOnDead:
		return false, true
	}
	return true, false
}

// ended is the end of a task: the tasks that wait for it go on with the next react. passes: the
// task gives up the turn of its group if it has this turn.
func (m *model) ended(t *modelTask, o Outcome, passes bool) {
	if m.wanted&WantOutcomes != 0 {
		m.expected = append(m.expected, textOf(t.id, &o))
	}
	if scope := t.rec.Group; passes && scope != 0 && m.turns[scope] == t.id {
		delete(m.turns, scope)
	}
	if !t.parent {
		return
	}
	maps.DeleteFunc(t.children, func(_ keys.ID, onDead uint8) bool {
		_, held := endMeans(o.State, onDead)
		return !held
	})
	for _, child := range m.live {
		if !child.waits[t.id] {
			continue
		}
		cancels, held := endMeans(o.State, child.rec.OnDead)
		if held {
			continue
		}
		delete(child.waits, t.id)
		m.pin(t, child)
		if cancels {
			m.doomed = append(m.doomed, child)
		} else if len(child.waits) == 0 {
			m.woken = append(m.woken, child)
		}
	}
}

// pin keeps the result of a completed parent until the end of a child that may read this result.
func (m *model) pin(parent, child *modelTask) {
	if parent.state != Done || m.tasks[parent.id] != parent || parent.until == keys.Forever && parent.kept == 0 {
		return
	}
	if parent.kept == 0 {
		parent.kept, parent.until, parent.pins = parent.until, keys.Forever, make(map[keys.ID]bool)
	}
	parent.pins[child.id] = true
}

// adoptUnpinned takes in the ends of the retention of parents that children released without room:
// this retention begins when there is room again.
func (m *model) adoptUnpinned() {
	for _, p := range m.unpinned {
		at, _, err := m.shards[p.shard].find(p.id)
		if m.tasks[p.id] != p || errors.Is(err, base.ErrNotFound) {
			continue
		}
		m.noError(err)
		if at.place.At < p.until || at.place.At > max(p.until, keys.BucketOf(m.period(p.shard), 1)) {
			m.rt.Fatalf("%+v is kept until %d", p, at.place.At)
		}
		m.lasts(p, at.place.At)
	}
	m.unpinned = nil
}

// unpin releases the parents of a task; their retention lasts until a time at least.
func (m *model) unpin(child *modelTask, until uint64) {
	for _, parent := range child.rec.Parents {
		p := m.tasks[parent]
		if p == nil || !p.pins[child.id] {
			continue
		}
		p.kept = max(p.kept, until)
		if delete(p.pins, child.id); len(p.pins) == 0 {
			m.lasts(p, max(p.kept, keys.BucketOf(m.period(p.shard), 1)))
			p.kept = 0
			if m.shards[p.shard].Room > RoomScarce {
				m.unpinned = append(m.unpinned, p)
			}
		}
	}
}

// react applies the ends of tasks to other tasks.
func (m *model) react() {
	if m.unordered { // by messages, which come after the calls, or between them
		return
	}
	m.tell()
	m.giveTurns()
}

// holderOf is the holder of a task's key when the model takes in a call that has returned an ID for
// this task. Among unordered calls, the waiting tasks may have learned of an end before this call.
func (m *model) holderOf(rec *record.Record, given keys.ID) (keys.ID, bool) {
	holder, taken := m.holder(rec)
	if taken && holder != given && m.unordered {
		m.tell()
		holder, taken = m.holder(rec)
	}
	return holder, taken
}

// tell reports the ends of tasks to the tasks that wait for them.
func (m *model) tell() {
	blocked := func(t *modelTask) bool {
		return m.tasks[t.id] == t && t.state == Blocked && t.on == onParents
	}
	for len(m.doomed)+len(m.woken) > 0 {
		doomed, woken := m.doomed, m.woken
		m.doomed, m.woken = nil, nil
		for _, t := range doomed {
			if blocked(t) {
				m.toCanceled(t)
			}
		}
		for _, t := range woken {
			if blocked(t) {
				m.proceed(t)
			}
		}
	}
}

// replace gives a waiting task the form of a new one.
func (m *model) replace(t *modelTask, by spec) {
	parents, onDead, onMissing := t.rec.Parents, t.rec.OnDead, t.rec.OnMissing
	stays := by.rec.MaxWait != 0 && t.state == Ready && t.LaneKey == by.LaneKey
	old, begun := *t, by.rec.MaxWait != 0 && t.receipt.Token > 0
	t.LaneKey, t.rec, t.expired, t.steps, t.signals, t.cursor, t.awaits = by.LaneKey, by.rec, false, nil, nil, "", Receipt{}
	t.rec.Parents, t.rec.OnDead, t.rec.OnMissing = parents, onDead, onMissing
	if begun {
		t.expired = old.expired
		t.rec.RunAt, t.rec.Attempts, t.rec.Error, t.rec.RetryFirst = old.rec.RunAt, old.rec.Attempts, old.rec.Error, old.rec.RetryFirst
		t.rec.Crashes, t.rec.Suspect = old.rec.Crashes, old.rec.Suspect
		m.takeKey(t.id, &by.rec)
		if t.state == Ready {
			m.toReady(t, keys.MovedSince(keys.SinceMillis(t.since)))
		}
		return
	}
	if wait := by.rec.MaxWait; wait != 0 {
		by.rec.RunAt = min(by.rec.RunAt, m.shards[t.shard].mint.Sets.Made(keys.MintedAt(t.id))+wait)
		t.rec.RunAt = by.rec.RunAt
	}
	m.takeKey(t.id, &by.rec)
	if p := m.placeOf(t); p.Range == keys.Task && !keys.IsFirstPlace(p.At) { // perhaps it had gone on before
		if _, held := m.turns[t.rec.Group]; !held && m.waitsInGroup(t, t.rec.Group) && m.isFirst(t) {
			m.turns[t.rec.Group] = t.id
		} else if slices.Contains(m.woken, t) {
			t.on = 0
		}
	}
	switch {
	case t.state == Blocked && t.on == onParents:
	case by.rec.RunAt > m.Wall:
		m.toScheduled(t, by.rec.RunAt)
	case stays:
		m.enter(t, keys.MovedSince(keys.SinceMillis(t.since)))
	default:
		m.enter(t, m.since(t.shard))
	}
}

// Limits.

// leased counts leases of a limit's scope.
func (m *model) leased(scope uint64) (n int) {
	for _, t := range m.live {
		if t.state == Leased && t.rec.Limit == scope {
			n++
		}
	}
	for _, o := range m.orphans {
		if o.limit == scope {
			n++
		}
	}
	return n
}

// keyFull reports whether the limit of the task's key leaves no room.
func (m *model) keyFull(t *modelTask) bool {
	limit := m.settings[t.Queue].ConcurrencyPerKey
	return limit > 0 && t.rec.Limit != 0 && m.leased(t.rec.Limit) >= limit
}

// parks reports whether claims may park a task.
func (m *model) parks(t *modelTask) bool {
	return t.rec.Limit != 0 && m.settings[t.Queue].ConcurrencyPerKey > 0 || m.isHeld(t.rec.Group)
}

// isParked reports whether a claim has parked a task.
func (t *modelTask) isParked() bool {
	return t.state == Blocked && (t.on == onLimit || t.on == onOrphan)
}

// ready counts the ready tasks of a queue in a shard that claims may get, of a priority or a higher
// one.
func (m *model) ready(shard int, queue string, priority uint8) (n int) {
	if m.settings[queue].Paused {
		return 0
	}
	for _, t := range m.live {
		if t.state == Ready && t.shard == shard && t.Queue == queue && t.Priority >= priority && !m.keyFull(t) && !m.isHeld(t.rec.Group) {
			n++
		}
	}
	return n
}

// adoptParks reads from disk which tasks claims have parked, and which have room again. This
// depends on the lanes that the claims have read; the model does not follow them. adoptParks checks
// that no task waits while there is room.
func (m *model) adoptParks() {
	type use struct {
		queue          string
		parked, active int
	}
	uses := make(map[uint64]*use)
	for _, t := range m.live {
		scope, hasTurn := t.rec.Limit, t.rec.Group != 0 && m.turns[t.rec.Group] == t.id
		if scope == 0 && !hasTurn || t.state != Ready && t.state != Leased && !t.isParked() {
			continue
		}
		p, first := m.placeOf(t), keys.SinceOf(t.id)
		parked := p.Range == keys.Blocked && (p.At == scope || hasTurn && p.At == t.rec.Group)
		switch {
		case parked && p.At == scope:
			m.toBlocked(t, onLimit)
		case parked:
			if m.toBlocked(t, onOrphan); !m.isHeld(t.rec.Group) {
				m.rt.Fatalf("%+v has the turn of its group, and waits", t)
			}
		case t.state == Blocked && !parked && p.Range == keys.Task:
			m.toReady(t, p.At) // first in its lane, unless a call has moved it since
		case t.state == Ready && p.Range == keys.Task && p.At == first: // parked, and back again
			m.toReady(t, first)
		case t.state == Leased && p.Range == keys.Task && p.At == first:
			t.since = first
		}
		if scope == 0 {
			continue
		}
		u := uses[scope]
		if u == nil {
			u = &use{queue: t.Queue}
			uses[scope] = u
		}
		if t.state == Blocked && t.on == onLimit {
			u.parked++
		} else if t.state != Blocked {
			u.active++
		}
	}
	for scope, u := range uses {
		for _, o := range m.orphans {
			if o.limit == scope {
				u.active++
			}
		}
		limit := m.settings[u.queue].ConcurrencyPerKey
		if u.parked > 0 && (limit == 0 || u.active < limit) {
			m.rt.Fatalf("%d tasks of queue %s wait for limit %x of %d, with %d leased or ready", u.parked, u.queue, scope, limit, u.active)
		}
	}
}

// Schedules.

// modelSchedule is a schedule that ticks every so often.
type modelSchedule struct {
	name                string
	queue               string
	every, start, after uint64 // ms
	next, last          uint64
	missed              uint8
	payload             string
}

// tickText is the payload of a tick's task, and the time of the tick.
type tickText struct {
	payload string
	tick    uint64
}

// tick takes in the tasks that schedules have produced by now.
func (m *model) tick() {
	var due []tickText
	by := make(map[tickText]*modelSchedule)
	for _, s := range m.schedules {
		for s.next <= m.Wall {
			tick, late := s.next, recurrence.MissedAfter(s.every)
			if m.Wall-tick > late {
				switch s.missed {
				case recurrence.MissedSkip:
					s.pass(m.Wall - late - 1)
					continue
				case recurrence.MissedOnce:
					latest := m.Wall - late - 1
					tick = latest - (latest-s.start)%s.every
				}
			}
			due = append(due, tickText{s.payload, tick})
			by[due[len(due)-1]] = s
			s.last = tick
			s.pass(tick)
		}
	}
	if len(due) == 0 {
		return
	}
	found := make(map[tickText]keys.ID)
	m.eachStored(func(t *store.Task) {
		if text := t.Record.Headers[recurrence.TickHeader]; text != "" && m.tasks[t.ID] == nil { // a tick may come again
			found[tickText{string(t.Record.Payload), m.parseTick(text)}] = t.ID
		}
	})
	slices.SortFunc(due, func(a, b tickText) int {
		x, y := found[a], found[b]
		return bytes.Compare(x[:], y[:])
	})
	for _, d := range due {
		id, ok := found[d]
		if !ok {
			m.rt.Fatalf("tick %d of %q has no task", d.tick, d.payload)
		}
		s := by[d]
		n := spec{LaneKey{Queue: s.queue}, record.Record{Payload: []byte(s.payload), Headers: map[string]string{
			recurrence.TickHeader: recurrence.Text(d.tick), recurrence.ScheduleHeader: s.name,
		}}}
		m.admit(keys.ShardOfSchedule(s.name, m.config.Shards), n, id, nil, false)
	}
}

// pass marks all ticks up to a time as done.
func (s *modelSchedule) pass(after uint64) {
	s.after, s.next = after, s.start+((max(after, s.start)-s.start)/s.every+1)*s.every
}
